"""The benchmark of the peers measures what it says: who is when, what is quiet, and the protocol
that contenders are asked in, with the one that needs no library."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.harness import Noise, Watch, median, turns, why_no_verdict
from benchmarks.peers.__main__ import figures, table, verdicts
from benchmarks.peers.contestant import Contestant, Failed
from benchmarks.peers.environments import first_error
from benchmarks.peers.pair import copy_bytes_per_s
from benchmarks.peers.saver import NAMES, NO_PEER_COPY, NOT_BUILT, PAIRS
from benchmarks.peers.turn import Length, Turn, measure

QUIET = Noise(0.1, 1.4, 0.02)


def test_every_round_has_everyone_once_and_nobody_keeps_a_place() -> None:
    order = turns(["a", "b", "c"], 6)
    assert all(sorted(row) == ["a", "b", "c"] for row in order)
    assert order[0] == order[1][::-1] and order[2] == order[3][::-1]
    assert {row[0] for row in order} == {"a", "b", "c"} == {row[-1] for row in order}
    assert turns(["a"], 2) == [["a"], ["a"]] and turns([], 1) == [[]]


def test_a_median_is_of_what_was_measured() -> None:
    assert median([3.0, None, 1.0, 2.0]) == 2.0
    assert median([None]) is None and median([]) is None


@pytest.mark.parametrize(
    ("noises", "word"),
    [
        ([], "nothing was measured"),
        ([Noise(0.6, 0.6, 0.0)], "the load was 0.6 before"),
        ([QUIET, Noise(2.0, 2.0, 0.4)], "0.40 cores"),
    ],
    ids=["nothing", "load", "others"],
)
def test_there_is_no_verdict_where_the_machine_was_not_quiet(
    noises: list[Noise], word: str
) -> None:
    why = why_no_verdict(noises)
    assert why is not None and why.startswith("no verdict") and word in why


def test_our_own_load_within_a_run_refuses_nothing() -> None:
    assert why_no_verdict([QUIET, Noise(2.5, 2.8, 0.02)]) is None


def test_noise_is_what_the_machine_spent_less_our_own() -> None:
    own, everyone, now = iter([1.0, 6.0]), iter([100.0, 112.0]), iter([50.0, 60.0])
    watch = Watch(
        own.__next__, everyone.__next__, load=iter([0.3, 1.9]).__next__, clock=now.__next__
    )
    assert watch.end() == Noise(0.3, 1.9, pytest.approx(0.7))


def test_the_machine_spends_what_we_spend() -> None:
    """Against the real kernel: ten milliseconds are its unit."""
    machine_s, own_s = harness.machine_cpu_s(), harness.cpu_s([os.getpid()])
    while (spent_s := harness.cpu_s([os.getpid()]) - own_s) < 0.05:
        pass
    assert harness.machine_cpu_s() - machine_s >= spent_s - 0.02
    assert harness.cpu_s([]) == 0 == harness.cpu_s([1 << 30])


def report(no_verdict: str | None) -> dict[str, object]:
    rows = {
        "torch_save": Turn(slowdown=0.5, call_s=0.1, copy_bytes_per_s=3e9),
        "keepstep": Turn(slowdown=0.1, copy_bytes_per_s=1e9),
    }
    return {
        "at": "now",
        "machine": "here",
        "cores": [0],
        "rounds": 1,
        "absent": {"nvrx": "no wheel"},
        "no_peer_copy": {},
        "kinds": {
            "tiny": {
                "figures": {name: figures([turn]) for name, turn in rows.items()},
                "noise": [{"load_before": 0.1, "load_after": 0.2, "others_cores": 0.0}],
            }
        },
        "no_verdict": no_verdict,
    }


def test_a_verdict_names_the_least_and_a_refusal_names_nobody() -> None:
    assert verdicts(report(None)) == [
        "tiny, slowdown: least keepstep, then torch_save",
        "tiny, copy to a peer: most torch_save, then keepstep",
    ]
    refused = report("no verdict: the load was 9.0")
    assert verdicts(refused) == ["no verdict: the load was 9.0"]
    told = table(refused)
    assert "least" not in told and "| torch_save | +50%" in told
    assert "nvrx: not there: no wheel" in told


def test_figures_are_medians_and_keep_every_reason() -> None:
    found = figures(
        [
            Turn(call_s=1.0, torn=1, kill_lost_steps=0, mid_save_lost_steps=[1]),
            Turn(call_s=3.0, kill_lost_steps=2, mid_save_lost_steps=[0]),
            Turn(call_s=None, why="it fell over"),
        ]
    )
    assert (found["call_s"], found["torn"], found["why"]) == (2.0, 1, ["it fell over"])
    assert (found["kill_lost_steps"], found["mid_save_lost_steps"]) == (2, [1, 0])


def test_what_stands_in_the_way_is_told_in_one_line() -> None:
    said = "Collecting x\nERROR: No matching distribution found for x\nERROR: more\n"
    assert first_error(said) == "No matching distribution found for x"
    assert first_error("") == "it failed and said nothing"


def test_every_peer_has_a_module_or_a_reason_and_a_word_about_copies() -> None:
    there = {path.stem for path in Path(harness.__file__).parent.glob("peers/contenders/*.py")}
    assert set(NAMES) == {*NO_PEER_COPY, *PAIRS} == there | set(NOT_BUILT)


def test_a_state_says_of_which_step_it_is_and_an_optimizer_is_asked_before_it_changes() -> None:
    from benchmarks.peers.workload import Workload

    work, asked = Workload("tiny"), []
    work.optimizer.register_step_pre_hook(lambda *_: asked.append(work.stamped()))
    work.stamp(3)
    work.stamp(4)
    assert work.stamped() == 4 and asked == [None, 3]
    torn = next(iter(work.optimizer.state.values()))["exp_avg"]
    torn.view(-1)[-1] = 3
    assert work.stamped() is None


def test_a_contender_that_two_ranks_cannot_start_says_why(tmp_path: Path) -> None:
    found = copy_bytes_per_s("no_such", Path("/bin/false"), tmp_path / "room", "tiny", 1, [0])
    assert found == (None, "copy: it said nothing")


def test_a_turn_of_torch_save_from_the_first_save_to_a_kill_within_one(tmp_path: Path) -> None:
    room = tmp_path / "room"
    room.mkdir()
    contestant = Contestant("torch_save", Path(sys.executable), room, harness.cores(2))
    turn = measure(contestant, "tiny", Length(steps=2, pairs=1, kills=1), has_companion=False)
    assert turn.why is None and turn.torn == 0
    assert turn.kill_lost_steps == 0
    assert turn.mid_save_lost_steps in ([0], [1])  # the one that was being written
    assert turn.state_bytes and turn.tensors == 48 and turn.skipped == 0
    assert turn.first_whole_s and turn.first_call_s and turn.first_whole_s >= turn.first_call_s
    for figure in (turn.setup_s, turn.step_s, turn.call_s, turn.restore_s):
        assert figure is not None and figure > 0
    assert turn.kill_to_next_step_s and turn.mid_save_to_next_step_s
    assert turn.memory_ratio is not None and turn.memory_ratio > 0


def test_one_that_cannot_says_why_and_leaves_nothing_running(tmp_path: Path) -> None:
    contestant = Contestant("no_such", Path(sys.executable), tmp_path / "room", harness.cores(1))
    contestant.start()
    with pytest.raises(Failed, match="no_such"):
        contestant.ask("begin")
    contestant.end()
    assert harness.marked(contestant._mark) == []
