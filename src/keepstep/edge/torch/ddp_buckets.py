"""DDP buckets: in which groups DistributedDataParallel sums gradients, the same in every life.

DDP begins with a grouping by the order of parameters, and after a process's first backward pass it
takes the order in which gradients came. Three or more addends are summed in an order that depends
on where in a bucket they lie, so a resumed run would differ from an undisturbed one in the last
bits. Hence the later grouping is state: it is kept with each snapshot, and who resumes makes its
reducer with it at once. Its own first backward pass then finds the same order again.

With two ranks there is one order only, and nobody asks.

Invariant: what a rank's reducer is after a restore follows from the snapshot and the program alone,
so it is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from keepstep.edge.torch.instances import instances
from keepstep.edge.torch.parts import bare
from keepstep.errors import UntrustedError

FEWEST_RANKS = 3  # of two addends there is one sum
_torch: Any = dist  # what of it has no public name
INDICES = "rebuilt_per_bucket_param_indices"  # in what torch logs of a reducer

Grouping = list[list[int]]  # of each bucket the numbers of its parameters, in their order

# Of each DDP how often its reducer was made anew here, and with which grouping; and the one of the
# state that was last restored. Nobody holds a reducer: it would keep its hooks.
_made: WeakKeyDictionary[DistributedDataParallel, tuple[int, Grouping | None]] = WeakKeyDictionary()
_restored: WeakKeyDictionary[DistributedDataParallel, Grouping] = WeakKeyDictionary()


class Buckets:
    """Of every DDP around a module of `parts`, by the module's path. `known`: how they group, those
    that do not begin any more; `changes`: how often that has changed."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        around = {path: ddp for path, ddp in wrapping(parts) if regroups(ddp)}
        self._wrapped = {path: ddp for path, ddp in sorted(around.items()) if _is_plain(ddp)}
        self.not_kept = sorted(around.keys() - self._wrapped.keys())
        self._told: dict[str, int] = {}  # whose reducer torch has told of, by its number
        self.known: dict[str, Grouping] = {}
        self.changes = 0

    def look(self) -> None:
        """At those that may have regrouped: torch tells of it from the third pass on."""
        for path, ddp in self._wrapped.items():
            number, made_with = _made.get(ddp, (0, None))
            if self._told.get(path) == number:
                continue
            words = ddp._get_ddp_logging_data().get(INDICES)
            if words:
                self._told[path] = number
            grouping = _read(words) if words else made_with
            if self.known.get(path) != grouping:
                self.known.pop(path, None)
                if grouping is not None:
                    self.known[path] = grouping
                self.changes += 1

    def checked(self, saved: Any) -> dict[str, Grouping]:
        """Of what was saved, those of these DDPs. Raises UntrustedError; changes nothing."""
        if not isinstance(saved, dict):
            raise UntrustedError(f"expected groupings by path, found {type(saved).__name__}")
        return {path: _checked(path, saved[path]) for path in self._wrapped if path in saved}

    def restore(self, wanted: Mapping[str, Grouping]) -> list[str]:
        """Group as those did who saved it. Returns remarks about what the program does not have any
        more."""
        remarks = []
        self.look()
        for path, ddp in self._wrapped.items():
            _restored.pop(ddp, None)
            grouping = wanted.get(path)
            if grouping is None:
                continue
            _restored[ddp] = grouping
            if self.known.get(path) != grouping and not make_reducer(ddp, grouping):
                count = sum(map(len, grouping))
                remarks.append(
                    f"{path}: gradients are grouped anew: not {count} parameters learn any more"
                )
        self.look()
        return remarks


def wrapping(parts: Mapping[str, Any]) -> list[tuple[str, DistributedDataParallel]]:
    """Every DDP of this process around one of these modules, or around one inside them, with that
    module's path."""
    names = {
        id(module): f"{path}.{name}" if name else path
        for path, part in parts.items()
        if isinstance(part, torch.nn.Module)
        for name, module in bare(part).named_modules()
    }
    found = []
    for ddp in instances(DistributedDataParallel):
        # what is compiled and then wrapped is known by the module in it
        name = names.get(id(ddp.module)) or names.get(id(bare(ddp.module)))
        if name is not None:
            found.append((name, ddp))
    return found


def renew_reducer(ddp: DistributedDataParallel) -> None:
    """As it is in a process that has just restored what this one has."""
    make_reducer(ddp, _restored.get(ddp))


def regroups(ddp: DistributedDataParallel) -> bool:
    """After the first backward pass."""
    return bool(ddp.static_graph or not ddp.find_unused_parameters)


def make_reducer(ddp: DistributedDataParallel, grouping: Grouping | None = None) -> bool:
    """A new one, as unpickling makes one; the old one takes its hooks and its memory with it.
    Whether the grouping was taken: one of another number of parameters is not."""
    with _learning_as_at_construction(ddp):
        parameters, expect_sparse = ddp._build_params_for_reducer()
        names = ddp._build_debug_param_to_name_mapping(parameters)
        is_of_these = grouping is not None and sum(map(len, grouping)) == len(parameters)
        ddp.reducer = ddp.logger = None  # type: ignore[assignment]
        with _grouped(grouping if is_of_these else None, ddp.bucket_bytes_cap):
            ddp._ddp_init_helper(parameters, expect_sparse, names, ddp.static_graph)
    _made[ddp] = (_made.get(ddp, (0, None))[0] + 1, grouping if is_of_these else None)
    reducer: Any = ddp.reducer
    if ddp.static_graph:
        reducer._set_static_graph()
        ddp.logger._set_static_graph()  # type: ignore[attr-defined]
    for hook, state in ddp._comm_hooks:
        _torch._register_comm_hook(reducer, state, hook)
    return is_of_these


def _is_plain(ddp: DistributedDataParallel) -> bool:
    """Whether a reducer is all there is to make anew."""
    return (
        ddp.mixed_precision is None
        and not getattr(ddp, "_delay_all_reduce_params", None)
        and not getattr(ddp, "_use_python_reducer", False)
    )


@contextmanager
def _learning_as_at_construction(ddp: DistributedDataParallel) -> Iterator[None]:
    """A reducer takes what requires a gradient. In a newcomer that is what did so when the model
    was wrapped, whatever was frozen since."""
    buckets = ddp.reducer._get_zeros_like_grad_buckets()  # zeros, but of the reducer's parameters
    learning = {id(parameter) for bucket in buckets for parameter in bucket.parameters()}
    del buckets
    today = [(parameter, parameter.requires_grad) for parameter in ddp.module.parameters()]
    try:
        for parameter, _ in today:
            parameter.requires_grad_(id(parameter) in learning)
        yield
    finally:
        for parameter, requires_grad in today:
            parameter.requires_grad_(requires_grad)


@contextmanager
def _grouped(grouping: Grouping | None, cap_bytes: int) -> Iterator[None]:
    """DDP asks torch how to group, and turns the answer round: it gets this one."""
    asked = _torch._compute_bucket_assignment_by_size
    if grouping is not None:
        turned = ([list(bucket) for bucket in reversed(grouping)], [cap_bytes] * len(grouping))
        _torch._compute_bucket_assignment_by_size = lambda *_: turned
    try:
        yield
    finally:
        _torch._compute_bucket_assignment_by_size = asked


def _read(words: str) -> Grouping:
    """Such as `5 4 3 2, 1 0`."""
    return [[int(number) for number in bucket.split()] for bucket in words.split(",")]


def _checked(path: str, grouping: Any) -> Grouping:
    is_grouping = isinstance(grouping, list) and all(
        isinstance(bucket, list) and bucket and all(type(number) is int for number in bucket)
        for bucket in grouping
    )
    numbers = sorted(number for bucket in grouping for number in bucket) if is_grouping else []
    if not is_grouping or numbers != list(range(len(numbers))):
        raise UntrustedError(
            f"{path}: expected the numbers of DistributedDataParallel's parameters in their "
            "buckets, each once, and found something else. Nothing of it is used"
        )
    return grouping
