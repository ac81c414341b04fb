"""The session's data: where it goes on, what is told; and loops that are not `steps`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import keepstep
from keepstep.edge.os.journal import read_journal
from keepstep.errors import ConfigError
from tests.runtime.rank.test_session import (
    Settings,
    Training,
    drained,
    settings,  # noqa: F401
    undisturbed,
)

ITEMS = 10


class Noise(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index)) + torch.rand(4)


class DataTraining:
    """One that reads its data, with dropout that draws from the global generator."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.05)
        self.loader = DataLoader(Noise(), 3, shuffle=True)

    def run(self, given: Settings, total: int, leave: bool = False) -> list[Any]:
        """Up to `total` steps; the sums of the batches, by step, and what is left in the end."""
        job = keepstep.protect(given, model=self.model, optimizer=self.optimizer, seen={})
        data = job.loader(self.loader)
        for step in job.steps(total):
            batch = next(data)
            self.optimizer.zero_grad()
            self.model(batch).square().mean().backward()
            self.optimizer.step()
            job.state["seen"][int(step)] = batch.sum().item()
            assert drained(job)
        seen = dict(job.state["seen"])
        job.close(ok=not leave)
        weights = [p.tolist() for p in self.model.parameters()]
        return [seen, weights, torch.get_rng_state().tolist()]


def caveats(given: Settings) -> list[str]:
    journal = Path(given["state_dir"]) / given["job"] / "journal.jsonl"
    return [event.why for event in read_journal(journal) if event.kind == "caveat"]


@pytest.mark.parametrize("left_after", [1, 3, 4, 6])  # an epoch has four batches
def test_the_data_goes_on_bit_for_bit(settings: Settings, left_after: int) -> None:  # noqa: F811
    calm = DataTraining().run({**settings, "job": "calm"}, 9)
    DataTraining().run(settings, left_after, leave=True)
    assert DataTraining().run(settings, 9) == calm
    assert caveats(settings) == []


def test_the_place_comes_back_from_the_store(settings: Settings, tmp_path: Path) -> None:  # noqa: F811
    calm = DataTraining().run({**settings, "job": "calm"}, 9)
    stored = {**settings, "store": str(tmp_path / "store")}
    DataTraining().run(stored, 5)  # ends well: its memory is gone
    assert DataTraining().run(stored, 9) == calm


def test_other_calls_than_before_are_told(settings: Settings) -> None:  # noqa: F811
    DataTraining().run(settings, 2, leave=True)
    training = DataTraining()
    job = keepstep.protect(settings, model=training.model, optimizer=training.optimizer, seen={})
    job.loader(training.loader, name="another")
    next(job.steps(4))
    job.close()
    told = caveats(settings)
    assert len(told) == 2
    assert "'another' begins at its start" in told[0] and "loader 0 was restored" in told[1]


def test_a_loader_that_is_made_too_late_is_refused(settings: Settings) -> None:  # noqa: F811
    job = keepstep.protect(settings, value=1)
    for _ in job.steps(1):
        with pytest.raises(ConfigError, match="before the first step"):
            job.loader(DataLoader(Noise()))
    job.close()


def draw(given: Settings, steps: int, how: str) -> None:
    """A life that draws from a DataLoader of its own in each step."""
    job = keepstep.protect(given, count=torch.zeros(1))
    if how == "finds its place":
        job.places_own_data()
    mine: Iterator[Any] = iter(DataLoader(Noise(), 2))
    for _ in job.steps(steps):
        if how == "evaluates":
            list(DataLoader(Noise(), 2))
        elif how != "draws nothing":
            next(mine)
        assert drained(job)
    job.close(ok=False)


def test_data_that_nobody_keeps_is_told_once_a_life(
    settings: Settings,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    draw(settings, 3, "draws")
    draw(settings, 5, "draws")
    first, second = caveats(settings)
    assert "a restart would begin the data anew" in first
    assert "step 2 was restored, but no place in the data" in second
    loud = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    told = [line.partition(": ")[2].partition(" [KS")[0] for line in loud]
    assert told == [first, second]


def test_an_edit_that_the_restored_state_undoes_is_told_once(
    settings: Settings,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    def live(lr: float, total: int) -> float:
        training = DataTraining()
        training.optimizer.param_groups[0]["lr"] = lr
        training.run(settings, total, leave=True)
        return float(training.optimizer.param_groups[0]["lr"])

    assert [live(0.01, 2), live(0.01, 4), live(0.0005, 6)] == [0.01, 0.01, 0.01]
    (told,) = caveats(settings)
    assert told.startswith("optimizer: lr is 0.01 as saved, the program was made with 0.0005")
    (loud,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert loud.partition(": ")[2] == f"{told} [KS5004]" and "\n" not in loud


@pytest.mark.parametrize("how", ["finds its place", "evaluates", "draws nothing"])
def test_no_false_alarm(settings: Settings, how: str) -> None:  # noqa: F811
    draw(settings, 3, how)
    draw(settings, 5, how)
    assert caveats(settings) == []


# -- loops that are not ours


def begin_and_end(given: Settings, training: Training, total: int, ok: bool) -> None:
    job = keepstep.protect(given, **training.stateful)
    while job.step + 1 < total:
        step = job.step_begin()
        assert step == job.step + 1
        training.step()
        assert job.step_end() and job.step == step
        assert drained(job)
    job.close(ok=ok)


def test_begin_and_end_are_as_good_as_steps(settings: Settings) -> None:  # noqa: F811
    begin_and_end(settings, Training(), 5, ok=False)
    again = Training()
    begin_and_end(settings, again, 9, ok=True)
    assert again.digest() == undisturbed(9)


def test_begin_and_end_in_another_order_are_refused(settings: Settings) -> None:  # noqa: F811
    job = keepstep.protect(settings, value=1)
    with pytest.raises(ConfigError, match="no step has begun"):
        job.step_end()
    job.step_begin()
    with pytest.raises(ConfigError, match="step 0 has begun and not ended"):
        job.step_begin()
    assert job.step_end()
    with pytest.raises(ConfigError, match="no step has begun"):
        job.step_end()
    job.close()


def test_a_body_that_was_left_is_no_step(settings: Settings) -> None:  # noqa: F811
    job = keepstep.protect(settings, value=1)
    for _ in job.steps(3):
        break
    assert [int(step) for step in job.steps(3)] == [0, 1, 2]
    job.close()


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's: it has no hooks of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self, *_: Any) -> None:
        self.optimizer.step()


def test_a_wrapped_optimizer_is_protected_with_its_fence(settings: Settings) -> None:  # noqa: F811
    training = Training()
    inner = training.optimizer
    parts = {**training.stateful, "optimizer": Wrapper(inner)}
    job = keepstep.protect(settings, **parts)
    assert len(inner._optimizer_step_pre_hooks) == 2, "the clock's first, the fence's last"
    job.close()
    assert not inner._optimizer_step_pre_hooks


def splits() -> list[int]:
    order: list[int] = torch.randperm(20).tolist()
    iter(DataLoader(Noise(), 2))  # draws a seed for its workers
    return order


def drawing(given: Settings, total: int, leave_at: int | None) -> tuple[list[int], list[float]]:
    """What a life draws between protect and its first step, and in its steps."""
    torch.manual_seed(3)
    job = keepstep.protect(given, value=1)
    split = splits()
    drawn = []
    for step in job.steps(total):
        drawn.append(torch.rand(()).item())
        if step == leave_at:
            break
        assert drained(job)
    job.close(ok=False)
    return split, drawn


def test_what_is_drawn_before_the_first_step_is_drawn_again_and_shifts_nothing(
    settings: Settings,  # noqa: F811
) -> None:
    torch.manual_seed(3)
    split, drawn = splits(), torch.rand(6).tolist()
    first = drawing(settings, 6, leave_at=3)
    assert first == (split, drawn[:4])
    assert drawing(settings, 6, None) == (split, drawn[3:])
