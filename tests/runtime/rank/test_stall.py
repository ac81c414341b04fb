"""Stall: the trainer's time on the CPU, the device's where copies are on one, each told once."""

from __future__ import annotations

from typing import Any

from keepstep.runtime.rank.stall import KEPT_COPIES, Stall


class Copy:
    """See `ports.StateCopy`."""

    def __init__(self, ns: int | None, is_on_device: bool = True) -> None:
        self.ns, self.is_on_device = ns, is_on_device

    def waited_ns(self) -> int | None:
        return self.ns


def step(stall: Stall, copy: Any, host_ns: int = 1000) -> tuple[int, int]:
    stall.waited(host_ns, True, copy)
    stall.waited(host_ns, False, copy)
    return stall.total_ns, stall.last_ns


def test_on_the_cpu_it_is_the_trainer_s_time() -> None:
    stall = Stall()
    assert step(stall, None) == (2000, 2000)
    assert step(stall, Copy(None, is_on_device=False)) == (4000, 2000)


def test_on_a_device_it_is_what_the_device_waited_once_nothing_waits_for_the_copy_any_more() -> (
    None
):
    stall = Stall()
    first, second = Copy(50), Copy(None)
    assert step(stall, first) == (0, 0), "its update may still come"
    assert step(stall, second) == (50, 50)
    assert step(stall, Copy(70)) == (50, 50), "the device has not come by there"
    second.ns = 60
    assert step(stall, Copy(None)) == (50 + 60 + 70, 70)


def test_what_is_never_known_is_not_kept_for_ever() -> None:
    stall = Stall()
    for _ in range(10 * KEPT_COPIES):
        step(stall, Copy(None))
    assert len(stall._unknown) == KEPT_COPIES and stall.total_ns == 0
