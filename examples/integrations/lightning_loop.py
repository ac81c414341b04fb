"""Lightning, protected.

    python examples/integrations/lightning_loop.py
    keepstep run --nproc-per-node 2 examples/integrations/lightning_loop.py

Kill it and run the same command again: it goes on after its last update.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from keepstep.integrations.lightning import KeepstepCallback


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.layers(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.layers(x), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


torch.manual_seed(0)
x = torch.randn(96, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
ranks = int(os.environ.get("WORLD_SIZE", 1))
model = Net()
trainer = Trainer(
    accelerator="cpu",
    devices=ranks,
    strategy="ddp" if ranks > 1 else "auto",
    max_epochs=3,
    accumulate_grad_batches=2,
    callbacks=[KeepstepCallback()],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(data, 4, shuffle=True), DataLoader(data, 48))
print(f"update {trainer.global_step}, epoch {trainer.current_epoch}")
