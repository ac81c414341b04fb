"""What is known of all parts at one moment: never OK without a witness."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.parts.canaries import flaw_of
from keepstep.core.parts.judge import Judge, sick, well
from keepstep.core.parts.judgement import Judgement, as_of, judges
from keepstep.core.parts.news import PartsNews, policy_for
from keepstep.model.parts import (
    BEAT,
    BEAT_NS,
    PROBES,
    SILENT_NS,
    STALE_NS,
    ClockReading,
    GpuReading,
    KernelLine,
    NicReading,
    PartHealth,
    PartPolicy,
    PartReading,
    PartsReport,
    PartState,
    PlaceReading,
    PressureReading,
    ProbeAnswer,
    parse_part_policies,
)
from keepstep.model.units import GIB, MS_NS, S_NS
from tests.core.parts.test_kernel_log import TABLE

UNKNOWN_WITHIN_NS = 30 * S_NS


def good(probe: str, at_ns: int) -> ProbeAnswer:
    """What a healthy machine answers."""
    readings: dict[str, PartReading] = {
        "nvml": GpuReading("0000:3b:00", temperature_c=50, margin_c=40, reasons=0),
        "amd": GpuReading("0000:c1:00", temperature_c=50),
        "nic": NicReading("eth0", True, 2, 100, 0, 0),
        "disk": PlaceReading("/data", MS_NS, "", True, GIB, GIB),
        "shm": PlaceReading("/dev/shm", MS_NS, "", True, GIB, GIB),
        "pressure": PressureReading(0, 0.5, at_ns // 10**8, 0, 0),
        "clock": ClockReading(at_ns, at_ns, 100),
    }
    found = (readings[probe],) if probe in readings else ()
    return ProbeAnswer(probe, at_ns, MS_NS, "", found)


class Node:
    """A judgement, and probes that answer when they are due."""

    def __init__(self, probes: Sequence[str], canary_every_ns: int = 0) -> None:
        self.probes = probes
        self.judgement = Judgement(TABLE, 0, canary_every_ns)
        self.now_ns = 0

    def run(self, for_ns: int, silent: Sequence[str] = (), beats: bool = True) -> None:
        until_ns = self.now_ns + for_ns
        while self.now_ns < until_ns:
            self.now_ns += S_NS
            if beats and self.now_ns % BEAT_NS == 0:
                self.judgement.hear(ProbeAnswer(BEAT, self.now_ns, 0, ""))
            for probe in self.probes:
                if probe not in silent and self.now_ns % PROBES[probe].every_ns == 0:
                    self.judgement.hear(good(probe, self.now_ns))

    def health(self) -> dict[str, str]:
        return {part.part: part.health for part in self.judgement.parts(self.now_ns)}


ALL = tuple(PROBES)


def test_a_healthy_machine_is_well() -> None:
    node = Node(ALL)
    assert set(node.health().values()) == {"unknown"}
    node.run(120 * S_NS)
    assert set(node.health().values()) == {"ok"}
    kinds = {part.partition(" ")[0] for part in node.health()}
    assert kinds == {"gpu", "nic", "disk", "shm", "memory", "cpu", "clock", "kernel"}


@pytest.mark.parametrize("probe", ALL)
def test_a_probe_that_is_not_heard_of_makes_its_parts_unknown(probe: str) -> None:
    node = Node(ALL)
    node.run(120 * S_NS)
    of_it = {part.part for part in parts_of(probe, node)}
    node.run(PROBES[probe].every_ns + SILENT_NS + S_NS, silent=(probe,))
    found = node.health()
    assert {found[part] for part in of_it} == {"unknown"}
    assert {health for part, health in found.items() if part not in of_it} == {"ok"}
    node.run(2 * PROBES[probe].every_ns)
    assert set(node.health().values()) == {"ok"}


def parts_of(probe: str, node: Node) -> list[PartHealth]:
    """The parts that this probe speaks of."""
    kinds = PROBES[probe].kinds
    bus = {"nvml": "gpu 0000:3b:00", "amd": "gpu 0000:c1:00"}.get(probe)
    parts = node.judgement.parts(node.now_ns)
    return [part for part in parts if part.part_kind in kinds and bus in (None, part.part)]


@pytest.mark.parametrize("probe", ALL)
def test_a_blind_probe_makes_its_parts_unknown_at_once(probe: str) -> None:
    node = Node(ALL)
    node.run(120 * S_NS)
    of_it = {part.part for part in parts_of(probe, node)}
    node.judgement.hear(ProbeAnswer(probe, node.now_ns, 0, "no answer within 1.5 s"))
    found = node.health()
    assert {found[part] for part in of_it} == {"unknown"}
    [why] = {part.why for part in node.judgement.parts(node.now_ns) if part.part in of_it}
    assert f"probe {probe}: no answer within 1.5 s" in why


class _Unreadable(Judge):
    """A judge that trips over what it is shown."""

    def add(self, readings: Sequence[PartReading], at_ns: int) -> list[PartHealth]:
        raise ValueError("what is this?")


def test_what_a_judge_cannot_read_makes_its_parts_unknown_until_it_reads_again() -> None:
    node = Node(ALL)
    node.run(120 * S_NS)
    witness = node.judgement._witnesses["kernel"]
    sees, witness.judge = witness.judge, _Unreadable()
    with pytest.raises(ValueError):
        node.judgement.hear(good("kernel", node.now_ns))
    assert node.health()["kernel"] == "unknown"
    assert {health for part, health in node.health().items() if part != "kernel"} == {"ok"}
    witness.judge = sees
    node.run(10 * S_NS)
    assert set(node.health().values()) == {"ok"}


def test_what_a_lost_prober_saw_counts_no_more_whatever_the_next_one_says() -> None:
    node = Node(ALL)
    node.run(120 * S_NS)
    node.judgement.lose("the process that runs the probes ended with -9")
    assert set(node.health().values()) == {"unknown"} and not node.judgement.numbers(node.now_ns)
    node.judgement.hear(ProbeAnswer(BEAT, node.now_ns, 0, ""))
    assert set(node.health().values()) == {"unknown"}
    node.run(30 * S_NS)
    assert set(node.health().values()) == {"ok"}


def test_the_silence_of_the_prober_makes_all_unknown_within_30_s() -> None:
    node = Node(ALL)
    node.run(120 * S_NS)
    node.run(UNKNOWN_WITHIN_NS, silent=ALL, beats=False)
    assert set(node.health().values()) == {"unknown"}
    assert node.judgement.numbers(node.now_ns) == ()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(ALL),
            st.sampled_from(["good", "blind", "pause"]),
            st.integers(0, 80),
        ),
        max_size=60,
    )
)
def test_nothing_is_ok_that_no_good_witness_has_just_seen(
    acts: list[tuple[str, str, int]],
) -> None:
    """Against a dumb reading of the rule: of every part that is OK, some probe that speaks of its
    kind answered well last, within its time, and the prober was heard of."""
    judgement, now_ns = Judgement(TABLE, 0), S_NS
    last: dict[str, tuple[int, bool]] = {}
    for probe, act, pause_s in acts:
        now_ns += pause_s * S_NS
        if act != "pause":
            answer = good(probe, now_ns)
            if act == "blind":
                answer = ProbeAnswer(probe, now_ns, 0, "blind")
            judgement.hear(answer)
            last[probe] = (now_ns, act == "good")
        heard_ns = max((at_ns for at_ns, _ in last.values()), default=0)
        for part in judgement.parts(now_ns):
            if part.health != "ok":
                continue
            assert now_ns - heard_ns <= SILENT_NS
            assert any(
                part.part_kind in PROBES[name].kinds
                and is_good
                and now_ns - at_ns <= PROBES[name].every_ns + SILENT_NS
                for name, (at_ns, is_good) in last.items()
            )


def test_every_judge_sees_its_canary() -> None:
    for probe, make in judges(TABLE).items():
        assert flaw_of(probe, make()) == "", probe


class NeverSick(Judge):
    def add(self, readings: Sequence[PartReading], at_ns: int) -> list[PartHealth]:
        return [well("nic eth0", at_ns)]


@pytest.mark.parametrize("probe", ALL)
def test_a_judge_that_calls_nothing_sick_is_no_witness(probe: str) -> None:
    assert "planted" in flaw_of(probe, NeverSick())


class WellNow(Judge):
    """Whatever it is shown: all that it knew is well."""

    def __init__(self, parts: Sequence[str]) -> None:
        self.parts = parts

    def add(self, readings: Sequence[PartReading], at_ns: int) -> list[PartHealth]:
        return [well(part, at_ns) for part in self.parts]


CANARY_NS = 60 * S_NS


@pytest.mark.parametrize("probe", ALL)
@pytest.mark.parametrize("every_ns", [0, CANARY_NS])
def test_a_judge_that_goes_blind_later_is_no_witness_either(probe: str, every_ns: int) -> None:
    node = Node(ALL, every_ns)
    node.run(120 * S_NS)
    of_it = [part.part for part in parts_of(probe, node)]
    witness = node.judgement._witnesses[probe]
    seeing, witness.judge = witness.judge, WellNow(of_it)
    node.run(CANARY_NS + PROBES[probe].every_ns)
    found = node.health()
    assert {found[part] for part in of_it} == {"unknown" if every_ns else "ok"}
    assert {health for part, health in found.items() if part not in of_it} == {"ok"}
    witness.judge = seeing
    node.run(CANARY_NS + PROBES[probe].every_ns)
    assert set(node.health().values()) == {"ok"}


@given(st.lists(st.tuples(st.sampled_from(ALL), st.booleans()), max_size=60))
def test_whatever_a_judge_was_shown_it_sees_its_canary_and_learns_nothing_of_it(
    answers: list[tuple[str, bool]],
) -> None:
    """Against a judgement that is shown none: what it says is the same, to the last word."""
    often, never = Judgement(TABLE, 0, 1), Judgement(TABLE, 0)
    for number, (probe, is_well) in enumerate(answers, start=1):
        now_ns = 10**15 + number * 10 * S_NS
        answer = good(probe, now_ns) if is_well else bad(probe, number, now_ns)
        for judgement in (often, never):
            judgement.hear(answer)
        assert often.parts(now_ns) == never.parts(now_ns)


def bad(probe: str, number: int, at_ns: int) -> ProbeAnswer:
    """What a machine answers that has this and that."""
    readings: dict[str, PartReading] = {
        "nvml": GpuReading("0000:3b:00", margin_c=0, reasons=0x40, uncorrected=number),
        "amd": GpuReading("0000:c1:00", temperature_c=120, margin_c=0),
        "nic": NicReading("eth0", False, number, 100, number, 0),
        "disk": PlaceReading("/data", 3 * S_NS, "", True, 1, GIB),
        "shm": PlaceReading("/dev/shm", MS_NS, "No space left", True, 0, GIB),
        "pressure": PressureReading(at_ns, 0.001, 100 * number, 90 * number, number),
        "clock": ClockReading(at_ns + 3 * number * S_NS, at_ns, 100),
        "kernel": KernelLine(at_ns, "NVRM: Xid (PCI:0000:3b:00): 79, pid=1"),
    }
    return ProbeAnswer(probe, at_ns, MS_NS, "", (readings[probe],))


def test_what_others_suffer_is_not_taken_for_the_canary() -> None:
    """A judge that sees no canary, while a real part is sick."""

    class OnlyReal(Judge):
        def add(self, readings: Sequence[PartReading], at_ns: int) -> list[PartHealth]:
            return [sick("nic eth0", at_ns, "down", "")]

    assert "planted" in flaw_of("nic", OnlyReal())


def test_the_worst_word_counts() -> None:
    node = Node(("nvml", "kernel"))
    node.run(30 * S_NS)
    assert node.health()["gpu 0000:3b:00"] == "ok"
    line = KernelLine(node.now_ns, "NVRM: Xid (PCI:0000:3b:00): 95, pid=1")
    node.judgement.hear(ProbeAnswer("kernel", node.now_ns, 0, "", (line,)))
    assert node.health()["gpu 0000:3b:00"] == "bad"


def test_an_unknown_probe_is_refused() -> None:
    with pytest.raises(ValueError, match="name of a probe"):
        Judgement(TABLE, 0).hear(ProbeAnswer("tea leaves", 1, 0, ""))


@pytest.mark.parametrize("heard_ns", [0, SILENT_NS, 3 * SILENT_NS + 7, 10**15 + 1])
def test_the_prober_is_silent_once_its_limit_is_over(heard_ns: int) -> None:
    judgement = Judgement(TABLE, 0)
    judgement.hear(ProbeAnswer(BEAT, heard_ns, 0, ""))
    assert not judgement.is_silent(heard_ns + SILENT_NS)
    assert judgement.is_silent(heard_ns + SILENT_NS + 1)


# -- as it is read later


def test_an_old_report_says_nothing() -> None:
    node = Node(ALL)
    node.run(120 * S_NS)
    report = PartsReport(
        node.now_ns,
        "boot",
        node.judgement.parts(node.now_ns),
        node.judgement.numbers(node.now_ns),
    )
    assert report.numbers and as_of(report, node.now_ns + STALE_NS, "boot") == report
    for later in (
        as_of(report, node.now_ns + UNKNOWN_WITHIN_NS, "boot"),
        as_of(report, node.now_ns, "another boot"),
    ):
        assert {part.health for part in later.parts} == {"unknown"} and later.numbers == ()
        assert len(later.parts) == len(report.parts)


# -- what is told, and done


def part(health: PartState, kind: str = "gpu 0", most: PartPolicy = PartPolicy.STOP) -> PartHealth:
    return PartHealth(kind, health.value, "because", "mend it", int(most), 1)


def test_news_are_told_once() -> None:
    news = PartsNews({"gpu": PartPolicy.LEAVE})
    ok, bad, unknown = (part(health) for health in (PartState.OK, PartState.BAD, PartState.UNKNOWN))
    told = []
    looks = [ok, bad, bad, ok, ok, unknown, ok, unknown, unknown, unknown, unknown, ok]
    for number, look in enumerate(looks):
        told += [
            (number, each.part.health, each.policy.name)
            for each in news.of([look], number * 10 * S_NS)
        ]
    assert told == [
        (1, "bad", "LEAVE"),
        (3, "ok", "WARN"),
        (9, "unknown", "WARN"),  # the short silence before it is not worth a word
        (11, "ok", "WARN"),
    ]


def test_a_part_that_nobody_sees_hides_no_other() -> None:
    news = PartsNews({"gpu": PartPolicy.LEAVE})
    look = [part(PartState.UNKNOWN), part(PartState.BAD, "gpu 1")]
    assert [each.part.part for each in news.of(look, 0)] == ["gpu 1"]


def test_a_policy_is_no_harsher_than_what_it_is_worth() -> None:
    for wanted in PartPolicy:
        for most in PartPolicy:
            done = policy_for(part(PartState.BAD, most=most), {"gpu": wanted})
            assert done == min(wanted, most)
    assert policy_for(part(PartState.BAD, "nic eth0"), {"gpu": PartPolicy.STOP}) is PartPolicy.WARN


def test_a_sentence_says_what_is_done() -> None:
    [told] = PartsNews({"gpu": PartPolicy.STOP}).of([part(PartState.BAD)], 0)
    assert told.why.startswith("gpu 0 is sick: because; cheapest: mend it; the job ends")
    assert parse_part_policies("off") is None
