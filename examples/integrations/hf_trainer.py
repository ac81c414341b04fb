"""Hugging Face's Trainer, protected.

    python examples/integrations/hf_trainer.py
    keepstep run --nproc-per-node 2 examples/integrations/hf_trainer.py

Kill it and run the same command again: it goes on after its last update.
"""

from __future__ import annotations

import tempfile

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import TrainingArguments

from keepstep.integrations.hf import ProtectedTrainer


class Regression(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.sum().reshape(1)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.layers(x)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


torch.manual_seed(0)
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    use_cpu=True,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_train_epochs=3,
    learning_rate=0.01,
    logging_steps=5,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
trainer = ProtectedTrainer(model=Net(), args=arguments, train_dataset=Regression())
trainer.train()
print(f"update {trainer.state.global_step}, {len(trainer.state.log_history)} log entries")
