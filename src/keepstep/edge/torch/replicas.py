"""Replicas: which tensors of a state other ranks have, too, as far as the program says so.

Comes in: the protected parts, and where each tensor lies in a snapshot. Goes out: the tensors that
DistributedDataParallel or a DTensor's `Replicate` placement keeps equal on several ranks, and the
optimizer state that belongs to them. Where nothing says so, parameters and optimizer state of all
ranks are candidates: whether they are replicas shows when they turn out to be equal, or not
(`core/detection/replicas.py`). Buffers are nobody's: batch statistics are each rank's own.

Of several sets of ranks the one with the most bytes is taken, with the tensors that at least those
ranks share. Compares nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from keepstep.edge.torch.dtensors import is_dtensor
from keepstep.edge.torch.parts import bare, parameters_of
from keepstep.edge.torch.plan import STATE
from keepstep.edge.torch.state import Protected, State
from keepstep.edge.torch.tree import StateItem
from keepstep.model.layout import Layout, Segment
from keepstep.model.replicas import Replicas, ranks_in_words
from keepstep.model.units import counted, human_bytes

# Hooks of torch's own, after which all ranks have the same gradients. Others may leave each rank
# its own, as those of local SGD do.
EQUALIZERS = frozenset(
    {
        "allreduce_hook",
        "keepstep_allreduce_hook",
        "fp16_compress_hook",
        "bf16_compress_hook",
        "powerSGD_hook",
        "batched_powerSGD_hook",
    }
)

Ranks = tuple[int, ...]


class ReplicaFinder:
    """Of one rank's state. What is found is kept for as long as the layout is the same."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._layout: Layout | None = None  # that was looked at last
        self._ddps: list[DistributedDataParallel] = []
        self._hooks: list[int] = []  # how many each of them had
        self._found: Replicas | None = None

    def find(self, protected: Protected, state: State) -> Replicas | None:
        """Of what was gathered."""
        if self._world_size == 1:
            return None
        if state.layout is not self._layout or self._count_hooks() != self._hooks:
            parts = protected.parts()
            self._layout = state.layout
            self._ddps = [ddp for _, ddp in _ddps(parts)]
            self._hooks = self._count_hooks()
            self._found = self._find(parts, state.items, state.layout)
        # The last forward pass was within `no_sync`, or an evaluation: nobody says that this step's
        # update was the same on all ranks.
        if not all(getattr(ddp, "require_forward_param_sync", True) for ddp in self._ddps):
            return None
        return self._found

    def _count_hooks(self) -> list[int]:
        return [len(ddp._comm_hooks) for ddp in self._ddps]

    def _find(
        self, parts: Mapping[str, Any], items: Sequence[StateItem], layout: Layout
    ) -> Replicas | None:
        claims = dict(_claims(parts))
        shared: dict[int, Ranks] = {}  # by the segment's number
        for index, item in enumerate(items):
            ranks = claims.get(item.spec.name) or _replicated_over(item, self._rank)
            if ranks is not None and self._rank in ranks and len(ranks) > 1:
                shared[index] = ranks
        if shared:
            sizes: dict[Ranks, int] = {}
            for index, ranks in shared.items():
                sizes[ranks] = sizes.get(ranks, 0) + items[index].spec.nbytes
            ranks = max(sizes, key=lambda one: (sizes[one], len(one)))
            chosen = [i for i, have in shared.items() if set(have) >= set(ranks)]
            how = "DistributedDataParallel or DTensor placements say so"
            return _make(ranks, chosen, layout, is_claimed=True, how=how)
        everybody = tuple(range(self._world_size))
        names = set(_candidates(parts))
        chosen = [i for i, item in enumerate(items) if item.spec.name in names]
        how = "nobody says so: they count as that once they were equal at several steps"
        return _make(everybody, chosen, layout, is_claimed=False, how=how) if chosen else None


def _make(
    ranks: Ranks, chosen: Sequence[int], layout: Layout, is_claimed: bool, how: str
) -> Replicas:
    segments = [layout.segments[index] for index in chosen]
    spans = tuple(_spans(segments))
    nbytes = sum(size for _, size in spans)
    what = f"{counted(len(chosen), 'tensor')} ({human_bytes(nbytes)})"
    verb = "are" if is_claimed else "may be"
    why = f"{what} {verb} the same on ranks {ranks_in_words(ranks)}: {how}"
    group = _group(ranks, segments, is_claimed)
    return Replicas(ranks, group, tuple(chosen), spans, is_claimed, why)


def _group(ranks: Ranks, segments: Iterable[Segment], is_claimed: bool) -> int:
    """Equal on ranks whose digests are of the same tensors, in the same places."""
    specs = [
        (s.spec.name, s.spec.dtype, s.spec.shape, s.spec.stride, s.offset, s.spec.nbytes)
        for s in segments
    ]
    text = json.dumps([ranks, is_claimed, specs])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") | 1


def _spans(segments: Iterable[Segment]) -> Iterator[tuple[int, int]]:
    """Where they lie. What lies behind each other is one span: so most blocks that have a checksum
    lie in one as a whole."""
    at, end = 0, 0
    for segment in segments:
        if segment.offset != end:
            if end > at:
                yield at, end - at
            at = segment.offset
        end = segment.end
    if end > at:
        yield at, end - at


def _ddps(parts: Mapping[str, Any]) -> Iterator[tuple[str, DistributedDataParallel]]:
    """Those among the parts, also inside torch.compile's wrapper."""
    for path, part in parts.items():
        module = part
        while isinstance(module, torch.nn.Module) and hasattr(module, "_orig_mod"):
            module = module._orig_mod
        if isinstance(module, DistributedDataParallel):
            yield path, module


def _claims(parts: Mapping[str, Any]) -> Iterator[tuple[str, Ranks]]:
    """What DistributedDataParallel keeps equal, by the names of a state's tensors."""
    ranks_of: dict[int, Ranks] = {}  # by the parameter's id
    for path, ddp in _ddps(parts):
        if not all(getattr(hook, "__name__", "") in EQUALIZERS for hook, _ in ddp._comm_hooks):
            continue
        ranks = tuple(dist.get_process_group_ranks(ddp.process_group))
        for name, parameter in bare(ddp).named_parameters(remove_duplicate=False):
            if name not in ddp.parameters_to_ignore:
                ranks_of[id(parameter)] = ranks
                yield f"{path}.{name}", ranks
    for name, owner in _optimizer_states(parts):
        if id(owner) in ranks_of:
            yield name, ranks_of[id(owner)]


def _candidates(parts: Mapping[str, Any]) -> Iterator[str]:
    """The names of parameters and of the optimizers' tensors."""
    for path, part in parts.items():
        if isinstance(part, torch.nn.Module):
            for name, parameter in bare(part).named_parameters(remove_duplicate=False):
                if not is_dtensor(parameter):
                    yield f"{path}.{name}"
    for name, owner in _optimizer_states(parts):
        if not is_dtensor(owner):
            yield name


def _optimizer_states(parts: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The name of each tensor that an optimizer keeps, as its state dict numbers it, and the
    parameter it belongs to."""
    for path, part in parts.items():
        if isinstance(part, torch.optim.Optimizer):
            for number, parameter in enumerate(parameters_of(part)):
                for key, value in part.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        yield f"{path}.{STATE}.{number}.{key}", parameter


def _replicated_over(item: StateItem, rank: int) -> Ranks | None:
    """The ranks that have the same part of a DTensor as this one; None where it is no DTensor, or
    where its parts are still to be added."""
    whole = item.whole
    if whole is None or any(placement.is_partial() for placement in whole.placements):
        return None
    mesh = whole.device_mesh
    place = mesh.get_coordinate()
    if place is None:
        return None
    where = tuple(
        slice(None) if placement.is_replicate() else at
        for placement, at in zip(whole.placements, place, strict=True)
    )
    return tuple(mesh.mesh[where].flatten().tolist())
