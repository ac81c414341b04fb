"""Judges of parts, on traces made of looks ten seconds apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from keepstep.core.parts.clock import ClockJudge
from keepstep.core.parts.gpus import Gpus
from keepstep.core.parts.judge import Judge, Spell
from keepstep.core.parts.nics import Nics
from keepstep.core.parts.places import Places
from keepstep.core.parts.pressure import Pressure
from keepstep.model.parts import (
    ClockReading,
    GpuReading,
    NicReading,
    PartHealth,
    PartPolicy,
    PartReading,
    PlaceReading,
    PressureReading,
)
from keepstep.model.units import GIB, MS_NS, S_NS

EVERY_NS = 10 * S_NS
WELL = GpuReading(
    bus="0000:3b:00",
    temperature_c=60,
    margin_c=30,
    reasons=0,
    clock_mhz=1980,
    used_ratio=0.97,
    uncorrected=0,
    corrected=3,
    remap_pending=False,
    remap_failed=False,
    links=18,
    link_errors=0,
)


def play(judge: Judge, looks: Iterable[Iterable[PartReading]]) -> list[list[PartHealth]]:
    return [judge.add(list(look), (number + 1) * EVERY_NS) for number, look in enumerate(looks)]


def healths(judge: Judge, looks: Iterable[Iterable[PartReading]]) -> str:
    """The first part's, a letter for each look: o, B or u."""
    return "".join(
        {"ok": "o", "bad": "B", "unknown": "u"}[parts[0].health]
        for parts in play(judge, looks)
        if parts
    )


def gpu(**changes: Any) -> list[PartReading]:
    return [replace(WELL, **changes)]


# -- GPUs


def test_idle_and_the_power_cap_are_no_sickness() -> None:
    assert healths(Gpus(), [gpu(reasons=0x1)] * 60) == "o" * 60
    assert healths(Gpus(), [gpu(reasons=0x4)] * 60) == "o" * 60
    assert healths(Gpus(), [gpu(reasons=0x20)] * 60) == "o" * 60


@pytest.mark.parametrize("bit", [0x08, 0x40, 0x80])
def test_a_slowdown_of_a_fifth_of_the_looks(bit: int) -> None:
    often = [gpu(reasons=bit if n % 5 == 0 else 0) for n in range(30)]
    assert healths(Gpus(), often)[5:] == "B" * 25
    seldom = [gpu(reasons=bit if n % 6 == 5 else 0) for n in range(30)]
    assert "B" not in healths(Gpus(), seldom)
    over = [*often, *[gpu()] * 31]
    assert healths(Gpus(), over)[-1] == "o"


def test_a_gpu_that_is_about_to_be_slowed_down() -> None:
    looks = [gpu(), gpu(margin_c=3), gpu(margin_c=3), gpu(margin_c=2), gpu(margin_c=20)]
    assert healths(Gpus(), [*looks, gpu(margin_c=20), gpu(margin_c=20)]) == "oooBBBo"
    worst = play(Gpus(), looks)[3][0]
    assert worst.most == PartPolicy.AVOID and "2 degrees" in worst.why


def test_new_ecc_errors_count_and_old_ones_do_not() -> None:
    assert healths(Gpus(), [gpu(uncorrected=7)] * 5) == "ooooo"
    assert healths(Gpus(), [gpu(uncorrected=7), gpu(uncorrected=8)]) == "oB"
    # the driver was loaded anew, and counts from 0
    assert healths(Gpus(), [gpu(uncorrected=7), gpu(uncorrected=0), gpu(uncorrected=1)]) == "ooB"


def test_rows() -> None:
    [[pending]] = play(Gpus(), [gpu(remap_pending=True)])
    [[failed]] = play(Gpus(), [gpu(remap_failed=True, remap_pending=True)])
    assert pending.most == PartPolicy.AVOID and failed.most == PartPolicy.STOP
    assert pending.health == failed.health == "bad"


def test_a_gpu_that_is_gone() -> None:
    other = replace(WELL, bus="0000:5e:00")
    last = play(Gpus(), [[WELL, other], [other]])[-1]
    assert {part.part: part.health for part in last} == {
        "gpu 0000:3b:00": "bad",
        "gpu 0000:5e:00": "ok",
    }


def test_a_slow_clock_among_peers_that_are_as_busy() -> None:
    def look(slow_mhz: int, used: float) -> list[PartReading]:
        peers = [replace(WELL, bus=f"0000:{n:02x}:00") for n in range(1, 4)]
        return [replace(WELL, bus="0000:00:00", clock_mhz=slow_mhz, used_ratio=used), *peers]

    assert healths(Gpus(), [look(1700, 0.95)] * 5) == "ooBBB"
    assert healths(Gpus(), [look(1800, 0.95)] * 5) == "ooooo"
    assert healths(Gpus(), [look(700, 0.1)] * 5) == "ooooo"


def test_links_that_are_lost_and_links_with_errors() -> None:
    assert healths(Gpus(), [gpu(), gpu(links=17)]) == "oB"
    growing = [gpu(link_errors=n // 6) for n in range(6 * 40)]  # one a minute
    seen = healths(Gpus(), growing)
    assert "B" in seen and "B" not in seen[: 6 * 15]
    once = [gpu(link_errors=0)] * 6 + [gpu(link_errors=900)] * 240
    assert "B" not in healths(Gpus(), once)


def test_a_gpu_that_tells_next_to_nothing_is_judged_by_what_it_tells() -> None:
    bare = GpuReading("0000:00:00", temperature_c=50)
    assert healths(Gpus(), [[bare]] * 10) == "o" * 10


# -- network


def nic(up: bool = True, changes: int = 2, packets: int = 0, errors: int = 0) -> list[PartReading]:
    return [NicReading("eth0", up, changes, packets, errors, 0)]


def test_one_flap_is_survived_and_two_are_told() -> None:
    assert healths(Nics(), [nic(), nic(changes=4), nic(changes=4)]) == "ooo"
    assert healths(Nics(), [nic(), nic(changes=4), nic(changes=6)]) == "ooB"
    quiet = [nic(changes=6)] * 40
    assert healths(Nics(), [nic(), nic(changes=4), nic(changes=6), *quiet])[-1] == "o"


def test_more_than_five_flaps_a_day() -> None:
    looks, changes = [nic()], 2
    for _ in range(6):
        changes += 2
        looks += [nic(changes=changes)] * 40
    seen = healths(Nics(), looks)
    assert seen.index("B") == 1 + 5 * 40


def test_a_link_that_is_down() -> None:
    assert healths(Nics(), [nic(), nic(up=False), nic(up=False), nic(), nic()]) == "ooBBo"
    assert healths(Nics(), [nic(), [], []]) == "ooB"  # the interface itself is gone
    assert play(Nics(), [nic(up=False)] * 5)[-1] == []  # never was up: nobody misses it


def test_what_is_no_card_comes_and_goes() -> None:
    """Docker takes its bridge down with the last container, and removes the veth."""

    def bridge(up: bool = True, changes: int = 2, errors: int = 0) -> list[PartReading]:
        return [NicReading("docker0", up, changes, 9, errors, 0, has_device=False)]

    down = [bridge(up=False, changes=3)] * 9
    assert healths(Nics(), [bridge(), *down]) == "o" * 10
    assert healths(Nics(), [bridge(changes=2 * n) for n in range(40)]) == "o" * 40
    assert play(Nics(), [bridge(), [], []])[-1] == []
    assert "B" in healths(Nics(), [bridge(errors=n) for n in range(30)])


def test_damaged_packets() -> None:
    looks = [nic(packets=n * 10_000, errors=n * 2) for n in range(30)]
    assert "B" in healths(Nics(), looks)
    few = [nic(packets=n * 1_000_000, errors=n * 2) for n in range(30)]
    assert "B" not in healths(Nics(), few)
    anew = [nic(packets=10**9, errors=10**5), *[nic(packets=5, errors=0)] * 3]
    assert "B" not in healths(Nics(), anew)


# -- places


def place(**changes: Any) -> list[PartReading]:
    reading = PlaceReading("/data", 5 * MS_NS, "", True, 100 * GIB, 1000 * GIB)
    return [replace(reading, **changes)]


def test_places() -> None:
    assert healths(Places("disk"), [place(), place(refusal="Read-only file system")]) == "oB"
    assert healths(Places("disk"), [place(is_same=False)]) == "B"
    [[full]] = play(Places("shm"), [place(free_bytes=10, total_bytes=GIB)])
    assert full.part == "shm /data" and full.most == PartPolicy.WARN


def test_a_disk_is_slow_by_its_own_measure() -> None:
    usual = [place()] * 20
    slow = [place(took_ns=1200 * MS_NS)] * 5
    assert healths(Places("disk"), [*usual, *slow]) == "o" * 22 + "BBB"
    always = [place(took_ns=1200 * MS_NS)] * 40
    assert "B" not in healths(Places("disk"), always)
    assert healths(Places("disk"), [*usual, *[place(took_ns=900 * MS_NS)] * 5]) == "o" * 25


# -- pressure


def test_memory_pressure() -> None:
    def looks(ratio: float, count: int = 8) -> list[list[PartReading]]:
        return [
            [PressureReading(int(n * ratio * EVERY_NS), 0.5, None, None, 0)] for n in range(count)
        ]

    assert play(Pressure(), looks(0.5))[0] == []  # nothing to compare with yet
    assert [parts[0].health for parts in play(Pressure(), looks(0.5))[1:]] == ["ok"] * 2 + [
        "bad"
    ] * 5
    assert all(parts[0].health == "ok" for parts in play(Pressure(), looks(0.05))[1:])


def test_a_quota_and_heat() -> None:
    def look(n: int, throttled: int, heat: int) -> list[PartReading]:
        return [PressureReading(0, 0.5, n * 100, throttled, heat)]

    by_quota = play(Pressure(), [look(n, n * 30, 0) for n in range(6)])
    assert [parts[1].health for parts in by_quota[1:]] == ["ok", "ok", "bad", "bad", "bad"]
    assert by_quota[-1][1].part == "cpu" and "quota" in by_quota[-1][1].why
    assert not by_quota[-1][1].slows, "its processors are as fast as ever"
    hot = play(Pressure(), [look(n, 0, n) for n in range(6)])
    assert hot[-1][1].health == "bad" and "heat" in hot[-1][1].why and hot[-1][1].slows


def test_a_spell_that_is_nearly_over_says_no_figure_that_it_has_not() -> None:
    """The condition is away, and the spell still holds. It told of `0 times`, and of `None`."""

    def look(n: int, ill: bool) -> list[PartReading]:
        grown = n if ill else 5
        return [PressureReading(grown * EVERY_NS, 0.5, n * 100, grown * 50, grown)]

    for number, (of_memory, of_cpu) in enumerate(
        play(Pressure(), [look(n, n <= 5) for n in range(8)])[1:]
    ):
        for part in (of_memory, of_cpu):
            if part.health == "bad" and number >= 5:
                assert "a little while ago" in part.why, part.why
    left = [0.001] * 4 + [None] * 2
    short = play(Pressure(), [[PressureReading(0, ratio, None, None, 0)] for ratio in left])
    assert short[-1][0].health == "bad" and "too little memory was left" in short[-1][0].why


def test_what_the_kernel_does_not_count_is_unknown() -> None:
    silent = PressureReading(None, None, None, None, None)
    [_, (memory, cpu)] = play(Pressure(), [[silent], [silent]])
    assert memory.health == cpu.health == "unknown"


# -- clock


def clock(n: int, ahead_ns: int = 0) -> list[PartReading]:
    mono_ns = (n + 1) * EVERY_NS
    return [ClockReading(mono_ns + ahead_ns, mono_ns, 100)]


def test_a_clock_that_was_set() -> None:
    looks = [clock(n, 0 if n < 3 else 3600 * S_NS) for n in range(60)]
    seen = healths(ClockJudge(), looks)
    assert seen[:3] == "ooo" and seen[3:32] == "B" * 29 and seen[-1] == "o"
    assert "B" not in healths(ClockJudge(), [clock(n, n * 100_000) for n in range(90)])  # 10 ppm


def test_a_clock_that_drifts() -> None:
    seen = healths(ClockJudge(), [clock(n, n * 30_000_000) for n in range(90)])  # 3000 ppm
    assert "B" not in seen[:25] and seen[-1] == "B"


def test_a_spell_begins_and_ends_with_three_looks() -> None:
    spell = Spell()
    seen = [spell.look(bool(int(each))) for each in "1101110010001"]
    assert [int(each) for each in seen] == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0]


def test_of_what_nothing_can_be_read_nobody_says_that_it_is_well() -> None:
    """Though its neighbour can be read, which is all that the probe's canary asks."""
    gpus = [GpuReading("0000:01:00", temperature_c=50), GpuReading("0000:02:00", used_ratio=0.5)]
    assert [part.health for part in Gpus().add(gpus, S_NS)] == ["ok", "unknown"]
    nics = [NicReading("eth0", True, 2, 9, 0, 0), NicReading("eth1", True, None, 0, 0, 0)]
    assert [part.health for part in Nics().add(nics, S_NS)] == ["ok", "unknown"]
