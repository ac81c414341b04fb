"""Accelerate, protected. The loop is the program's own, so ranks stay in their process when one is
lost.

    python examples/integrations/accelerate_loop.py
    keepstep run --nproc-per-node 2 examples/integrations/accelerate_loop.py
"""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import keepstep

torch.manual_seed(0)
if "RANK" in os.environ:
    keepstep.init_process_group()  # before the Accelerator, which takes the groups it finds
accelerator = Accelerator(cpu=True)

x = torch.randn(96, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

job = keepstep.protect(model=model, optimizer=optimizer, scheduler=scheduler)
data = job.loader(loader)
for step in job.steps(36):
    with step:
        inputs, targets = next(data)
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        job.report(loss=loss)
print(f"step {job.step}, epoch {data.epoch}")
