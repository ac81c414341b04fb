"""Verdict: what counts as seen, what counts as proved. Each fault's evidence is taken away piece by
piece."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from keepstep.cli.drill import exit_code
from keepstep.model.events import Event
from keepstep.model.units import S_NS
from keepstep.testing.faults import Fault, parse
from keepstep.testing.verdict import covers, judge, recoveries
from keepstep.testing.witness import DrillFacts


def event(at_s: float, kind: str, why: str = "", who: str = "keeper", **data: Any) -> Event:
    return Event(0, int(at_s * S_NS), who, kind, why, data)


def told(fault: int, what: str, at_s: float, **data: Any) -> dict[str, Any]:
    return {"fault": fault, "what": what, "mono_ns": int(at_s * S_NS), **data}


def facts(**changes: Any) -> DrillFacts:
    """A job of one rank that was killed at 10 s in step 20 and ended well."""
    values: dict[str, Any] = {
        "job": "drill",
        "exit_code": 0,
        "digests": {0: "abc"},
        "notes": [told(0, "about to", 10, pid=7, phase="seal", step=20), told(0, "did", 10)],
        "sightings": {0: ["process 7 is gone"]},
        "events": [
            event(1, "rank-joined", rank=0, pid=7, incarnation=1),
            event(2, "resumed", step=-1, source="fresh", lost_steps=0),
            event(10.1, "rank-exited", "rank 0 was killed", "agent", pid=7, code=-9),
            event(12, "rank-joined", rank=0, pid=8, incarnation=2),
            event(12.5, "resumed", "every rank has proven", step=18, source="memory", lost_steps=1),
            event(13, "next-step"),
        ],
    }
    return DrillFacts(**{**values, **changes})


def verdict(fault: Fault, found: DrillFacts) -> dict[str, Any]:
    return judge([fault], found, facts().hash)


def test_a_proved_drill() -> None:
    report = verdict(parse("kill:step=20,phase=seal"), facts())
    assert (
        report["proved"]
        and report["recovered"]
        and report["bit_equal"]
        and report["within_one_step"]
    )
    assert (report["lost_steps"], report["restarts"], report["recovery_s"], report["sources"]) == (
        [1],
        1,
        [3.0],
        ["memory"],
    )
    (fault,) = report["faults"]
    assert (
        fault["injected"]
        and fault["seen"]
        and "process 7 is gone; agent: rank 0 was killed" in fault["evidence"]
    )
    assert exit_code(report) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"digests": {0: "other"}},
        {"digests": {}},
        {"exit_code": 1},
        {"exit_code": None},
        {"left_over": ["/dev/shm/keepstep-drill"]},
        {"sightings": {}},
        {"events": [e for e in facts().events if e.kind != "rank-exited"]},
        {"events": [event(10.1, "rank-exited", "ended", "agent", pid=7, code=1)]},
        {"events": [event(10.1, "rank-exited", "another", "agent", pid=8, code=-9)]},
        {"events": [event(9.9, "rank-exited", "too early", "agent", pid=7, code=-9)]},
    ],
)
def test_nothing_less_is_proved(changes: dict[str, Any]) -> None:
    report = verdict(parse("kill:step=20,phase=seal"), facts(**changes))
    assert not report["proved"]
    assert exit_code(report) == 1


def test_a_fault_that_was_not_done_has_its_own_exit_code() -> None:
    never = verdict(parse("kill:step=20"), facts(notes=[]))
    assert not never["proved"] and never["faults"][0]["evidence"] == "its moment never came"
    refused = verdict(
        parse("full:step=20"), DrillFacts("drill", cannot={0: "mount: not permitted"})
    )
    assert (
        refused["faults"][0]
        | {"injected": False, "seen": False, "evidence": "mount: not permitted"}
        == refused["faults"][0]
    )
    assert exit_code(never) == exit_code(refused) == 3


KILLED = facts().events[2]
SUCCEEDED = event(11, "agent-restarted", "process 9 takes over", "agent")
DAMAGED = event(11, "damaged", "/arena/slot-1: damaged")
ADOPTED = event(11, "keeper-started", "adopted", pid=6)
NO_SPACE = event(11, "persist-failed", "No space left on device")
WRITTEN = event(12, "persisted", "step 19, after 100 ms", step=19)
HEAT = event(40, "part-sick", "gpu 0000:00:00 is sick", "agent", part="gpu 0000:00:00")
SLOW_DISK = event(40, "part-sick", "disk /data is sick", "agent", part="disk /data")
BLINDNESS = event(30, "probes-lost", "silent for 15 s", "agent")
OUT_OF_QUOTA = event(40, "slow-rank", "rank 0 is slow", "agent", rank=0, cause="quota")
LINKS_KNOWN = [event(9, "link-unknown", doubt="samples"), event(9.5, "link-known", doubt="samples")]
SLOW_LINK = event(20, "slow-link", "node 1", side="node", nodes=[1], cause="speed")
LOSSY_LINK = event(20, "slow-link", "node 1", side="unclear", nodes=[0, 1], cause="loss")
RESUMED = event(12, "resumed", "from memory", step=19, source="memory", lost_steps=0)

COMPLETE: dict[str, tuple[list[str], list[Event], dict[str, Any]]] = {
    "stop:step=20": (["process 7 is stopped (state T)", "process 7 is gone"], [], {}),
    "torn:step=20": (
        ["process 7 is gone", "slot-1 was left with a payload and no seal"],
        [KILLED],
        {},
    ),
    "flip:step=20": (["process 7 is gone"], [KILLED, DAMAGED], {"paths": ["/arena/slot-1"]}),
    "keeper-kill:step=20": (["keeper process 5 is gone"], [ADOPTED], {"keeper_pid": 5}),
    "full:step=20": ([], [NO_SPACE], {}),
    "agent-kill:step=20": (["agent process 5 is gone"], [SUCCEEDED], {"agent_pid": 5}),
    "full:step=20,where=arena": (["arena has 0 bytes free"], [RESUMED], {}),
    "kill-node:node=1,step=20": (
        ["3 processes of node 1 are gone", "the memory of node 1 is gone"],
        [RESUMED],
        {},
    ),
    "link-down:node=1,step=20,for=500": (["the link of node 1 was down for 500.1 ms"], [], {}),
    "cpu-quota:step=20": ([], [OUT_OF_QUOTA], {}),
    "link-slow:node=1,step=20,for=45000": (
        ["the link of node 1 was slow for 45.0 s"],
        [SLOW_LINK],
        {},
    ),
    "link-loss:node=1,step=20,for=45000": (
        ["the link of node 1 lost packets for 45.0 s"],
        [LOSSY_LINK],
        {},
    ),
    "hot:step=20": ([], [HEAT], {}),
    "disk-slow:step=20": ([], [SLOW_DISK], {}),
    "blind:step=20": ([], [BLINDNESS], {}),
    "store-flaky:step=20,for=500": (
        ["in 501 ms 3 requests or acts met with it", "training went on from step 3 to 9 meanwhile"],
        [WRITTEN],
        {},
    ),
}


@pytest.mark.parametrize("spec", COMPLETE)
def test_each_kind_needs_all_its_evidence(spec: str) -> None:
    sightings, events, said = COMPLETE[spec]
    notes = [
        told(0, "about to", 10, pid=7, nodes=[1], phase="forward", step=20),
        told(0, "did", 10, **said),
    ]
    fault = parse(spec)

    def is_seen(sightings: list[str], events: list[Event]) -> bool:
        known = [*LINKS_KNOWN, *events]
        found = facts(notes=notes, sightings={0: sightings}, events=known)
        return bool(verdict(fault, found)["faults"][0]["seen"])

    assert is_seen(sightings, events)
    for missing in sightings:
        assert not is_seen([s for s in sightings if s != missing], events), missing
    for gone in events:
        assert not is_seen(sightings, [e for e in events if e is not gone]), gone


@pytest.mark.parametrize(
    ("spec", "word", "wrong"),
    [
        ("cpu-quota:step=20", OUT_OF_QUOTA, {"cause": "neighbour"}),
        ("cpu-quota:step=20", OUT_OF_QUOTA, {"cause": "compute"}),
        ("cpu-quota:step=20", OUT_OF_QUOTA, {"rank": 1}),
        ("link-slow:node=1,step=20,for=45000", SLOW_LINK, {"cause": "reader"}),
        ("link-slow:node=1,step=20,for=45000", SLOW_LINK, {"cause": "loss"}),
        ("link-slow:node=1,step=20,for=45000", SLOW_LINK, {"nodes": [0]}),
        ("link-slow:node=1,step=20,for=45000", SLOW_LINK, {"side": "switch", "nodes": [0, 1]}),
        ("link-loss:node=1,step=20,for=45000", LOSSY_LINK, {"cause": "speed"}),
        ("link-loss:node=1,step=20,for=45000", LOSSY_LINK, {"side": "link"}),
    ],
)
def test_a_word_with_another_cause_or_about_another_is_none(
    spec: str, word: Event, wrong: dict[str, Any]
) -> None:
    notes = [told(0, "about to", 10, nodes=[1], phase="forward", step=20), told(0, "did", 10)]
    saw = ["was slow for 45 s", "lost packets for 45 s"]
    for event_, is_seen in ((word, True), (replace(word, data={**word.data, **wrong}), False)):
        found = facts(notes=notes, sightings={0: saw}, events=[*LINKS_KNOWN, event_])
        assert verdict(parse(spec), found)["faults"][0]["seen"] == is_seen


@pytest.mark.parametrize(
    ("lasts_ms", "before", "why"),
    [
        (45_000, [], "was not known"),
        (45_000, [LINKS_KNOWN[0]], "was not known"),
        (45_000, [*LINKS_KNOWN, event(9.8, "mesh", node=0)], "was not known"),
        (44_999, LINKS_KNOWN, "takes 45 s"),
    ],
)
def test_where_nobody_can_know_of_a_link_nobody_is_asked(
    lasts_ms: int, before: list[Event], why: str
) -> None:
    notes = [told(0, "about to", 10, nodes=[1], phase="forward", step=20), told(0, "did", 10)]
    found = facts(notes=notes, sightings={0: ["it was slow for 45 s"]}, events=before)
    [report] = verdict(parse(f"link-slow:node=1,step=20,for={lasts_ms}"), found)["faults"]
    assert report["seen"] and why in report["evidence"]


def test_what_is_written_while_a_store_is_rough_does_not_show_that_it_has_healed() -> None:
    notes = [told(0, "about to", 10, phase="forward", step=20), told(0, "did", 10)]
    fault = parse("store-slow:step=20,for=500")
    found = facts(notes=notes, events=[WRITTEN], sightings={0: ["1 met with it", "meanwhile"]})
    assert verdict(fault, found)["faults"][0]["seen"]
    found.notes.append(told(0, "ended", 13))
    assert not verdict(fault, found)["faults"][0]["seen"]


def test_half_a_checkpoint_proves_nothing_unless_a_fault_made_it() -> None:
    kill, flip = parse("kill:step=20,phase=seal"), parse("flip:step=30,where=store")
    found = facts(half=["step-1: block 0: another checksum"])
    report = verdict(kill, found)
    assert not report["proved"] and report["half_checkpoints"] == found.half
    assert judge([kill, flip], found, facts().hash)["half_checkpoints"] == []


def test_only_a_flip_may_cost_more_than_one_step() -> None:
    lost = [
        *facts().events[:4],
        event(12.5, "resumed", "from an older slot", step=17, source="memory", lost_steps=2),
    ]
    assert not verdict(parse("kill:step=20"), facts(events=lost))["within_one_step"]
    notes = [facts().notes[0], told(0, "did", 10, paths=[])]
    assert verdict(parse("flip:step=20"), facts(events=lost, notes=notes))["within_one_step"]


# -- nodes


@pytest.mark.parametrize(
    ("policy", "lost", "survives"),
    [
        ("none", {2}, False),
        ("copies:2", {2}, True),
        ("copies:2", {0, 2}, True),
        ("copies:2", {0, 1}, False),
        ("copies:3", {0, 1}, True),
        ("parity:4", {3}, True),
        ("parity:4", {0, 3}, False),
        ("rs:2+2", {0, 3}, True),
        ("auto", {3}, False),
        ("auto", set(), True),
        ("none", set(), True),
    ],
)
def test_what_a_policy_survives(policy: str, lost: set[int], survives: bool) -> None:
    assert covers(policy, 4, lost) is survives


def resumed(at_s: float, step: int, source: str, lost_steps: int) -> Event:
    return event(
        at_s, "resumed", "every rank has proven", step=step, source=source, lost_steps=lost_steps
    )


def after_losses(
    again: Event,
    *losses: tuple[float, int],
    protected_s: tuple[float, ...] = (2.5,),
    fetched: int = 0,
) -> dict[str, Any]:
    """What is said of the last recovery, `again`, of four nodes with two copies; `losses`: when
    each node was lost."""
    faults = [parse(f"kill-node:node={node},step=20") for _, node in losses]
    notes = [
        told(n, "about to", at_s, phase="forward", step=20, nodes=[node])
        for n, (at_s, node) in enumerate(losses)
    ]
    events = [
        event(2, "resumed", step=-1, source="fresh", lost_steps=0),
        event(11, "fetched", rank=1, nbytes=fetched, sources=[0]),
    ]
    events += [
        resumed(at_s + 1, 19, "memory", 1)
        for at_s, _ in losses[:-1]
        if at_s + 1 < again.mono_ns / S_NS - 1
    ]
    protected_ns = {n: int(s * S_NS) for n, s in enumerate(protected_s)}
    found = facts(
        notes=notes, events=[*events, again], nodes=4, policy="copies:2", protected_ns=protected_ns
    )
    report = judge(faults, found, facts().hash)
    return {
        **report["recoveries"][-1],
        "within_one_step": report["within_one_step"],
        "fetched": report["software_failures_fetched_bytes"],
    }


def test_a_lost_node_that_the_policy_covers_may_cost_one_step() -> None:
    said = after_losses(resumed(12, 19, "memory", 1), (10, 1), fetched=4096)
    assert (
        said["lost_nodes"],
        said["covered"],
        said["within_one_step"],
        said["fetched_bytes"],
        said["fetched"],
    ) == ((1,), True, True, 4096, 0)
    assert not after_losses(resumed(12, 9, "store", 11), (10, 1))["within_one_step"]


def test_more_lost_than_the_policy_covers_comes_from_the_store() -> None:
    said = after_losses(resumed(12, 9, "store", 11), (10, 0), (10.1, 1))
    assert (said["lost_nodes"], said["covered"], said["within_one_step"]) == ((0, 1), False, True)


def test_what_is_lost_before_the_copies_are_whole_again_is_lost_together() -> None:
    """The second loss comes after the first one's recovery: what counts is whether everything was
    protected between them."""
    again = resumed(16, 19, "store", 5)
    assert after_losses(again, (10, 0), (14, 1))["lost_nodes"] == (0, 1)
    assert after_losses(again, (10, 0), (14, 1), protected_s=(2.5, 12))["lost_nodes"] == (1,)


def test_what_auto_chose_is_what_counts() -> None:
    for chose, covered in (("copies:2", True), ("none", False)):
        events = [
            event(2, "resumed", step=-1, source="fresh", lost_steps=0),
            event(3, "policy", policy=chose),
            resumed(12, 19, "memory", 1),
        ]
        notes = [told(0, "about to", 10, phase="forward", step=20, nodes=[1])]
        report = judge(
            [parse("kill-node:node=1,step=20")],
            facts(notes=notes, events=events, nodes=4, policy="auto"),
            facts().hash,
        )
        assert report["recoveries"][-1]["covered"] is covered


def test_bytes_that_a_software_failure_moves_are_told() -> None:
    moved = [
        *facts().events[:4],
        event(12.1, "fetched", rank=0, nbytes=100, sources=[1]),
        *facts().events[4:],
    ]
    assert (
        verdict(parse("kill:step=20"), facts(events=moved))["software_failures_fetched_bytes"]
        == 100
    )
    assert verdict(parse("kill:step=20"), facts())["software_failures_fetched_bytes"] == 0


def test_what_a_lost_node_had_not_done_was_not_lost() -> None:
    """The keeper knows of the survivors only; the drill saw all ranks."""
    resumed = [
        event(2, "resumed", step=-1, source="fresh", lost_steps=0, epoch=1),
        event(12, "resumed", step=17, source="memory", lost_steps=2, epoch=2),
    ]
    seen = DrillFacts(
        "j", world_size=2, events=resumed, completed={(1, 0): 19, (1, 1): 18, (2, 0): 17}
    )
    assert [r.lost_steps for r in recoveries([], seen)] == [1]
    assert [r.lost_steps for r in recoveries([], replace(seen, completed={(1, 0): 19}))] == [2], (
        "a rank that was never seen: the keeper's word"
    )


def test_an_epochs_number_that_came_again_says_nothing_of_its_first_life() -> None:
    """All memory was lost, and epochs count anew: what the second life of a number had completed
    was not lost by the first."""
    resumed = [
        event(2, "resumed", step=-1, source="fresh", lost_steps=0, epoch=1),
        event(12, "resumed", step=5, source="memory", lost_steps=1, epoch=2),
        event(22, "resumed", step=99, source="store", lost_steps=3, epoch=1),
    ]
    seen = DrillFacts(
        "j",
        world_size=2,
        events=resumed,
        completed={(1, 0): 119, (1, 1): 119, (2, 0): 102, (2, 1): 102},
    )
    assert [r.lost_steps for r in recoveries([], seen)] == [1, 3]


@pytest.mark.parametrize("fault", ["nan:site=grad,rank=0,step=20", "spike:rank=0,step=20"])
@pytest.mark.parametrize(
    ("kind", "data", "is_seen"),
    [
        ("numbers-judged", {"rank": 0, "step": 20}, True),
        ("numbers-judged", {"rank": 0, "step": 21}, True),
        ("numbers-judged", {"rank": 1, "step": 20}, False),
        ("numbers-judged", {"rank": None, "step": 20}, False),
        ("numbers-judged", {"rank": 0, "step": 19}, False),
        ("wrong-numbers", {"rank": 0, "step": 20}, False),
    ],
)
def test_a_wrong_number_is_seen_where_a_verdict_names_its_rank(
    fault: str, kind: str, data: dict[str, Any], is_seen: bool
) -> None:
    events = [event(10.1, kind, "step 20: hardware", "rank 0", **data)]
    report = verdict(parse(fault), facts(events=events, sightings={}))
    assert report["faults"][0]["seen"] == report["proved"] == is_seen


@pytest.mark.parametrize(
    "kind", ["nan:site=weight", "bitflip:site=weight,bit=3", "spike:site=grad"]
)
def test_a_wrong_number_costs_the_steps_until_it_is_found(kind: str) -> None:
    """What nobody looked at is found some steps later, and all go back in their processes."""
    back = event(12.5, "resumed", step=19, source="memory", lost_steps=8, epoch=2)
    report = verdict(parse(f"{kind},rank=0,step=20"), facts(events=[*facts().events[:2], back]))
    assert report["lost_steps"] == [8] and report["within_one_step"]
    assert report["recoveries"][0]["causes"] == (0,)
