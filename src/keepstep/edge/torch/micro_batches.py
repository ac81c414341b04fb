"""Micro-batches: one step's forward and backward passes, of which each rank computes its share.

    what to compute (core/balance/shares.py) -> the program's body, once for each
    -> the sum of gradients that the reduction is to find

All but a rank's last are computed inside `no_sync`, so each rank reduces once a step, however many
it has. In order, the gradient of what was taken over goes to its home, where it is added in the
place where it would have been computed: what each rank gives to the reduction is then the same, bit
for bit, whoever has computed it. Random numbers follow from the step and the micro-batch, for the
same reason. Out of order gradients stay where they are: nothing is sent, and sums are rounded in
another order.

Moves gradients, decides nothing. Invariant: outside of a body gradients, random states and
`no_sync` are the program's own.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from keepstep.edge.torch.dtensors import is_dtensor
from keepstep.edge.torch.parts import parameters_of
from keepstep.edge.torch.random_stream import mixed, sow
from keepstep.edge.torch.rng import read_rng, write_rng
from keepstep.edge.torch.state import Protected
from keepstep.errors import ConfigError
from keepstep.model.micro_batches import SharedMicroBatch

CALLER = "micro_batches()"


class MicroBatch(int):
    """Its number among all micro-batches of the step: what it is made of follows from the step and
    this. `weight`: by which its mean loss is multiplied, so that the average over ranks is that of
    the global batch."""

    weight: float

    @classmethod
    def of(cls, index: int, weight: float) -> MicroBatch:
        made = cls(index)
        made.weight = weight
        return made

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)  # wherever it is kept, it is a number


class Spans(Protocol):
    """How long bodies take."""

    def begin(self) -> None: ...
    def end(self) -> None: ...

    def take_ns(self) -> int:
        """The median of those that are over and were not taken yet; 0: there are none."""


class HostSpans:
    """Of what is over when the body is."""

    def __init__(self) -> None:
        self._began_ns = 0
        self._found: list[int] = []

    def begin(self) -> None:
        self._began_ns = time.perf_counter_ns()

    def end(self) -> None:
        self._found.append(time.perf_counter_ns() - self._began_ns)

    def take_ns(self) -> int:
        found, self._found = sorted(self._found), []
        return found[len(found) // 2] if found else 0


class DeviceSpans:
    """Of what is only ordered when the body is over. Never waits for the device."""

    def __init__(self) -> None:
        self._began: Any = None
        self._pairs: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        self._began = torch.cuda.Event(enable_timing=True)
        self._began.record()

    def end(self) -> None:
        ended = torch.cuda.Event(enable_timing=True)
        ended.record()
        self._pairs.append((self._began, ended))

    def take_ns(self) -> int:
        over = [pair for pair in self._pairs if pair[1].query()]
        self._pairs = [pair for pair in self._pairs if pair not in over]
        found = sorted(int(1e6 * began.elapsed_time(ended)) for began, ended in over)
        return found[len(found) // 2] if found else 0


class Gradients:
    """Of all that learns, taken out and added again."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for number, parameter in enumerate(self._parameters):
            self._groups.setdefault((parameter.dtype, parameter.device), []).append(number)

    def set_aside(self) -> list[torch.Tensor | None]:
        """What there is; then there is nothing."""
        found = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return found

    def put_back(self, aside: Sequence[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, aside, strict=True):
            parameter.grad = gradient

    def flat(self) -> list[torch.Tensor]:
        """Which ones there are, and one tensor of each type with all of them."""
        device = self._parameters[0].device
        there = [p.grad is not None for p in self._parameters]
        packed = [torch.tensor(there, dtype=torch.uint8).to(device)]
        for numbers in self._groups.values():
            packed.append(torch.cat([self._one(n).reshape(-1) for n in numbers]))
        return packed

    def _one(self, number: int) -> torch.Tensor:
        parameter = self._parameters[number]
        gradient = parameter.grad
        if gradient is None:
            return torch.zeros_like(parameter)
        if gradient.layout is not torch.strided:
            raise ConfigError(
                f"micro_batches(): expected dense gradients, found a {gradient.layout} one; "
                "in_order=False moves none"
            )
        return gradient.detach()

    def blank(self) -> list[torch.Tensor]:
        """For what another rank's `flat` has."""
        count = len(self._parameters)
        made = [torch.zeros(count, dtype=torch.uint8, device=self._parameters[0].device)]
        for (dtype, device), numbers in self._groups.items():
            nelem = sum(self._parameters[n].numel() for n in numbers)
            made.append(torch.zeros(nelem, dtype=dtype, device=device))
        return made

    def add(self, packed: Sequence[torch.Tensor]) -> None:
        """As a backward pass would have: what is not there is not added either."""
        there = packed[0].tolist()
        with torch.no_grad():
            for numbers, whole in zip(self._groups.values(), packed[1:], strict=True):
                sizes = [self._parameters[n].numel() for n in numbers]
                for number, part in zip(numbers, whole.split(sizes), strict=True):
                    if there[number]:
                        self._add_one(self._parameters[number], part)

    def _add_one(self, parameter: torch.Tensor, part: torch.Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = part.view_as(parameter).clone()
        else:
            parameter.grad.add_(part.view_as(parameter))


class MovingBuffers:
    """Whether a forward pass changes buffers: batch statistics, say."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        buffers = {id(b): b for module in modules for b in module.buffers()}
        self._buffers = list(buffers.values())
        self._before: list[int] = []
        self.moved = False

    def begin(self) -> None:
        self._before = [buffer._version for buffer in self._buffers]

    def end(self) -> None:
        if self._before != [buffer._version for buffer in self._buffers]:
            self.moved = True


class MicroBatchRun:
    """The micro-batches of one rank, of one step."""

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        gradients: Gradients,
        spans: Spans,
        buffers: MovingBuffers,
        rank: int,
        in_order: bool,
    ) -> None:
        self._models, self._gradients, self._spans = models, gradients, spans
        self._buffers = buffers
        self.take_ns = spans.take_ns  # what one has taken, but the last of each step
        self._rank, self._in_order = rank, in_order

    @property
    def changes_buffers(self) -> bool:
        """Whether a forward pass has."""
        return self._buffers.moved

    def run(
        self, step: int, work: Sequence[Sequence[SharedMicroBatch]], weight: float, seed: int
    ) -> Generator[MicroBatch, None, None]:
        """One at a time, while the program computes it."""
        mine = work[self._rank]
        senders = {piece.index: rank for rank, pieces in enumerate(work) for piece in pieces}
        away = self._away(work) if self._in_order else []
        sent: list[Any] = []
        for number, piece in enumerate(mine):
            is_last = number == len(mine) - 1
            if is_last:
                for index in away:
                    self._receive(senders[index])
            is_foreign = self._in_order and piece.home != self._rank
            with ExitStack() as around:
                if self._in_order:
                    around.enter_context(_random_of(mixed(seed, step, piece.index)))
                if not is_last:
                    self._keep_local(around)
                    self._spans.begin()
                if number:  # in the first one DistributedDataParallel sends buffers around
                    self._buffers.begin()
                aside = self._gradients.set_aside() if is_foreign else []
                try:
                    yield MicroBatch.of(piece.index, weight)
                    if is_foreign:
                        sent += self._send(piece.home)
                finally:
                    if is_foreign:
                        self._gradients.put_back(aside)
                if number:
                    self._buffers.end()
                if not is_last:
                    self._spans.end()
        for sending in sent:
            sending.wait()

    def _away(self, work: Sequence[Sequence[SharedMicroBatch]]) -> list[int]:
        """Of this rank's, those that others compute, in order."""
        return sorted(
            piece.index
            for rank, pieces in enumerate(work)
            for piece in pieces
            if piece.home == self._rank != rank
        )

    def _keep_local(self, around: ExitStack) -> None:
        for model in self._models:
            around.enter_context(model.no_sync())  # type: ignore[operator]

    def _send(self, home: int) -> list[Any]:
        return [dist.isend(tensor, home) for tensor in self._gradients.flat()]

    def _receive(self, source: int) -> None:
        packed = self._gradients.blank()
        for tensor in packed:
            dist.recv(tensor, source)
        self._gradients.add(packed)


def tell_all(mine: Sequence[int], ranks: int) -> list[list[int]]:
    """What all ranks tell, by rank; zeros where a peer is lost. Small whole numbers."""
    on = "cuda" if dist.get_backend() == "nccl" else "cpu"
    told = [torch.zeros(len(mine), dtype=torch.int64, device=on) for _ in range(ranks)]
    dist.all_gather(told, torch.tensor(mine, dtype=torch.int64, device=on))
    return [one.tolist() for one in told]


def own_seed() -> int:
    """Of this process's random numbers, as a whole number that a tensor holds."""
    return torch.initial_seed() >> 1


@contextmanager
def _random_of(seed: int) -> Iterator[None]:
    """Random numbers of a body's own."""
    before = read_rng()
    sow(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    try:
        yield
    finally:
        write_rng(before)


def reducing(
    parts: Sequence[Any], model: Any, ranks: int, caller: str = CALLER
) -> list[torch.nn.Module]:
    """The models whose backward pass reduces gradients: `model`, or those among `parts`.

    Raises ConfigError where ranks cannot compute unequally many. caller: who asks for that."""
    given = [model] if model is not None else [p for p in parts if isinstance(p, torch.nn.Module)]
    for one in given:
        if any(is_dtensor(p) for p in one.parameters()):
            raise ConfigError(
                f"{caller}: expected whole parameters on each rank, found sharded ones: each "
                "forward pass gathers them, and ranks with unequal shares would wait for each other"
            )
    found = [one for one in given if hasattr(one, "no_sync")]
    if model is not None and not found:
        raise ConfigError(
            f"{caller}: expected a DistributedDataParallel model, found a {type(model).__name__}"
        )
    for one in found:
        group = getattr(one, "process_group", None)
        if group is not None and dist.get_world_size(group) != ranks:
            raise ConfigError(
                f"{caller}: expected a model that all {ranks} ranks reduce, found one of "
                f"{dist.get_world_size(group)}"
            )
    return found


def learning(
    protected: Protected, model: Any, ranks: int, caller: str = CALLER
) -> tuple[list[torch.nn.Module], list[torch.Tensor]]:
    """The models whose backward pass reduces gradients, and all that learns, of what is protected.
    model: None for the one among it. Raises as `reducing` does."""
    models = reducing(list(protected.parts().values()), model, ranks, caller)
    of_models = [p for one in models for p in one.parameters()]
    of_optimizers = [p for o in protected.optimizers for p in parameters_of(o)]
    return models, list({id(p): p for p in (*of_models, *of_optimizers)}.values())


def micro_batch_run(
    protected: Protected, model: Any, rank: int, ranks: int, in_order: bool
) -> MicroBatchRun:
    """Of what is protected. model: None for the one among it. Raises ConfigError."""
    models, parameters = learning(protected, model, ranks)
    spans: Spans = DeviceSpans() if any(p.is_cuda for p in parameters) else HostSpans()
    parts = protected.parts().values()
    modules = [part for part in (*parts, *models) if isinstance(part, torch.nn.Module)]
    return MicroBatchRun(
        models, Gradients(parameters), spans, MovingBuffers(modules), rank, in_order
    )
