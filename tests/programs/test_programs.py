"""Generated programs: interrupted after a drawn step and restored into a program that was built
anew, each ends as one that was never disturbed; or it is refused by name, with its memory kept."""

from __future__ import annotations

import shutil
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepstep.edge.store.store import Store
from keepstep.edge.torch import checkpoint
from keepstep.edge.torch.dcp.format import _rank_state
from keepstep.edge.torch.state import Protected
from keepstep.errors import KeepstepError
from tests.edge.torch.conftest import Room
from tests.edge.torch.dcp.one_node import write_checkpoint
from tests.programs.program import (
    AVERAGES,
    BLOCKS,
    CONTAINERS,
    EVENTS,
    OPTIMIZERS,
    SCHEDULES,
    VALUES,
    ZEROING,
    Plan,
    Program,
)

pytestmark = pytest.mark.timeout(600)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    total = draw(st.integers(2, 6))
    some = st.lists(st.sampled_from(sorted(BLOCKS)), max_size=4).map(tuple)
    events = st.tuples(st.integers(0, total - 1), st.sampled_from(EVENTS))
    return Plan(
        seed=draw(st.integers(1, 1000)),
        blocks=draw(some),
        dtype=draw(st.sampled_from(["float32", "float64", "bfloat16"])),
        optimizers=draw(
            st.lists(st.sampled_from(sorted(OPTIMIZERS)), min_size=1, max_size=2).map(tuple)
        ),
        groups=draw(st.sampled_from(["one", "one a block", "one a parameter"])),
        schedule=draw(st.sampled_from(["none", *SCHEDULES])),
        zeroing=draw(st.sampled_from(ZEROING)),
        container=draw(st.sampled_from(CONTAINERS)),
        average=draw(st.sampled_from(AVERAGES)),
        values=draw(st.lists(st.sampled_from(VALUES), unique=True, max_size=3).map(tuple)),
        events=draw(st.lists(events, max_size=3).map(tuple)),
        wrapped=draw(st.booleans()),
        scaler=draw(st.booleans()),
        total_steps=total,
        cut=draw(st.integers(-1, total - 2)),
    )


def protect(program: Program) -> Protected:
    """As a session does, without its threads."""
    protected = Protected.of(program.protected, lazy=True)
    for optimizer in protected.optimizers:
        optimizer.register_step_post_hook(protected.used_gradients.updated)
    return protected


def undisturbed(plan: Plan) -> str:
    program = Program(plan)
    program.run(0, plan.total_steps)
    return program.digest()


def interrupted(plan: Plan, room: Room) -> str:
    program = Program(plan)
    protected = protect(program)
    program.run(0, plan.cut + 1)
    room.save_from(protected)
    program.run(plan.cut + 1, plan.total_steps)  # what was done since does not count
    again = Program(plan)
    torch.randn(5)
    room.load_into(protect(again))
    again.run(plan.cut + 1, plan.total_steps)
    return again.digest()


@pytest.mark.filterwarnings("ignore")
@hypothesis.settings(max_examples=500, deadline=None, print_blob=True)
@given(plan=plans())
def test_a_program_goes_on_as_if_nothing_had_happened(
    tmp_path_factory: pytest.TempPathFactory, plan: Plan
) -> None:
    path: Path = tmp_path_factory.mktemp("slot") / "slot-0"
    room = Room(path)
    try:
        found = interrupted(plan, room)
    except KeepstepError as error:
        hypothesis.event(f"refused: {type(error).__name__}: {str(error)[:60]}")
        assert room.slot is not None
        room.slot.verify()  # raises if anything is lost
        return
    finally:
        if room.slot is not None:
            room.slot.close()
        path.unlink(missing_ok=True)
    assert found == undisturbed(plan)


@pytest.mark.filterwarnings("ignore")
@hypothesis.settings(max_examples=100, deadline=None, print_blob=True)
@given(plan=plans())
def test_a_program_goes_on_from_a_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, plan: Plan
) -> None:
    where = tmp_path_factory.mktemp("store")
    room = Room(where / "slot-0")
    program = Program(plan)
    protected = protect(program)
    program.run(0, plan.cut + 1)
    room.save_from(protected)
    assert room.slot is not None
    state, fingerprint, _ = _rank_state(room.slot)
    step = plan.cut + 1
    write_checkpoint(Store(where / "store"), step, "job", [state], {}, fingerprint)
    again = Program(plan)
    torch.randn(5)
    checkpoint.load(Store(where / "store"), step, 0, 1, protect(again))
    again.run(step, plan.total_steps)
    room.slot.close()
    shutil.rmtree(where)
    assert again.digest() == undisturbed(plan)


def test_the_oracle_sees_a_difference() -> None:
    """One lost value, one draw too many, one gradient that is there: each is another digest."""
    plan = Plan(values=("counter",), zeroing="last")
    digests = set()
    for change in ("nothing", "value", "draw", "gradient", "mode"):
        program = Program(plan)
        program.run(0, 2)
        if change == "value":
            program.values["counter"]["n"] += 1
        elif change == "draw":
            torch.rand(1)
        elif change == "gradient":
            program.model[0].weight.grad = torch.zeros(4, 4)
        elif change == "mode":
            program.model[1].eval()
        digests.add(program.digest())
    assert len(digests) == 5
