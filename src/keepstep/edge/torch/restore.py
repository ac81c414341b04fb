"""Restore: a verified state into live objects, and the proof that it arrived.

Three acts: `open_snapshot` compares shapes and names (`fits.py`) and touches nothing; `apply`
loads, random states last; `prove` gathers the live state again and compares every byte with the
source, because a `load_state_dict` may cast (torch's optimizers cast float state to the parameter's
type), drop or renumber.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch.beside import BUCKETS, gradient_names, write_beside
from keepstep.edge.torch.depth import as_deep_as_pickles
from keepstep.edge.torch.dtensors import is_dtensor
from keepstep.edge.torch.first_line import first_line
from keepstep.edge.torch.fits import check, grow, growth
from keepstep.edge.torch.in_place import (
    fill,
    fill_states,
    lies_within,
    loads_as_torch_does,
    overlaps_itself,
    state_names,
    takes,
)
from keepstep.edge.torch.made_with import made_with, unheeded
from keepstep.edge.torch.parts import bare, kind_of, parameters_of, state_of
from keepstep.edge.torch.plan import ABOUT, BESIDE
from keepstep.edge.torch.rng import write_rng
from keepstep.edge.torch.sealed import LiveBlocks
from keepstep.edge.torch.state import LOADERS, RNG, Protected
from keepstep.edge.torch.tree import local_part, rebuild
from keepstep.edge.torch.values import Refill, write_tensor
from keepstep.edge.torch.views import clone, differing, overlay
from keepstep.errors import LayoutError, UntrustedError
from keepstep.model.layout import Layout, Segment, TensorSpec
from keepstep.model.snapshot import SlotHeader
from keepstep.model.units import MIB

LARGE_BYTES = MIB  # to copy fewer takes no longer than to have a thread do it


@dataclass(frozen=True)
class Unpacked:
    """A state that fits, ready to be loaded. `about`: what it says of its parts; `same` and
    `are_plain`: see `Refill`; `lent`: memory that its tensors may look into, and no live one may
    when it is loaded."""

    tree: dict[str, Any]
    about: Mapping[str, Any]
    same: Mapping[int, int]
    are_plain: bool = False
    lent: tuple[int, int] = (0, 0)


@dataclass
class _Tensors(Sequence[torch.Tensor]):
    """A slot's tensors. What is copied into memory that is there looks into the slot the first time
    it is asked for; whoever asks again gets a copy of its own. `begun`: copies that threads make
    ahead, by their numbers."""

    slot: Slot
    segments: Sequence[Segment]
    copied_on_load: set[str]
    begun: Mapping[int, Future[torch.Tensor]]
    same: dict[int, int] = field(default_factory=dict)
    _given: dict[int, torch.Tensor] = field(default_factory=dict)
    _copies: dict[int, torch.Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.segments)

    def __getitem__(self, index: Any) -> Any:
        segment = self.segments[index]
        if segment.spec.name not in self.copied_on_load:
            if index not in self._given:
                begun = self.begun.get(index)
                made = clone(self.slot, segment) if begun is None else begun.result()
                self._given[index] = made
            return self._given[index]
        if index not in self._given:
            self._given[index] = overlay(self.slot, segment)
            return self._given[index]
        if index not in self._copies:
            copy = self._copies[index] = clone(self.slot, segment)
            self.same[copy.data_ptr()] = self._given[index].data_ptr()
        return self._copies[index]


@contextmanager
def _tensors_of(
    protected: Protected, slot: Slot, layout: Layout, threads: int
) -> Iterator[_Tensors]:
    """The large ones that nothing is copied from as it loads are copied by threads meanwhile."""
    on_load = _copied_on_load(protected, layout)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="load")
    try:
        begun = {
            index: pool.submit(clone, slot, segment)
            for index, segment in enumerate(layout.segments)
            if segment.spec.nbytes >= LARGE_BYTES and segment.spec.name not in on_load
        }
        yield _Tensors(slot, layout.segments, on_load, begun)
    finally:
        pool.shutdown(cancel_futures=True)


def open_snapshot(
    protected: Protected, slot: Slot, header: SlotHeader, layout: Layout, threads: int = 1
) -> Unpacked:
    """The state of a verified slot, checked against what is protected. Raises LayoutError, and
    UntrustedError for what the program does not know; changes nothing."""
    objects = bytes(slot.payload[layout.objects_offset : header.payload_bytes])
    with _tensors_of(protected, slot, layout, threads) as tensors:
        tree = rebuild(objects, tensors, protected.vocabulary, protected.meshes())
    about = tree.pop(ABOUT, None)
    try:
        check(protected, about, layout)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UntrustedError(
            f"{slot.path}: the saved state does not say what it is of in the way keepstep does: "
            f"{error!r}. Nothing is loaded"
        ) from error
    begin = slot.payload_address
    return Unpacked(tree, about, tensors.same, lent=(begin, begin + slot.capacity))


def caveats(protected: Protected) -> list[str]:
    """What in the training itself would keep a resumed run from being bit-equal to an undisturbed
    one; and, once a state is loaded, which edits of the program it has undone."""
    parts = protected.parts()
    edits = unheeded(protected.made_with, protected.made_with_before, made_with(parts))
    regrouping = [
        f"{path}: DistributedDataParallel regroups its gradient buckets after the first backward "
        "pass of a process, and with mixed precision or delayed sums that is not kept: a resumed "
        "run may differ in the last bits; find_unused_parameters=True keeps one grouping"
        for path in (() if protected.buckets is None else protected.buckets.not_kept)
    ]
    return [*regrouping, edits] if edits else regrouping


def _copied_on_load(protected: Protected, layout: Layout) -> set[str]:
    """Names of the tensors that are copied into memory that is there, or on a device."""
    names: set[str] = set()
    specs = {segment.spec.name: segment.spec for segment in layout.segments}
    for name, value in protected.parts().items():
        if isinstance(value, torch.nn.Module):
            module = bare(value)
            names.update(f"{name}.{k}" for k, _ in module.named_parameters(remove_duplicate=False))
            names.update(f"{name}.{k}" for k, _ in module.named_buffers(remove_duplicate=False))
        elif isinstance(value, torch.Tensor):
            names.add(name)
        elif isinstance(value, torch.optim.Optimizer) and loads_as_torch_does(value):
            names.update(_of_one_look(state_names(name, value), specs))
            for index, parameter in enumerate(parameters_of(value)):
                if parameter.device.type != "cpu":
                    prefix = f"{name}.state.{index}."
                    own = (key for key in specs if key.startswith(prefix))
                    names.update(key for key in own if "." not in key[len(prefix) :])
    names.update(_of_one_look(gradient_names(protected.parts()), specs))
    return names


def _of_one_look(
    live: Mapping[str, torch.Tensor], specs: Mapping[str, TensorSpec]
) -> Iterator[str]:
    """Those whose saved tensor is of the same type and shape on this rank."""
    for name, tensor in live.items():
        local, spec = local_part(tensor), specs.get(name)
        if spec is not None and spec.shape == tuple(local.shape):  # noqa: SIM102
            if f"torch.{spec.dtype}" == str(local.dtype):
                yield name


def private_bytes(protected: Protected, layout: Layout) -> int:
    """How much memory of the host a restore needs besides what is live already."""
    on_load = _copied_on_load(protected, layout)
    return sum(s.spec.nbytes for s in layout.segments if s.spec.name not in on_load)


def apply(protected: Protected, opened: Unpacked) -> list[str]:
    """Load a tree into the live objects, random states last. Returns remarks about what could not
    be set. Raises LayoutError naming the part that refuses what was saved; UntrustedError before
    anything is loaded."""
    tree, refill = opened.tree, Refill(opened.same, opened.are_plain)
    parts = protected.parts()
    buckets = protected.buckets
    grouped = {} if buckets is None else buckets.checked(tree.get(BESIDE, {}).get(BUCKETS, {}))
    for name, part in parts.items():
        if isinstance(part, torch.optim.Optimizer):
            wanted = growth(protected, name, opened.about)
            if wanted is not None:
                grow(part, wanted)
    for name, part in parts.items():
        _attempt(name, lambda name=name, part=part: _load(part, tree[name], refill))  # type: ignore[misc]
        if isinstance(part, torch.optim.Optimizer):
            _give_back(part, *opened.lent)
    with as_deep_as_pickles():
        for name in protected.values:
            protected.values[name] = refill.top(name, protected.values[name], tree[name])
    protected.loaders.load_state_dict(tree.get(LOADERS, {}))
    remarks = refill.replaced
    if BESIDE in tree:
        if buckets is not None:  # before gradients come back: they lie in the buckets
            remarks = remarks + buckets.restore(grouped)
        write_beside(parts, tree[BESIDE], protected.used_gradients)
    protected.made_with_before = opened.about.get("made_with", {})
    return remarks + (write_rng(tree[RNG]) if RNG in tree else [])


def _attempt(name: str, load: Callable[[], None]) -> None:
    try:
        load()
    except (RuntimeError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise LayoutError(
            f"{name}: its load_state_dict does not take what its state_dict gave: "
            f"{type(error).__name__}: {first_line(error)}. The snapshot is kept; mend the "
            "program, or use another job name, or start over with KEEPSTEP_FRESH=1"
        ) from error


def _load(part: Any, saved: Any, refill: Refill) -> None:
    if isinstance(part, torch.nn.Module):
        _load_module(bare(part), saved, refill)
    elif isinstance(part, torch.optim.Optimizer):
        _load_optimizer(part, saved, refill)
    elif isinstance(part, torch.Tensor):
        write_tensor(part, saved)
        refill.loaded(saved, part)
    elif isinstance(part, torch.Generator):
        part.set_state(saved["state"])
    else:
        if isinstance(part, torch.amp.GradScaler) and part.is_enabled():
            # It makes its scale when it is first used, and gradients that wait for an update were
            # scaled in another process.
            part.scale(torch.zeros(1, device=part._device))
        part.load_state_dict(saved)
        _own(state_of(part), refill)


def _own(state: Any, refill: Refill) -> None:
    """No value is written over a part's tensors."""
    if isinstance(state, torch.Tensor):
        refill.belongs(state)
    elif isinstance(state, (dict, list, tuple)):
        for value in state.values() if isinstance(state, dict) else state:
            _own(value, refill)


def _load_module(module: torch.nn.Module, saved: dict[str, Any], refill: Refill) -> None:
    _make_buffers(module, saved)
    live: dict[str, Any] = dict(module.named_buffers(remove_duplicate=False))
    live.update(module.named_parameters(remove_duplicate=False))
    ahead = [(live[k], value) for k, value in saved.items() if takes(live.get(k), value)]
    fill(ahead)
    there = {id(value): tensor for tensor, value in ahead}
    given: dict[str, Any] = OrderedDict((k, there.get(id(v), v)) for k, v in saved.items())
    if hasattr(saved, "_metadata"):  # versions of the modules' states
        given._metadata = saved._metadata  # type: ignore[attr-defined]
    module.load_state_dict(given)
    live = dict(module.named_buffers(remove_duplicate=False))
    live.update(module.named_parameters(remove_duplicate=False))
    for key, tensor in live.items():
        refill.belongs(tensor)
        refill.loaded(saved.get(key), tensor)


def _make_buffers(module: torch.nn.Module, saved: Mapping[str, Any]) -> None:
    """Buffers that have grown or come into being while the program trained, and expanded ones,
    which nothing can be written to: new memory for them. Those that were given up go."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    live = dict(module.named_buffers(remove_duplicate=False))
    kept = {key for key in live if _is_persistent(module, key)}
    for key, tensor in saved.items():
        if key in parameters or not isinstance(tensor, torch.Tensor):
            continue
        now = live.get(key)
        if now is None or not _takes(now, tensor):
            owner, name = _owner(module, key)
            if owner is not None:
                device = tensor.device if now is None else now.device
                made = tensor if is_dtensor(tensor) else tensor.to(device, copy=True)
                owner.register_buffer(name, made)
    for key in kept - saved.keys():
        owner, name = _owner(module, key)
        if owner is not None:
            owner._buffers[name] = None


def _takes(live: torch.Tensor, saved: torch.Tensor) -> bool:
    """Whether the saved bytes can be written into the live memory."""
    if any(t.layout is not torch.strided or t.is_nested for t in (live, saved)):
        return False  # as many values as the saved one has
    is_alike = (live.shape, live.dtype) == (saved.shape, saved.dtype)
    return is_alike and not overlaps_itself(local_part(live))


def _owner(module: torch.nn.Module, key: str) -> tuple[torch.nn.Module | None, str]:
    path, _, name = key.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        return None, name
    is_taken = name in owner._parameters or name in owner._modules
    is_ours = name in owner._buffers or not hasattr(owner, name)
    return (owner, name) if is_ours and not is_taken and name != "_extra_state" else (None, name)


def _is_persistent(module: torch.nn.Module, key: str) -> bool:
    path, _, name = key.rpartition(".")
    return name not in module.get_submodule(path)._non_persistent_buffers_set


def _load_optimizer(
    optimizer: torch.optim.Optimizer, saved: dict[str, Any], refill: Refill
) -> None:
    parameters = parameters_of(optimizer)
    if loads_as_torch_does(optimizer):
        for live, value in fill_states(optimizer, saved["state"]):
            refill.loaded(value, live)
    optimizer.load_state_dict(saved)
    for index, state in saved["state"].items():
        if not isinstance(index, int):
            continue
        for key, value in state.items():  # undo the cast to the parameter's type, which loses bits
            live = optimizer.state[parameters[index]].get(key)
            if isinstance(live, torch.Tensor) and live.dtype != value.dtype:
                optimizer.state[parameters[index]][key] = value.to(live.device)
    _own(optimizer.state_dict(), refill)


def _give_back(optimizer: torch.optim.Optimizer, begin: int, end: int) -> None:
    """What still looks into the memory that was lent becomes the optimizer's own."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if lies_within(value, begin, end):
                state[key] = value.clone()


def prove(
    protected: Protected, slot: Slot, header: SlotHeader, layout: Layout, threads: int = 1
) -> list[str]:
    """The modules', optimizers' and plain tensors whose live bytes are not those that were sealed,
    each by its name and in what it differs; empty means proven. Raises DamageError or LookupError
    when the slot is no more what was loaded."""
    free = tuple(
        f"{name}." for name, part in protected.parts().items() if kind_of(part) == "stateful"
    )
    live = {i.spec.name: i.local for i in protected.gather().items}
    segments = [s for s in layout.segments if not s.spec.name.startswith(free)]
    missing = [f"{s.spec.name}: saved, and not live" for s in segments if s.spec.name not in live]
    present = [s for s in segments if s.spec.name in live]
    named = {s.spec.name: live[s.spec.name] for s in present}
    if not missing and LiveBlocks(slot, header, layout, named).are_sealed(threads):
        return []
    wrong = missing + differing(slot, present, list(named.values()))
    slot.verify()  # that it is not the slot which has changed
    return wrong
