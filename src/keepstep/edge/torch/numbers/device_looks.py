"""Device looks: whether what a snapshot takes from devices is finite, asked where it is.

The norm of a stretch of values is not finite when one of them is not (or when they are too great to
be squared, which the host finds out). One number a stretch comes to the host, behind the copies: on
a device nothing is read twice by the host, and nobody waits.

Comes in: stretches of one type, live or packed for a copy, of some pairs. Goes out: norms for the
copy stream to order, and in the end the pairs that are to be looked at closely. Decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from keepstep.edge.torch.copy_stream import CopyStream, Landing
from keepstep.edge.torch.numbers.finite import can_be_bad, countable
from keepstep.edge.torch.plan import Pair


@dataclass(eq=False)
class Stretch:
    """`values` of one type, that hold those of `pairs`. `norm`: where theirs goes."""

    values: torch.Tensor
    pairs: Sequence[Pair]
    norm: torch.Tensor

    def look(self) -> None:
        values = countable(self.values)
        wide = torch.float64 if values.dtype is torch.float64 else torch.float32
        self.norm.copy_(torch.linalg.vector_norm(values, dtype=wide))


class DeviceLooks:
    """Of one slot, as long as its plan holds. `most`: so many stretches there may be."""

    def __init__(self, devices: Sequence[torch.device], most: int) -> None:
        self._there = {d: torch.zeros(most, dtype=torch.float32, device=d) for d in devices}
        self._host = {
            d: torch.zeros(most, dtype=torch.float32, pin_memory=d.type == "cuda") for d in devices
        }
        self._stretches: dict[torch.device, list[Stretch]] = {d: [] for d in devices}

    def tensor(self, device: torch.device, pair: Pair) -> Iterator[Stretch]:
        """One that leaves by itself."""
        yield from self._stretch(device, pair[0].local.detach(), [pair])

    def packed(
        self, device: torch.device, packed: torch.Tensor, first: int, group: Sequence[Pair]
    ) -> Iterator[Stretch]:
        """Some that are packed side by side, with zeros between them. `first`: where the first
        byte belongs."""
        run: list[Pair] = []
        for pair in [*group, None]:
            if run and (pair is None or pair[0].local.dtype != run[0][0].local.dtype):
                begin, end = run[0][1].offset - first, run[-1][1].end - first
                values = packed[begin:end].view(run[0][0].local.dtype)
                yield from self._stretch(device, values, run)
                run = []
            if pair is not None:
                run.append(pair)

    def _stretch(
        self, device: torch.device, values: torch.Tensor, pairs: Sequence[Pair]
    ) -> Iterator[Stretch]:
        if not (can_be_bad(values) and values.numel()):
            return
        if values.is_complex():
            values = torch.view_as_real(values.conj() if values.is_conj() else values)
        known = self._stretches[device]
        norm = self._there[device][len(known)]
        known.append(Stretch(values, pairs, norm))
        yield known[-1]

    # -- one snapshot

    def read_back(self, streams: Mapping[torch.device, CopyStream]) -> list[Landing]:
        """When all are ordered: the norms follow them to the host."""
        landings = []
        for device, norms in self._there.items():
            streams[device].copy([self._host[device]], [norms])
            landings.append(streams[device].mark())
        return landings

    def suspects(self) -> list[Pair]:
        """When all has landed: what lies in a stretch whose norm is not finite."""
        return [
            pair
            for device, stretches in self._stretches.items()
            for stretch, norm in zip(stretches, self._host[device].tolist(), strict=False)
            if not math.isfinite(norm)
            for pair in stretch.pairs
        ]
