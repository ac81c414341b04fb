"""Slowed part: whether a part of its node that is slowed down explains a rank that is slow.

Comes in: what is known of the node's parts, which of its ranks is slow, and which devices its ranks
see. Goes out: the processors, or the GPU that rank computes on, where they are slowed down for heat
or power now; and of a GPU the verdict.

Which GPU is whose is what all launchers agree on: the n-th rank of a node uses the n-th that its
processes see, and the driver numbers them in the order of their addresses. Where they are named in
another way (a UUID, a part of one), and there are several, nobody knows.

Invariant: a GPU explains nothing where those of all other ranks here are slowed down, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.core.detection.reference import ReferenceVerdict
from keepstep.model.parts import PartHealth


def slowed_cpu(parts: Sequence[PartHealth]) -> PartHealth | None:
    """The node's processors, where they are slowed down."""
    return next((part for part in parts if part.part_kind == "cpu" and part.slows), None)


def slowed_gpu(
    place: int, places: int, devices: Sequence[str], parts: Sequence[PartHealth]
) -> PartHealth | None:
    """That of the rank at `place` among the `places` ranks of this node, where it is slowed down
    and another rank's is not. devices: as the ranks' processes see them, in their order."""
    own = _gpu_of(place, devices, parts)
    if own is None or not own.slows:
        return None
    others = [_gpu_of(other, devices, parts) for other in range(places) if other != place]
    known = [gpu for gpu in others if gpu is not None]
    return None if known and all(gpu.slows for gpu in known) else own


def _gpu_of(place: int, devices: Sequence[str], parts: Sequence[PartHealth]) -> PartHealth | None:
    gpus = sorted((part for part in parts if part.part_kind == "gpu"), key=lambda gpu: gpu.part)
    if len(gpus) == 1:
        return gpus[0]
    name = devices[place] if place < len(devices) else ""
    is_number = name.isascii() and name.isdecimal()
    return gpus[int(name)] if is_number and len(name) < 5 and int(name) < len(gpus) else None


def throttled_device(rank: int, gpu: PartHealth) -> ReferenceVerdict:
    """Of a rank that is slow in what it computes there. No fixed work runs on devices."""
    why = f"rank {rank}: its device is throttled: {gpu.part}: {gpu.why}; cheapest: {gpu.fix}"
    return ReferenceVerdict("throttled", 0.0, why)
