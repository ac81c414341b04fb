"""Restore: a verified state into live objects, and the proof that it arrived.

Three acts: `check` compares shapes and names and touches nothing; `apply` loads, random states
last; `prove` gathers the live state again and compares every byte with the source, because a
`load_state_dict` may cast (torch's optimizers cast float state to the parameter's type), drop or
renumber.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch.rng import write_rng
from keepstep.edge.torch.state import LOADERS, RNG, Protected, bare, kind_of, parameters_of, rebuild
from keepstep.edge.torch.views import clone, differing, overlay
from keepstep.errors import LayoutError
from keepstep.model.layout import Layout, Segment, Shard, difference
from keepstep.model.snapshot import SlotHeader


def open_snapshot(
    protected: Protected, slot: Slot, header: SlotHeader, layout: Layout
) -> dict[str, Any]:
    """The state tree of a verified slot, checked against what is protected. Raises LayoutError;
    changes nothing.

    Modules' tensors look into the slot (loading copies them); all others are private.
    """
    objects = bytes(slot.payload[layout.objects_offset : header.payload_bytes])
    copied = _copied_on_load(protected)
    tensors = [
        _marked(overlay(slot, s) if s.spec.name in copied else clone(slot, s), s)
        for s in layout.segments
    ]
    tree, about = rebuild(objects, tensors)
    check(protected, about, layout)
    return tree


def caveats(protected: Protected, world_size: int) -> list[str]:
    """What in the training itself would keep a resumed run from being bit-equal to an undisturbed
    one."""
    return [
        f"{name}: DistributedDataParallel regroups its gradient buckets after the first "
        "backward pass of a process, "
        f"so with {world_size} ranks a resumed run may differ in the last bits "
        "from an undisturbed one; find_unused_parameters=True keeps one grouping"
        for name, value in protected.objects.items()
        if isinstance(value, torch.nn.parallel.DistributedDataParallel)
        and world_size > 2
        and not value.find_unused_parameters
    ]


def check(protected: Protected, about: dict[str, Any], layout: Layout) -> None:
    """Raises LayoutError naming what was expected and what was found."""
    check_kinds(protected, about)
    kinds = protected.about()["kinds"]
    strict = tuple(f"{name}." for name, kind in kinds.items() if kind == "module")
    exact = {name for name, kind in kinds.items() if kind == "tensor"}
    _refuse(
        difference(_only(protected.gather().layout, strict, exact), _only(layout, strict, exact))
    )


def check_kinds(protected: Protected, about: Mapping[str, Any]) -> None:
    """The part of `check` that needs no layout: which things there are, and the optimizers'
    parameters. Raises LayoutError."""
    live = protected.about()
    problems = []
    for name in sorted(live["kinds"].keys() | about["kinds"].keys()):
        want, found = (kinds.get(name, "nothing") for kinds in (live["kinds"], about["kinds"]))
        if want != found:
            problems.append(f"{name}: expected {want}, found {found}")
    for name, shapes in live["optimizer_parameters"].items():
        saved = about["optimizer_parameters"].get(name, shapes)
        if saved != shapes:
            at = next(
                (i for i, (a, b) in enumerate(zip(shapes, saved, strict=False)) if a != b),
                min(len(shapes), len(saved)),
            )
            want, found = (
                f"{s[at][0]}{s[at][1]}" if at < len(s) else "none" for s in (shapes, saved)
            )
            problems.append(
                f"{name}: expected {len(shapes)} parameters, found {len(saved)}; the first "
                f"difference is number {at}: {want}, {found}"
            )
    _refuse(problems)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise LayoutError(
            "the saved state does not fit what is protected now: " + "; ".join(problems)
        )


def _only(layout: Layout, prefixes: tuple[str, ...], exact: set[str]) -> Layout:
    kept = tuple(
        s for s in layout.segments if s.spec.name.startswith(prefixes) or s.spec.name in exact
    )
    return Layout(kept, layout.objects_offset)


def _copied_on_load(protected: Protected) -> set[str]:
    """Names of the tensors that `Module.load_state_dict` copies into memory the module already
    has."""
    names: set[str] = set()
    for name, value in protected.objects.items():
        if isinstance(value, torch.nn.Module):
            module = bare(value)
            names.update(f"{name}.{k}" for k, _ in module.named_parameters(remove_duplicate=False))
            names.update(f"{name}.{k}" for k, _ in module.named_buffers(remove_duplicate=False))
        elif isinstance(value, torch.Tensor):
            names.add(name)
    return names


def _marked(tensor: torch.Tensor, segment: Segment) -> torch.Tensor:
    tensor._keepstep_shard = segment.spec.shard  # type: ignore[attr-defined]
    return tensor


def _like(saved: Any, live: Any) -> Any:
    """`saved` as a DTensor placed as `live` is, when it is the local part of one."""
    shard: Shard | None = getattr(saved, "_keepstep_shard", None)
    if shard is None or not isinstance(live, DTensor):
        return saved
    local = saved.to(live.device)
    return DTensor.from_local(
        local,
        live.device_mesh,
        live.placements,
        run_check=False,
        shape=live.shape,
        stride=live.stride(),
    )


def apply(protected: Protected, tree: dict[str, Any]) -> list[str]:
    """Load a tree into the live objects, random states last. Returns remarks about what could not
    be set."""
    for name, value in protected.objects.items():
        if isinstance(value, torch.nn.Module):
            _load_module(bare(value), tree[name])
        elif isinstance(value, torch.optim.Optimizer):
            _load_optimizer(value, tree[name])
        elif isinstance(value, torch.Tensor):
            with torch.no_grad():
                value.copy_(_like(tree[name], value))
        else:
            value.load_state_dict(tree[name])
    for name in protected.values:
        protected.values[name] = _into(protected.values[name], tree[name])
    protected.loaders.load_state_dict(tree.get(LOADERS, {}))
    return write_rng(tree[RNG]) if RNG in tree else []


def _load_module(module: torch.nn.Module, saved: dict[str, Any]) -> None:
    live = module.state_dict()
    for key, tensor in saved.items():
        saved[key] = _like(tensor, live.get(key))
    module.load_state_dict(saved)


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    parameters = parameters_of(optimizer)
    for index, state in saved["state"].items():
        for key, value in state.items():
            state[key] = _like(value, parameters[index])
    optimizer.load_state_dict(saved)
    for index, state in saved["state"].items():
        for key, value in state.items():  # undo the cast to the parameter's type, which loses bits
            live = optimizer.state[parameters[index]].get(key)
            if isinstance(live, torch.Tensor) and live.dtype != value.dtype:
                optimizer.state[parameters[index]][key] = value.to(live.device)


def _into(live: Any, saved: Any) -> Any:
    """Put a plain value back: in place where the user may hold a reference, else the saved one
    itself."""
    if type(live) is not type(saved):
        return saved
    if isinstance(live, dict):
        live.clear()
        live.update(saved)
    elif isinstance(live, (list, bytearray)):
        live[:] = saved
    elif isinstance(live, set):
        live.clear()
        live |= saved
    elif isinstance(live, torch.Generator):
        live.set_state(saved.get_state())
    elif isinstance(live, random.Random):
        live.setstate(saved.getstate())
    elif hasattr(live, "bit_generator"):  # numpy's
        live.bit_generator.state = saved.bit_generator.state
    elif (
        hasattr(live, "__dict__")
        and not callable(live)
        and getattr(type(live), "__reduce__", None) is object.__reduce__
    ):
        live.__dict__.clear()
        live.__dict__.update(copy.copy(saved.__dict__))
    else:
        return saved
    return live


def prove(protected: Protected, slot: Slot, layout: Layout) -> list[str]:
    """Names of the modules', optimizers' and plain tensors whose live bytes are not the snapshot's;
    empty means proven."""
    checked = {name for name, value in protected.objects.items() if kind_of(value) != "stateful"}
    live = {i.spec.name: i.local for i in protected.gather().items}
    segments = [s for s in layout.segments if s.spec.name.split(".", 1)[0] in checked]
    missing = [s.spec.name for s in segments if s.spec.name not in live]
    present = [s for s in segments if s.spec.name in live]
    return missing + differing(slot, present, [live[s.spec.name] for s in present])
