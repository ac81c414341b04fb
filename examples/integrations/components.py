"""A loop over components with state, shaped as torchtitan's: model parts, a container of
optimizers, one of schedulers, and a trainer that counts steps and tokens.

    python examples/integrations/components.py
    keepstep run --nproc-per-node 2 examples/integrations/components.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import keepstep


class Optimizers:
    """Steps all of them, as torchtitan's `OptimizersContainer`."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.optimizers = [torch.optim.AdamW(part.parameters(), 0.01) for part in parts]

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.optimizers)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class Schedulers:
    """As torchtitan's `LRSchedulersContainer`: all have the state of the first."""

    def __init__(self, optimizers: Optimizers) -> None:
        self.schedulers: list[LRScheduler] = [StepLR(optimizer, 7) for optimizer in optimizers]

    def step(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return self.schedulers[0].state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for scheduler in self.schedulers:
            scheduler.load_state_dict(state)


class Trainer:
    def __init__(self) -> None:
        self.ntokens_seen = 0
        self.model_parts: list[nn.Module] = [
            nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2)),
            nn.Linear(16, 1),
        ]
        is_distributed = "RANK" in os.environ
        if is_distributed:
            self.model_parts = [DistributedDataParallel(part) for part in self.model_parts]
        self.optimizers = Optimizers(self.model_parts)
        self.lr_schedulers = Schedulers(self.optimizers)
        x = torch.randn(96, 8)
        data = TensorDataset(x, x.sum(1, keepdim=True))
        sampler = DistributedSampler(data) if is_distributed else None
        self.dataloader = DataLoader(data, 4, shuffle=sampler is None, sampler=sampler)

    def train_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        self.ntokens_seen += x.numel()
        self.optimizers.zero_grad()
        for part in self.model_parts:
            x = part(x)
        loss = nn.functional.mse_loss(x, y)
        loss.backward()
        self.optimizers.step()
        self.lr_schedulers.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ntokens_seen = state["ntokens_seen"]


torch.manual_seed(0)
if "RANK" in os.environ:
    keepstep.init_process_group()
trainer = Trainer()
job = keepstep.protect(
    **{f"model_{i}": part for i, part in enumerate(trainer.model_parts)},
    **{f"optimizer_{i}": optimizer for i, optimizer in enumerate(trainer.optimizers)},
    lr_schedulers=trainer.lr_schedulers,
    train_state=trainer,
)
data = job.loader(trainer.dataloader)
while job.step + 1 < 40:
    with job.step_begin():
        loss = trainer.train_step(next(data))
        job.report(loss=loss)
    job.step_end()
job.close()
print(f"step {job.step}, {trainer.ntokens_seen} tokens")
