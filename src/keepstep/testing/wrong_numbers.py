"""Wrong numbers: a small training in which they are planted, `python -m
keepstep.testing.wrong_numbers PLAN RESULTS`.

PLAN is a JSON file: a `Planting`. Goes out, in the directory RESULTS: one file a rank with the
digest of its state in the end. What the job finds out about the plants it tells in its journal.

A plant is put where it is by the program itself, at a step, on a rank; what sees it does not know
of it. Whether it is there again when the step is run again is what its site is: a bad row of the
data set is, a bit that flipped in memory is not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import keepstep
from keepstep.testing.job import digest
from keepstep.testing.number_faults import flip

FEATURES, BATCH = 12, 4
SEALED_WITHIN_S = 60.0
FLIPPED_BIT = 20
SITES = ("batch", "weight", "gradient", "moment", "reduced", "flip", "update", "rate")


@dataclass(frozen=True, slots=True)
class Plant:
    """site: `batch` (a row of the data set), `weight` and `moment` (of the optimizer; in memory),
    `gradient` (a rank's own, as its device computes it), `reduced` (what one rank was given as the
    sum), `flip` (a bit of a weight, in memory, in front of the update), `update` (a weight, as it
    is computed from right gradients), `rate` (of learning, as a body ends). layer: of the
    parameter. runs: a device computes wrong in so many runs of a step, from the first run of step
    `step` on; 0: for ever. value: what is planted; a gradient is multiplied by it."""

    site: str
    rank: int
    step: int
    layer: int = 0
    runs: int = 1
    value: float = math.nan


@dataclass(frozen=True, slots=True)
class Planting:
    """steps: of the training. drop: batches that an undisturbed run leaves out, by their number.
    width, depth: of the network. scaler: gradients are scaled, and now and then one that overflows
    is skipped. with_step: bodies can be taken back. eventful: the learning rate warms up and jumps,
    and the data get harder for a while. seals: no step begins before the one before it is sealed:
    else a step that is shorter than its capture is skipped now and then, on any rank."""

    steps: int
    plants: tuple[Plant, ...] = ()
    drop: tuple[int, ...] = ()
    width: int = 16
    depth: int = 4
    scaler: bool = False
    with_step: bool = True
    eventful: bool = False
    seals: bool = False

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def read(cls, path: Path) -> Planting:
        plain = json.loads(path.read_text())
        plants = tuple(Plant(**plant) for plant in plain.pop("plants"))
        return cls(plants=plants, drop=tuple(plain.pop("drop")), **plain)


class Rows(Dataset[torch.Tensor]):
    """Of numbers, drawn from one seed. `bad`: rows that are not finite."""

    def __init__(self, rows: int, bad: dict[int, float]) -> None:
        self._rows = torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(5))
        for row, value in bad.items():
            self._rows[row, 3] = value

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index]


class Planter:
    """On one rank. A device's runs are counted in the process, and never taken back."""

    def __init__(
        self, plants: tuple[Plant, ...], model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self._plants = plants
        self._left = {plant: plant.runs or math.inf for plant in plants}
        self._layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
        self._optimizer = optimizer
        self._step = -1
        for number, layer in enumerate(self._layers):
            layer.weight.register_hook(lambda gradient, n=number: self._computed(n, gradient))

    def begin(self, step: int) -> None:
        """A body begins."""
        self._step = step
        for plant in self._due("weight", at_once=True):
            with torch.no_grad():
                self._layers[plant.layer].weight[0, 1] = plant.value

    def before_update(self) -> None:
        """The gradients are summed."""
        for plant in self._due("moment", at_once=True):
            state = self._optimizer.state[self._layers[plant.layer].weight]
            state["exp_avg"][0, 1] = plant.value
        for plant in self._due("flip", at_once=True):
            flip(self._layers[plant.layer].weight.detach(), 1, FLIPPED_BIT)
        for plant in self._due("reduced", at_once=True):
            gradient = self._layers[plant.layer].weight.grad
            assert gradient is not None
            gradient[0, 1] = plant.value

    def after_update(self) -> None:
        """The body is nearly over."""
        for plant in self._due("update", at_once=True):
            with torch.no_grad():
                self._layers[plant.layer].weight[0, 1] = plant.value
        for plant in self._due("rate", at_once=True):
            for group in self._optimizer.param_groups:
                group["lr"] = plant.value

    def _computed(self, layer: int, gradient: torch.Tensor) -> torch.Tensor:
        """By this rank's device, before anything of its peers is added."""
        for plant in self._due("gradient", at_once=False):
            if plant.layer == layer:
                gradient = gradient * plant.value
        return gradient

    def end(self) -> None:
        """The body is over, whatever becomes of the step."""
        for plant in self._due("gradient", at_once=False):
            self._left[plant] -= 1

    def _due(self, site: str, at_once: bool) -> list[Plant]:
        found = []
        for plant in self._plants:
            if plant.site == site and self._left[plant] > 0 and self._step >= plant.step:
                found.append(plant)
                if at_once:
                    self._left[plant] -= 1
        return found


def network(width: int, depth: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(FEATURES, width), nn.Tanh()]
    for _ in range(depth - 2):
        layers += [nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(width, FEATURES))


def rate(planting: Planting, step: int) -> float:
    """What the learning rate is multiplied by: a warm-up, then up and down by 3 to 10."""
    if not planting.eventful:
        return 1.0
    jumps = (1.0, 0.1, 1.0, 0.3, 3.0, 0.3, 1.0)
    phase = min(len(jumps) - 1, step * len(jumps) // planting.steps)
    return min(1.0, (step + 1) / 200) * jumps[phase]


def hardness(planting: Planting, step: int) -> float:
    """By how much the data vary."""
    is_hard = planting.eventful and 0.4 <= step / planting.steps < 0.55
    return 2.0 if is_hard else 1.0


def bad_rows(plants: tuple[Plant, ...], world: int) -> dict[int, float]:
    """By row: a data set that is not shuffled gives rank r of n the rows r, r + n, r + 2 n ..."""
    return {
        (plant.step * BATCH + 1) * world + plant.rank: plant.value
        for plant in plants
        if plant.site == "batch"
    }


def train(planting: Planting) -> str:
    """Run to the end and return this rank's digest."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(7)
    model = network(planting.width, planting.depth)
    if world > 1:
        keepstep.init_process_group()
        model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=world > 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # It grows until gradients overflow, and skips those.
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**100, growth_interval=10, enabled=planting.scaler
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(planting, step))
    torch.manual_seed(7 + rank)
    job = keepstep.protect(
        model=model, optimizer=optimizer, schedule=schedule, scaler=scaler, trail=""
    )
    batches = planting.steps + len(planting.drop) + len(planting.plants) + 2
    rows = Rows(batches * BATCH * world, bad_rows(planting.plants, world))
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(rows, world, rank, shuffle=False)
    data = job.loader(DataLoader(rows, batch_size=BATCH, sampler=sampler))
    mine = tuple(p for p in planting.plants if p.rank == rank)
    planter = Planter(mine, model, optimizer)
    for step in job.steps(planting.steps):
        if planting.seals:
            job._drain(job._rank.drain, within_s=SEALED_WITHIN_S)

        def body(step: int = int(step)) -> None:
            planter.begin(step)
            while data.batch in planting.drop:
                next(data)
            batch = next(data) * hardness(planting, step)
            optimizer.zero_grad()
            loss = (model(batch + 0.01 * torch.randn_like(batch)) - batch).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            planter.before_update()
            planter.end()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            planter.after_update()
            job.state["trail"] = digest([job.state["trail"], float(loss), batch])
            job.report(loss=loss)

        if planting.with_step:
            with step:
                body()
        else:
            body()
    states: list[Any] = [model.state_dict(), optimizer.state_dict(), schedule.state_dict()]
    return digest([*states, scaler.state_dict(), job.state["trail"], torch.get_rng_state()])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m keepstep.testing.wrong_numbers")
    parser.add_argument("plan", type=Path)
    parser.add_argument("results", type=Path)
    args = parser.parse_args()
    found = train(Planting.read(args.plan))
    (args.results / f"rank-{os.environ.get('RANK', '0')}").write_text(found)


if __name__ == "__main__":
    main()
