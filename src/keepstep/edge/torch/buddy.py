"""Buddy: one rank's local gradient, computed a second time by another rank and compared bit for
bit before anything is updated with it.

    compute(model, batch)          backward, buckets reduced       optimizer's pre-step hook
    checked: remembers batch,  ->  checked: checksums of its   ->  checked sends both to its buddy,
      random states, buffers         gradients in the buckets        which computes and compares;
                                                                     all hear what came of it

Where the gradients of a DistributedDataParallel are taken is its communication hook: behind
everything that a rank computes alone, right before the sum. The hook reduces as torch's own
`allreduce_hook` does.

Costs in a checked step a forward and a backward pass of one rank, while the others wait, and the
batch on its way. Decides nothing: `core/detection/buddies.py` does. Invariant: gradients, random
states, buffers and modes are afterwards as they were.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from keepstep.coding.checksum import checksum
from keepstep.edge.torch.rng import read_rng, tensors_of, write_rng
from keepstep.errors import ConfigError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

Pair = tuple[int, int]  # places in the group: who is checked, and by whom
Compute = Callable[[torch.nn.Module, Any], torch.Tensor]
SKIPPED = -1  # in place of a number of gradients that differ


class BuddyHost(Protocol):
    """The job whose steps these are."""

    def buddy_step(self) -> int:
        """The step that is being computed."""

    def buddy_pair(self, size: int) -> Pair | None:
        """Of so many ranks, who is checked in this step and by whom, by their places; None when
        nobody is. The same on all ranks."""

    def buddy_peers(self) -> None:
        """Raises PeerLost when what collectives gave in this step is worthless."""

    def buddy_heard(self, found: Found) -> None:
        """How a check went, as all ranks hear it. Raises CorruptionError in the rank that is to
        end."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a check came to: ranks of the whole job, the step, the names of parameters whose
    gradients differ, if any do, and how many there are."""

    step: int
    checked: int
    buddy: int
    names: tuple[str, ...]
    total: int


@dataclass
class _Taken:
    """Of the step that is checked."""

    pair: Pair
    step: int
    batch: list[torch.Tensor]
    random: list[torch.Tensor]
    buffers: list[torch.Tensor] = field(default_factory=list)
    sums: dict[int, int] = field(default_factory=dict)  # by the parameter's id
    passes: int = 0


class Buddy:
    """Made by `Job.buddy`; call it where the loss is computed."""

    def __init__(self, host: BuddyHost, model: Any, compute: Compute, rank: int) -> None:
        """Raises ConfigError when the model is not wrapped, or has a hook of its own."""
        if not isinstance(model, DistributedDataParallel):
            raise ConfigError(
                "buddy(): expected the DistributedDataParallel model that is trained, found a "
                f"{type(model).__name__}"
            )
        if model._comm_hooks:
            raise ConfigError(
                "buddy(): expected a model without a communication hook, found one: gradients are "
                "taken there"
            )
        self._host, self._ddp, self._compute = host, model, compute
        self.group = model.process_group
        self._ranks: Sequence[int] = dist.get_process_group_ranks(self.group)
        self._place = list(self._ranks).index(rank)
        self._learning = [
            (name, p) for name, p in model.module.named_parameters() if p.requires_grad
        ]
        self._taken: _Taken | None = None
        self._template: Any = None  # a batch of this rank's: all ranks' are made alike
        model.register_comm_hook(self, keepstep_allreduce_hook)
        model.module.register_forward_pre_hook(self._before_forward)

    def __call__(self, batch: Any) -> torch.Tensor:
        """The loss of this batch, as `compute` gives it. In a step in which somebody is checked
        what it was computed from is remembered."""
        tensors = list(_flat(batch))
        step = self._host.buddy_step()
        taken = self._taken
        if taken is not None and taken.step == step:
            taken.passes += 1  # gradients of several batches are added: nobody can tell them apart
        else:
            pair = self._host.buddy_pair(len(self._ranks))
            self._taken = None
            if pair is not None:
                random = _random_tensors()
                self._taken = _Taken(pair, step, [t.clone() for t in tensors], random)
                self._template = batch
        return self._compute(self._ddp, batch)

    def _before_forward(self, module: torch.nn.Module, given: Any) -> None:
        """Behind the broadcast of buffers, which DistributedDataParallel does first."""
        taken = self._taken
        if taken is not None and not taken.buffers:
            taken.buffers = [b.detach().clone() for b in module.buffers()]

    def saw(self, bucket: GradBucket) -> None:
        """Local gradients, about to be reduced."""
        taken = self._taken
        if taken is not None and taken.pair[0] == self._place:
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                taken.sums[id(parameter)] = _sum_of(gradient)

    def before_update(self, *_: Any) -> None:
        """In the optimizer's pre-step hook: all ranks come here."""
        taken, self._taken = self._taken, None
        if taken is None:
            return
        differing = self._compare(taken)
        self._host.buddy_peers()  # what came from a peer that is lost says nothing
        if differing is None:
            return
        names = tuple(self._learning[index][0] for index in differing)
        checked, buddy = (self._ranks[place] for place in taken.pair)
        self._host.buddy_heard(Found(taken.step, checked, buddy, names, len(self._learning)))

    def _compare(self, taken: _Taken) -> list[int] | None:
        """Which gradients differ, by their numbers; the same on all ranks. None when nobody can
        tell."""
        checked, buddy = taken.pair
        marks = torch.zeros(len(self._learning) + 1, dtype=torch.int64)
        if self._place == checked:
            self._send(taken, self._ranks[buddy])
        elif self._place == buddy:
            theirs = self._receive(taken, self._ranks[checked])
            if theirs is None:
                marks[0] = SKIPPED
            else:
                marks[1:] = (self._replay(taken) != theirs).long()
        dist.broadcast(marks, src=self._ranks[buddy], group=self.group)
        if marks[0] == SKIPPED:
            return None
        return torch.nonzero(marks[1:]).flatten().tolist()

    def _send(self, taken: _Taken, to: int) -> None:
        sums = [
            taken.sums[id(p)] if id(p) in taken.sums else _sum_of(torch.zeros_like(p))
            for _, p in self._learning
        ]
        shapes = [n for t in taken.batch for n in (t.dim(), *t.shape)]
        one = taken.passes == 0 and bool(taken.sums)
        head = torch.tensor([one, len(shapes), *map(_signed, sums)], dtype=torch.int64)
        dist.send(head, to, group=self.group)
        dist.send(torch.tensor(shapes, dtype=torch.int64), to, group=self.group)
        for tensor in (*taken.batch, *taken.random, *taken.buffers):
            dist.send(tensor.contiguous(), to, group=self.group)

    def _receive(self, taken: _Taken, source: int) -> torch.Tensor | None:
        """The checked rank's checksums, and in `taken` what they were computed from; None when
        they are not of one backward pass."""
        head = torch.zeros(len(self._learning) + 2, dtype=torch.int64)
        dist.recv(head, source, group=self.group)
        shapes = torch.zeros(int(head[1]), dtype=torch.int64)
        dist.recv(shapes, source, group=self.group)
        numbers = iter(shapes.tolist())
        mine = taken.batch
        taken.batch = [
            torch.empty([next(numbers) for _ in range(next(numbers))], dtype=t.dtype) for t in mine
        ]
        taken.random = [torch.empty_like(t) for t in taken.random]
        taken.buffers = [torch.empty_like(t) for t in taken.buffers]
        for tensor in (*taken.batch, *taken.random, *taken.buffers):
            dist.recv(tensor, source, group=self.group)
        return head[2:] if head[0] else None

    def _replay(self, taken: _Taken) -> torch.Tensor:
        """The checksums of the gradients that this rank finds."""
        module, parameters = self._ddp.module, [p for _, p in self._learning]
        with _as_it_was(module, taken):
            loss = self._compute(module, _like(self._template, iter(taken.batch)))
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
        sums = [
            _sum_of(torch.zeros_like(p) if gradient is None else gradient)
            for p, gradient in zip(parameters, found, strict=True)
        ]
        return torch.tensor(list(map(_signed, sums)), dtype=torch.int64)


def keepstep_allreduce_hook(buddy: Buddy, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that looks, and then does what torch's `allreduce_hook` does."""
    buddy.saw(bucket)
    return allreduce_hook(buddy.group, bucket)


# DistributedDataParallel refuses annotations that are texts, as they all are here.
keepstep_allreduce_hook.__annotations__.clear()


@contextmanager
def _as_it_was(module: torch.nn.Module, taken: _Taken) -> Iterator[None]:
    """Random states and buffers are those of the checked rank when it computed; afterwards this
    rank's own again."""
    random = read_rng()
    buffers = [b.detach().clone() for b in module.buffers()]
    try:
        _set_random(random, taken.random)
        _fill(module, taken.buffers)
        yield
    finally:
        _fill(module, buffers)
        write_rng(random)


def _random_tensors() -> list[torch.Tensor]:
    return list(_flat(tensors_of(read_rng())))


def _set_random(mine: dict[str, Any], theirs: Sequence[torch.Tensor]) -> None:
    """torch's own generators: of the others nothing is sent."""
    states = iter(theirs)
    there = tensors_of(mine)
    torch.set_rng_state(next(states))
    if "cuda" in there:
        torch.cuda.set_rng_state_all(list(states))


def _fill(module: torch.nn.Module, values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(module.buffers(), values, strict=True):
            buffer.copy_(value)


def _flat(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors of a batch, in order. Raises ConfigError when there is anything else in it."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict):
        for key in batch:
            yield from _flat(batch[key])
    elif isinstance(batch, (list, tuple)):
        for one in batch:
            yield from _flat(one)
    else:
        raise ConfigError(
            "buddy(): expected a batch of tensors, in tuples, lists or dicts if there are several, "
            f"found a {type(batch).__name__} in it"
        )


def _like(template: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The same batch with these tensors in it, on the devices of its own."""
    if isinstance(template, torch.Tensor):
        return next(tensors).to(template.device)
    if isinstance(template, dict):
        return {key: _like(one, tensors) for key, one in template.items()}
    made = [_like(one, tensors) for one in template]
    return type(template)(*made) if hasattr(template, "_fields") else type(template)(made)


def _sum_of(gradient: torch.Tensor) -> int:
    """Equal for equal gradients. Adding nothing makes one zero of the two that there are."""
    whole = (gradient.detach() + 0.0).cpu().contiguous()
    raw = (ctypes.c_char * whole.nbytes).from_address(whole.data_ptr()) if whole.nbytes else b""
    return checksum(memoryview(raw).cast("B"))


def _signed(value: int) -> int:
    """As torch's whole numbers hold it."""
    return value - (1 << 64) if value >= 1 << 63 else value
