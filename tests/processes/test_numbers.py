"""Wrong numbers in real trainings of two ranks: named, run again, undone. The oracle is the state
of a training in which nothing was planted, or which left out the same batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from keepstep.edge.os.journal import read_journal
from keepstep.model.events import Event
from keepstep.testing.wrong_numbers import Plant, Planting

pytestmark = pytest.mark.timeout(300)

STEPS = 24
UNCAPTURED = Path(__file__).parents[1] / "programs" / "uncaptured.py"
APART = UNCAPTURED.with_name("apart.py")
KEEPER_STOPS = UNCAPTURED.with_name("keeper_stops.py")
NAN = float("nan")


@dataclass(frozen=True)
class Outcome:
    code: int
    digests: list[str]
    events: list[Event]
    log: str

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    @property
    def verdicts(self) -> list[tuple[str, str, int | None, str]]:
        return [
            (e.data["culprit"], e.data["lasting"], e.data["rank"], e.data["where"])
            for e in self.of("numbers-judged")
        ]


def train(
    room: Path,
    planting: Planting,
    *options: str,
    ranks: int = 2,
    every: int | None = 1,
    uncaptured: str = "",
    program: Path | None = None,
) -> Outcome:
    """`every`: steps that are looked at; None: no option says anything, as by default."""
    results, arena = room / "results", room / "arena"
    results.mkdir(parents=True)
    arena.mkdir()
    plan = planting.write(room / "plan.json")
    command = [sys.executable, "-m", "keepstep.cli.main", "run", "--job", "j"]
    command += ["--nproc-per-node", str(ranks), "--arena-dir", str(arena)]
    if every is not None:
        command += ["--wrong-numbers", "skip", "--look-every-steps", str(every)]
    command += ["--state-dir", str(room / "state"), "--grace-s", "0", *options]
    script = UNCAPTURED if uncaptured else program
    module = ["-m", "keepstep.testing.wrong_numbers"]
    command += [*(module if script is None else [str(script)]), str(plan), str(results)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "UNCAPTURED": uncaptured}
    ended = subprocess.run(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240
    )
    digests = [path.read_text() for path in sorted(results.iterdir())]
    events = list(read_journal(room / "state" / "j" / "journal.jsonl"))
    return Outcome(ended.returncode, digests, events, ended.stdout.decode())


@cache
def _undisturbed(place: Path, drop: tuple[int, ...], ranks: int) -> list[str]:
    name = "-".join(map(str, ("undisturbed", ranks, *drop)))
    outcome = train(place / name, Planting(STEPS, drop=drop), "--wrong-numbers", "off", ranks=ranks)
    assert outcome.code == 0 and len(outcome.digests) == ranks, outcome.log
    return outcome.digests


def undisturbed(place: Path, drop: tuple[int, ...] = (), ranks: int = 2) -> list[str]:
    return _undisturbed(place, drop, ranks)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("numbers")


def assert_no_bad_stamp_was_resumed_from(outcome: Outcome, first_bad: int) -> None:
    for event in outcome.of("restored"):
        assert event.data["step"] < first_bad


@pytest.mark.everyday
def test_a_device_that_errs_once_leaves_no_trace(tmp_path: Path, place: Path) -> None:
    outcome = train(tmp_path, Planting(STEPS, (Plant("gradient", 1, 9, layer=2),)))
    assert outcome.code == 0, outcome.log
    assert outcome.verdicts == [("hardware", "transient", 1, "model.5.weight")]
    assert outcome.digests == undisturbed(place)
    assert_no_bad_stamp_was_resumed_from(outcome, 9)
    assert len(outcome.of("soft-error")) == 1


def test_an_early_step_that_is_run_again_leaves_no_trace(tmp_path: Path, place: Path) -> None:
    """It comes to the same bits here, and what a device does later is judged as ever."""
    planting = Planting(STEPS, (Plant("gradient", 1, 9, layer=2),))
    outcome = train(tmp_path, planting, "--calibrate-runs", "2")
    assert outcome.code == 0, outcome.log
    [told] = outcome.of("repeats")
    assert told.data["step"] == 2 and "run 3 times" in told.why and "the same bits" in told.why
    assert [e.data["step"] for e in outcome.of("restored")][:2] == [1, 1]  # of each rank, twice
    assert outcome.verdicts == [("hardware", "transient", 1, "model.5.weight")]
    assert outcome.digests == undisturbed(place)


@pytest.mark.parametrize("step", [9, 15])
def test_memory_that_changes_where_no_other_rank_has_the_same_is_undone(
    tmp_path: Path, place: Path, step: int
) -> None:
    """A bit of one weight of one rank, which an update that is made again does not have."""
    planting = Planting(STEPS, (Plant("flip", 0, step, layer=2),), seals=True)
    outcome = train(tmp_path, planting, "--replay-update-bytes", "1000000", ranks=1)
    assert outcome.code == 0, outcome.log
    assert outcome.verdicts == [("hardware", "transient", 0, "model.5.weight")]
    assert outcome.digests == undisturbed(place, ranks=1)
    assert_no_bad_stamp_was_resumed_from(outcome, step)
    [told] = outcome.of("repeats")
    assert "the same bits" in told.why


@pytest.mark.everyday
def test_a_bad_batch_is_left_out(tmp_path: Path, place: Path) -> None:
    outcome = train(tmp_path, Planting(STEPS, (Plant("batch", 1, 9),)))
    assert outcome.code == 0, outcome.log
    [(culprit, _, rank, where)] = outcome.verdicts
    assert (culprit, rank) == ("data", 1)
    assert where.startswith("model.0 ") or "batch 9" in where
    assert outcome.digests == undisturbed(place, drop=(9,))
    assert [e.data["batches"] for e in outcome.of("batch-skipped")] == [[["0", 0, 9]]] * 2


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("site", "culprit", "where"),
    [
        ("weight", "model", "model.5.weight"),
        ("moment", "model", "exp_avg of model.5.weight"),
        ("gradient", "hardware", "model.5.weight"),
        ("reduced", "hardware", "model.5.weight"),
    ],
)
def test_what_comes_into_memory_by_itself_is_undone(
    tmp_path: Path, place: Path, site: str, culprit: str, where: str, rank: int
) -> None:
    outcome = train(tmp_path, Planting(STEPS, (Plant(site, rank, 9, layer=2),)))
    assert outcome.code == 0, outcome.log
    [(found, _, found_rank, found_where)] = outcome.verdicts
    assert (found, found_rank) == (culprit, rank)
    assert where.split()[-1] in found_where or found_where.startswith("optimizer.")
    assert outcome.digests == undisturbed(place)
    assert_no_bad_stamp_was_resumed_from(outcome, 9)


@pytest.mark.parametrize("runs", [1, 5, 50])
def test_a_device_that_errs_for_a_while_trains_on(tmp_path: Path, place: Path, runs: int) -> None:
    outcome = train(tmp_path, Planting(STEPS, (Plant("gradient", 0, 7, layer=1, runs=runs),)))
    assert outcome.code == 0, outcome.log
    [(culprit, lasting, rank, _)] = outcome.verdicts
    assert (culprit, lasting, rank) == ("hardware", "transient", 0)
    assert outcome.digests == undisturbed(place)


def test_a_device_that_errs_for_ever_leaves(tmp_path: Path) -> None:
    plant = Plant("gradient", 1, 7, layer=1, runs=0)
    outcome = train(tmp_path, Planting(STEPS, (plant,)), "--budget", "device=0,crash=0")
    assert outcome.code != 0
    assert outcome.verdicts[0][:3] == ("hardware", "permanent", 1)
    assert any("DeviceError" in e.why or e.data.get("kind") == "device" for e in outcome.events)


def test_a_gradient_that_explodes_is_run_again(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEPSTEP_SKIP_SPIKES", "1")
    steps = 60
    plant = Plant("gradient", 1, 50, layer=2, value=1e7)
    outcome = train(tmp_path, Planting(steps, (plant,)))
    calm = train(place / "calm", Planting(steps))
    assert outcome.code == calm.code == 0, outcome.log
    assert outcome.verdicts == [("hardware", "transient", 1, "")]
    assert calm.verdicts == []
    assert outcome.digests == calm.digests


def test_a_scaler_that_skips_is_no_fault(tmp_path: Path) -> None:
    outcome = train(tmp_path, Planting(STEPS, scaler=True))
    assert outcome.code == 0, outcome.log
    assert outcome.verdicts == [] and outcome.of("wrong-numbers") == []


def test_policy_stop_ends_with_the_evidence(tmp_path: Path) -> None:
    options = ("--wrong-numbers", "stop")
    outcome = train(tmp_path, Planting(STEPS, (Plant("batch", 0, 9),)), *options)
    assert outcome.code == 2, "a person decides"
    assert outcome.verdicts[0][0] == "data"
    assert "WrongNumbersError" in outcome.log
    assert outcome.of("restart") == [] and len(outcome.of("protected")) == 1


def test_without_a_body_of_its_own_the_update_is_left_out(tmp_path: Path) -> None:
    planting = Planting(STEPS, (Plant("gradient", 1, 9, layer=2),), with_step=False)
    outcome = train(tmp_path, planting)
    assert outcome.code == 0, outcome.log
    [event] = outcome.of("wrong-numbers")
    assert "left out" in event.why and "with step" in event.why
    assert outcome.of("run-again") == []


def test_a_rank_alone(tmp_path: Path, place: Path) -> None:
    outcome = train(tmp_path, Planting(STEPS, (Plant("batch", 0, 9),)), ranks=1)
    assert outcome.code == 0, outcome.log
    assert outcome.verdicts[0][0] == "data"
    assert outcome.digests == undisturbed(place, drop=(9,), ranks=1)
    assert json.dumps(outcome.verdicts)


@pytest.mark.everyday
@pytest.mark.parametrize("site", ["gradient", "weight", "moment", "batch"])
def test_what_nobody_looked_at_is_undone_all_the_same(
    tmp_path: Path, place: Path, site: str
) -> None:
    """Step 9 is none of those that are looked at by default. Whose state was bad first is known
    where each step is captured."""
    planting = Planting(STEPS, (Plant(site, 1, 9, layer=2),), seals=True)
    outcome = train(tmp_path, planting, every=8)
    assert outcome.code == 0, outcome.log
    drop = (9,) if site == "batch" else ()
    assert outcome.digests == undisturbed(place, drop=drop)
    assert_no_bad_stamp_was_resumed_from(outcome, 9)
    [(culprit, _, rank, _)] = outcome.verdicts
    assert (culprit, rank) in {
        "batch": {("data", 1)},
        "moment": {("unknown", 1)},
        "weight": {("unknown", None)},
        "gradient": {("unknown", None)},
    }[site]


@pytest.mark.everyday
@pytest.mark.parametrize("uncaptured", ["9", "8,9,10,11"])
@pytest.mark.parametrize("site", ["gradient", "batch"])
def test_a_bad_step_that_was_not_captured_costs_no_good_snapshot(
    tmp_path: Path, place: Path, site: str, uncaptured: str
) -> None:
    """The first snapshot that is bad is of a later step. Which steps have one is what is tried, so
    each is sealed before the next begins: on a busy machine captures skip steps by themselves."""
    planting = Planting(STEPS, (Plant(site, 1, 9, layer=2),), seals=True)
    outcome = train(tmp_path, planting, every=8, uncaptured=uncaptured)
    assert outcome.code == 0, outcome.log
    assert outcome.digests == undisturbed(place, drop=(9,) if site == "batch" else ())
    newest_good = 8 if uncaptured == "9" else 7
    assert {event.data["step"] for event in outcome.of("restored")} == {newest_good}
    assert all(event.data["step"] > 9 for event in outcome.of("condemned"))
    [(culprit, _, rank, _)] = outcome.verdicts
    assert (culprit, rank) == {"gradient": ("unknown", None), "batch": ("data", 1)}[site]


@pytest.mark.everyday
@pytest.mark.parametrize(("site", "step"), [("gradient", 16), ("batch", 9)])
def test_by_default_it_is_undone_by_itself(
    tmp_path: Path, place: Path, site: str, step: int
) -> None:
    """Step 16 is looked at, and its update is made."""
    outcome = train(tmp_path, Planting(STEPS, (Plant(site, 1, step, layer=2),)), every=None)
    assert outcome.code == 0, outcome.log
    assert outcome.digests == undisturbed(place, drop=(step,) if site == "batch" else ())
    assert_no_bad_stamp_was_resumed_from(outcome, step)
    [(culprit, _, rank, where)] = outcome.verdicts
    if site == "batch":
        assert (culprit, rank) == ("data", 1)
    elif step == 16:
        assert (culprit, rank, where) == ("hardware", 1, "model.5.weight")
    assert outcome.of("restart") == []


def test_who_stands_behind_a_step_waits_for_a_keeper_that_answers(
    tmp_path: Path, place: Path
) -> None:
    """The keeper is stopped as rank 0 stands there; without one nobody knows who else does."""
    plants = (Plant("weight", 1, 9, layer=2),)
    outcome = train(tmp_path, Planting(STEPS, plants), every=None, program=KEEPER_STOPS)
    assert outcome.code == 0, outcome.log
    assert len(outcome.of("keeper-stuck")) == 1
    assert outcome.digests == undisturbed(place)
    assert_no_bad_stamp_was_resumed_from(outcome, 9)
    assert outcome.of("restart") == [] and len(outcome.verdicts) == 1


@pytest.mark.parametrize("site", ["update", "rate"])
def test_by_default_what_an_update_is_made_with_or_makes_is_undone(
    tmp_path: Path, place: Path, site: str
) -> None:
    """NaN that finite gradients lead to: it was taken for the program's, and healthy batches were
    left out. A device makes it in six updates, which is more than one step and its second run."""
    plant = Plant(site, 1, 9, layer=2, runs=6 if site == "update" else 1)
    options = ("--look-every-steps", "1")
    outcome = train(tmp_path, Planting(STEPS, (plant,), seals=True), *options, every=None)
    assert outcome.code == 0, outcome.log
    assert outcome.of("meant") == outcome.of("batch-skipped") == []
    assert outcome.digests == undisturbed(place)
    assert_no_bad_stamp_was_resumed_from(outcome, 9)


@pytest.mark.everyday
def test_by_default_ranks_that_share_nothing_are_neither_stopped_nor_waited_for(
    tmp_path: Path,
) -> None:
    """Of 12 and 60 steps, without a process group; the longer one goes wrong for good."""
    (tmp_path / "arena").mkdir()
    command = [sys.executable, "-m", "keepstep.cli.main", "run", "--job", "j", "--grace-s", "0"]
    command += ["--nproc-per-node", "2", "--arena-dir", str(tmp_path / "arena")]
    command += ["--state-dir", str(tmp_path / "state"), str(APART), str(tmp_path)]
    ended = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120, check=False
    )
    log = ended.stdout.decode()
    assert ended.returncode == 0, log
    assert {path.name: path.read_text() for path in tmp_path.glob("rank-*")} == {
        "rank-0": "12 finite",
        "rank-1": "60 not finite",
    }
    events = list(read_journal(tmp_path / "state" / "j" / "journal.jsonl"))
    assert any("left as they are" in e.why for e in events if e.kind == "wrong-numbers")
    assert not any(e.kind in ("restart", "hang", "run-again") for e in events)


def test_what_the_first_step_after_a_restart_spoils_is_not_taken_for_meant(tmp_path: Path) -> None:
    """By default one step in eight is looked at: the next look came when the state was spoilt, and
    took it for the program's own. It was sealed, and no good snapshot was left."""

    def life(number: int, job: str) -> str:
        environ = {
            **os.environ,
            "LIFE": str(number),
            "KEEPSTEP_JOB": job,
            "KEEPSTEP_ARENA_DIR": str(tmp_path / "arena"),
            "KEEPSTEP_STATE_DIR": str(tmp_path / "state"),
        }
        command = [sys.executable, str(UNCAPTURED.with_name("spoilt_after_restart.py"))]
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
        assert ended.returncode == (-9 if number == 1 else 0), ended.stderr
        return ended.stdout.strip()

    (tmp_path / "arena").mkdir()
    calm = life(0, "calm")
    life(1, "killed")
    assert life(2, "killed") == calm
    kinds = [e.kind for e in read_journal(tmp_path / "state" / "killed" / "journal.jsonl")]
    assert "wrong-numbers" in kinds and "run-again" in kinds
