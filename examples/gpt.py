"""A small byte-level GPT, trained on the source of Python's own standard library.

One process:    python examples/gpt.py
Two, with DDP:  torchrun --nproc-per-node 2 examples/gpt.py
Survives:       keepstep run --nproc-per-node 2 examples/gpt.py

The four lines of keepstep are in `main`; everything else is an ordinary training script, with what
makes an exact resume hard left in on purpose: dropout, a learning-rate schedule, a shuffling
sampler, tied weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import keepstep

RANK = int(os.environ.get("RANK", 0))  # set by torchrun and keepstep run
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
TEXT_BYTES = 4 << 20


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(
        self, width: int, layers: int, heads: int, context: int, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for table in (self.bytes, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.head.weight = self.bytes.weight  # tied: what is read is what is predicted

    def forward(self, text: Tensor) -> Tensor:
        """The loss of predicting each byte of `text` (batch, context + 1) from those before it."""
        seen, next_ = text[:, :-1], text[:, 1:]
        x = self.drop(self.bytes(seen) + self.places.weight[: seen.shape[1]])
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), next_.flatten())


class PositionSampler:
    """Shuffles `size` items anew each epoch, deals them to the ranks in turn, and knows where it
    is.

    The order follows from seed and epoch alone, so two numbers are all there is to save.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self.load_state_dict({"epoch": 0, "position": 0})

    def take(self, count: int) -> Tensor:
        """This rank's next `count` items. What does not fill a batch on every rank is left to the
        next shuffle."""
        if self.position + count * WORLD_SIZE > self.size:
            self.load_state_dict({"epoch": self.epoch + 1, "position": 0})
        dealt = self.order[self.position : self.position + count * WORLD_SIZE]
        self.position += count * WORLD_SIZE
        return dealt[RANK::WORLD_SIZE]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]
        self.order = torch.randperm(
            self.size, generator=torch.Generator().manual_seed(self.seed + self.epoch)
        )


def read_text() -> Tensor:
    """The standard library's modules in the order of their names: the same bytes for everybody with
    this Python."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(module.read_bytes() for module in modules)[:TEXT_BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def train_one(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, batch: Tensor
) -> float:
    optimizer.zero_grad()
    loss = model(batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    return loss.item()


def digest(state: Any) -> str:
    """sha256 over every byte of a tree of tensors and numbers: equal digests, equal states."""
    if isinstance(state, dict):
        state = [(key, digest(state[key])) for key in sorted(state, key=str)]
    elif isinstance(state, (list, tuple)):
        state = [digest(item) for item in state]
    data = state.numpy(force=True).tobytes() if isinstance(state, Tensor) else repr(state).encode()
    return hashlib.sha256(data).hexdigest()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    if WORLD_SIZE > 1:
        keepstep.init_process_group()  # torch's, with groups that outlive the loss of a rank

    text = read_text()
    windows = text.unfold(0, args.context + 1, args.context)
    model: nn.Module = GPT(args.width, args.layers, args.heads, args.context)
    if WORLD_SIZE > 1:
        model = DistributedDataParallel(model)
    torch.manual_seed(args.seed + RANK)  # equal weights, but each rank its own dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    sampler = PositionSampler(len(windows), args.seed)

    losses: dict[int, float] = {}
    job = keepstep.protect(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
    for step in job.steps(args.steps):
        with step:  # given up when another rank is lost, and done again
            loss = losses[step] = train_one(
                model, optimizer, scheduler, windows[sampler.take(args.batch)].long()
            )
            job.report(loss=loss)
            if RANK == 0 and (step % 10 == 0 or step == args.steps - 1):
                print(f"step {step:4d}  loss {loss:.3f}", flush=True)

    stateful: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "sampler": sampler,
    }
    sha256 = digest({name: part.state_dict() for name, part in stateful.items()})
    if RANK == 0:
        print(f"sha256 of the final state: {sha256}")
        if args.out:
            args.out.write_text(json.dumps({"sha256": sha256, "losses": losses}))
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--context", type=int, default=64, help="bytes the model sees at once")
    parser.add_argument("--batch", type=int, default=12, help="windows of text per rank and step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out",
        type=Path,
        help="where rank 0 writes the final hash and the losses of the steps it ran, as JSON",
    )
    return parser.parse_args(given)


if __name__ == "__main__":
    main()
