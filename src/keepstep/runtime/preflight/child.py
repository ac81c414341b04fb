"""Child: one measured check in a process of its own: `python -m ... CHECK ARGUMENTS PARENT`.

Comes in: the name of a check, its arguments as JSON, the process that waits for it. Goes out: one
`CheckReading` on stdout. Whoever started it kills it at its deadline, so nothing here waits with
one. Imports what its check needs and no more: only three import torch.

Each check first proves on a defect made for it that it would see one (its canary); one that does
not is `unknown`, never `ok`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from keepstep.core.preflight import catalogue
from keepstep.core.preflight.history import LOSS
from keepstep.core.wire.codec import Codec
from keepstep.edge.os.needs import has_package
from keepstep.model.decoding import from_json
from keepstep.model.messages.preflight import CheckOutcome, CheckReading, FleetTrait, Samples
from keepstep.model.units import human_bytes

PR_SET_PDEATHSIG = 1

READINGS: Codec[CheckReading] = Codec((CheckReading,))
BLIND = "its canary was not seen: the check finds nothing, whatever there is"

Arguments = Mapping[str, Any]


def check_memory(given: Arguments) -> CheckReading:
    """Patterns in so many bytes."""
    from keepstep.edge.preflight import memory

    if not memory.can_see():
        return _unknown(catalogue.MEMORY, BLIND)
    size = int(given["bytes"])
    wrong = memory.check_memory(size)
    if wrong is None:
        return _ok(catalogue.MEMORY, f"{human_bytes(size)} held every pattern")
    return _bad(
        catalogue.MEMORY,
        f"memory gave back 0x{wrong.read:02x} where 0x{wrong.written:02x} was written, "
        f"{wrong.wrong_bits} wrong bits within 1 MiB, {human_bytes(wrong.offset)} into "
        f"{human_bytes(size)}",
    )


def check_memory_speed(given: Arguments) -> CheckReading:
    """How fast one thread copies."""
    from keepstep.edge.preflight import memory

    speeds = memory.copy_speeds(int(given["bytes"]), int(given["samples"]))
    return _ok(catalogue.MEMORY_SPEED, "", [Samples("memory-speed", tuple(speeds))])


def check_disk(given: Arguments) -> CheckReading:
    """How fast a directory is, and whether it gives back what it got."""
    from keepstep.edge.preflight import disk

    directory = Path(given["directory"])
    try:
        figures = disk.measure_disk(
            directory, int(given["bytes"]), int(given["samples"]), int(given["syncs"])
        )
    except OSError as error:
        return _bad(catalogue.DISK, f"cannot write to {directory}: {error.strerror or error}")
    if figures.wrong_at is not None:
        return _bad(
            catalogue.DISK, f"{directory} gave back other bytes at {human_bytes(figures.wrong_at)}"
        )
    return _ok(
        catalogue.DISK,
        str(directory),
        [Samples("disk-write", figures.writes), Samples("disk-sync", figures.syncs)],
    )


def check_products(given: Arguments) -> CheckReading:
    """Whether every core computes the same, and how fast."""
    if not has_package("numpy"):
        return _unknown(catalogue.PRODUCTS, "needs numpy: pip install numpy")
    from keepstep.edge.preflight import products

    if not products.can_see():
        return _unknown(catalogue.PRODUCTS, BLIND)
    figures = products.check_products(int(given["size"]), int(given["repetitions"]))
    wrong = figures.wrong
    if wrong is None:
        speeds = sorted(figures.speeds)[:32]  # the slowest cores: a step waits for them
        return _ok(catalogue.PRODUCTS, "", [Samples("products", tuple(speeds))])
    where = "every core gave" if wrong.core is None else f"core {wrong.core} gave"
    what = "a product that does not fit its operands" if wrong.core is None else "another product"
    return CheckReading(
        catalogue.PRODUCTS,
        CheckOutcome.BAD,
        f"{where} {what}: {wrong.elements} elements of a product of {wrong.kind} numbers, "
        f"repetition {wrong.repetition}",
        "this processor computes wrong numbers without a word, and a rank there spoils the "
        "parameters of all",
        "take the node out and report the processor; until then keep the job off that core "
        "(taskset, cgroup cpuset)",
    )


def check_training(given: Arguments) -> CheckReading:
    """Whether a mini-training gives the same losses every time."""
    if not has_package("torch"):
        return _unknown(catalogue.TRAINING, "needs torch")
    from keepstep.edge.torch.preflight import device_link, training

    devices = device_link.device_count()
    traits = []
    figures = None
    for device in ["cpu", *(f"cuda:{index}" for index in range(devices))]:
        figures = training.train(int(given["steps"]), int(given["repetitions"]), device)
        if figures.first_difference is not None:
            repetition, step = figures.first_difference
            at = "the last parameters" if step < 0 else f"the loss of step {step}"
            return _bad(
                catalogue.TRAINING,
                f"repetition {repetition} of a mini-training on {device} gave {at} otherwise than "
                "the first",
            )
        traits.append(FleetTrait(LOSS, figures.digests[0], training.kind_of(device)))
        if traits[-1].value != _first_of_kind(traits).value:
            return _bad(
                catalogue.TRAINING, f"{device} gave another loss than the same device beside it"
            )
    assert figures is not None
    return CheckReading(
        catalogue.TRAINING,
        CheckOutcome.OK,
        f"loss {figures.last_loss:.6f}",
        samples=(Samples("training-step", figures.step_ns[:64]),),
        traits=tuple({trait.kind: trait for trait in traits}.values()),
    )


def _first_of_kind(traits: list[FleetTrait]) -> FleetTrait:
    """The first one that is of the last one's kind."""
    return next(trait for trait in traits if trait.kind == traits[-1].kind)


def check_pcie(given: Arguments) -> CheckReading:
    """How fast bytes go to the device and back."""
    if not has_package("torch"):
        return _unknown(catalogue.PCIE, "needs torch")
    from keepstep.edge.torch.preflight import device_link

    if not device_link.device_count():
        return CheckReading(catalogue.PCIE, CheckOutcome.SKIPPED, "torch can use no device here")
    try:
        figures = device_link.measure_devices(
            int(given["bytes"]), int(given["samples"]), int(given["size"])
        )
    except RuntimeError as error:
        return _bad(catalogue.PCIE, f"a device failed: {str(error).splitlines()[0]}")
    if figures.wrong:
        return _bad(catalogue.PCIE, figures.wrong)
    return _ok(
        catalogue.PCIE,
        "",
        [
            Samples("to-device", figures.to_device),
            Samples("from-device", figures.from_device),
            Samples("device-products", figures.products),
        ],
    )


def check_ring(given: Arguments) -> CheckReading:
    """One rank of the ring."""
    from keepstep.edge.torch.preflight import ring

    try:
        figures = ring.all_reduce(
            int(given["rank"]),
            int(given["world"]),
            (str(given["address"]), int(given["port"])),
            int(given["bytes"]),
            int(given["rounds"]),
            float(given["within_s"]),
        )
    except RuntimeError as error:  # torch's DistError is one
        said = str(error).splitlines()
        return _unknown(catalogue.RING, f"rank {given['rank']}: {said[0] if said else error!r}")
    if figures.wrong is not None:
        turn, elements = figures.wrong
        return _bad(
            catalogue.RING,
            f"rank {given['rank']} got {elements} wrong sums from all-reduce {turn}",
        )
    return _ok(catalogue.RING, "", [Samples("ring", figures.speeds)])


CHECKS: dict[str, Callable[[Arguments], CheckReading]] = {
    catalogue.MEMORY: check_memory,
    catalogue.MEMORY_SPEED: check_memory_speed,
    catalogue.DISK: check_disk,
    catalogue.PRODUCTS: check_products,
    catalogue.TRAINING: check_training,
    catalogue.PCIE: check_pcie,
    catalogue.RING: check_ring,
}


def _ok(check: str, found: str, samples: list[Samples] | None = None) -> CheckReading:
    return CheckReading(check, CheckOutcome.OK, found, samples=tuple(samples or ()))


def _bad(check: str, found: str) -> CheckReading:
    return CheckReading(check, CheckOutcome.BAD, found)


def _unknown(check: str, found: str) -> CheckReading:
    return CheckReading(check, CheckOutcome.UNKNOWN, found)


def main(words: list[str]) -> None:
    """`CHECK ARGUMENTS PARENT`."""
    name, arguments, parent = words
    # Whoever waits for this may be killed before its deadline, or has been by now.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit("nobody waits for this")
    reading = CHECKS[name](from_json(arguments))
    sys.stdout.buffer.write(READINGS.encode(reading))
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
