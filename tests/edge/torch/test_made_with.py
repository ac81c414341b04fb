"""Made with: an edit of the program that a restore undoes is told once, a schedule's doing is not;
another class of optimizer or scheduler is refused, from memory and from the store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CyclicLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)

from keepstep.edge.store.store import Store
from keepstep.edge.torch import checkpoint, restore
from keepstep.edge.torch.dcp.format import _rank_state
from keepstep.edge.torch.made_with import is_one_class
from keepstep.edge.torch.state import Protected
from keepstep.errors import LayoutError
from tests.edge.torch.conftest import Room
from tests.edge.torch.dcp.one_node import write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Load = Callable[[Protected], None]
Way = Callable[[Protected], Load]


@pytest.fixture(params=["memory", "store"])
def way(request: pytest.FixtureRequest, room: Room, tmp_path: Path) -> Way:
    """Saves a state, and gives what loads it."""

    def save(protected: Protected) -> Load:
        room.save_from(protected)
        if request.param == "memory":
            return room.load_into
        assert room.slot is not None
        state, about, _ = _rank_state(room.slot)
        url = str(tmp_path / "store")
        write_checkpoint(Store(url), 0, "job", [state], {}, about)

        def load(live: Protected) -> None:
            checkpoint.load(Store(url), 0, rank=0, world_size=1, protected=live)

        return load

    return save


def program(kind: Any = AdamW, schedule: Any = None, **options: Any) -> Protected:
    torch.manual_seed(1)
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters(), **options)
    parts = {"model": model, "optimizer": optimizer}
    if schedule is not None:
        parts["schedule"] = schedule(optimizer)
    return Protected.of(parts, lazy=True)


def trained(protected: Protected, steps: int = 5) -> Protected:
    model, optimizer = protected.objects["model"], protected.objects["optimizer"]
    schedule = protected.objects.get("schedule")
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).square().sum().backward()
        optimizer.step()
        if isinstance(schedule, ReduceLROnPlateau):
            schedule.step(1.0)
        elif schedule is not None:
            schedule.step()
    return protected


def told(protected: Protected) -> list[str]:
    return restore.caveats(protected)


EDITS = [
    ({"lr": 1e-2}, {"lr": 5e-4}, ["lr is 0.01 as saved, the program was made with 0.0005"]),
    ({"lr": torch.tensor(0.01)}, {"lr": torch.tensor(0.5)}, ["lr is 0.01 as saved", "with 0.5"]),
    ({"weight_decay": 0.1}, {"weight_decay": 0.2}, ["weight_decay is 0.1", "with 0.2"]),
    ({"betas": (0.9, 0.99)}, {"betas": (0.8, 0.99)}, ["betas is (0.9, 0.99)", "with (0.8, 0.99)"]),
    ({"lr": 1e-2}, {"lr": 5e-4, "eps": 1e-6, "amsgrad": True}, ["lr is", "eps is", "amsgrad is"]),
]


@pytest.mark.parametrize(("before", "edited", "facts"), EDITS)
def test_an_edited_option_is_told_in_one_line(
    way: Way, before: dict[str, Any], edited: dict[str, Any], facts: list[str]
) -> None:
    load = way(trained(program(**before)))
    live = program(**edited)
    assert told(live) == []  # nothing is loaded
    load(live)
    (line,) = told(live)
    assert all(fact in line for fact in ["optimizer: ", *facts, "protect()", "KEEPSTEP_FRESH=1"])


def test_only_a_few_edits_are_listed(way: Way) -> None:
    load = way(trained(program(lr=0.1, weight_decay=0.1)))
    live = program(lr=0.2, weight_decay=0.2, eps=0.2, amsgrad=True, maximize=True)
    load(live)
    (line,) = told(live)
    assert line.count(" as saved,") == 3 and "; and 2 more" in line


SCHEDULES: dict[str, Callable[[Any], LRScheduler]] = {
    "step": lambda o: StepLR(o, 2),
    "cosine": lambda o: CosineAnnealingLR(o, 7),
    "warm-up": lambda o: LambdaLR(o, lambda step: step / 10),
    "cycle": lambda o: OneCycleLR(o, 0.1, total_steps=20),
    "cyclic": lambda o: CyclicLR(o, 0.01, 0.1, 3),
    "plateau": lambda o: ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_a_schedule_does_is_no_edit(way: Way, name: str) -> None:
    def make(**options: Any) -> Protected:
        return program(SGD, SCHEDULES[name], momentum=0.9, **options)

    saved = make(lr=0.1)
    before = saved.objects["optimizer"].param_groups[0]["lr"]
    load = way(trained(saved))
    assert saved.objects["optimizer"].param_groups[0]["lr"] != before
    live = make(lr=0.1)
    load(live)
    assert told(live) == []


@pytest.mark.parametrize("name", ["step", "cosine", "warm-up", "plateau"])
def test_an_edit_is_told_beside_a_schedule(way: Way, name: str) -> None:
    load = way(trained(program(SGD, SCHEDULES[name], lr=0.1)))
    live = program(SGD, SCHEDULES[name], lr=0.3)
    load(live)
    (line,) = told(live)
    assert line.count(" as saved,") == 1 and "the program was made with 0.3" in line


def test_an_edited_schedule_is_told(way: Way) -> None:
    load = way(trained(program(SGD, lambda o: CosineAnnealingLR(o, 7), lr=0.1)))
    live = program(SGD, lambda o: CosineAnnealingLR(o, 9), lr=0.1)
    load(live)
    (line,) = told(live)
    assert line.startswith("schedule: T_max is 7 as saved, the program was made with 9: ")


def test_what_the_program_changes_by_hand_is_no_edit(way: Way) -> None:
    saved = trained(program(lr=0.1))
    saved.objects["optimizer"].param_groups[0]["lr"] = 0.05
    load = way(saved)
    live = program(lr=0.1)
    load(live)
    assert told(live) == []
    again = program(lr=0.05)  # what was saved is what the edit wants
    load(again)
    assert told(again) == []


def test_snapshots_that_do_not_say_are_taken(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = trained(program(lr=0.1))
    said = dict(saved.about())
    with monkeypatch.context() as older:
        kept = {k: v for k, v in said.items() if k not in ("classes", "made_with")}
        older.setattr(saved, "about", lambda: kept)
        room.save_from(saved)
    live = program(Adam, lr=0.2)
    room.load_into(live)
    assert told(live) == []


@pytest.mark.parametrize("live", [Adam, SGD])
def test_another_optimizer_is_refused_before_anything_is_loaded(way: Way, live: Any) -> None:
    load = way(trained(program(AdamW, lr=0.1)))
    other = program(live, lr=0.1)
    before = [p.tolist() for p in other.objects["model"].parameters()]
    message = rf"optimizer: saved by \S+AdamW, live \S+{live.__name__}\. .*KEEPSTEP_FRESH=1"
    with pytest.raises(LayoutError, match=message):
        load(other)
    assert [p.tolist() for p in other.objects["model"].parameters()] == before


def test_another_schedule_is_refused(way: Way) -> None:
    load = way(trained(program(SGD, SCHEDULES["plateau"], lr=0.1)))
    with pytest.raises(
        LayoutError, match=r"schedule: saved by \S+ReduceLROnPlateau, live \S+StepLR"
    ):
        load(program(SGD, SCHEDULES["step"], lr=0.1))


def test_a_class_may_move_within_its_package_or_out_of_the_script() -> None:
    assert is_one_class(["torch.optim.adamw", "AdamW"], ["torch.optim", "AdamW"])
    assert is_one_class(["__main__", "Mine"], ["project.optimizers", "Mine"])
    assert not is_one_class(["torch.optim.adamw", "AdamW"], ["bitsandbytes.optim", "AdamW"])
    assert not is_one_class(["torch.optim.adamw", "AdamW"], ["torch.optim.adam", "Adam"])
