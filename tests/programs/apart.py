"""Two ranks that share nothing but their job: of 12 and 60 steps, without a process group. The
parameters of the longer one are not finite from its step 20 on. Writes how far each came, and
whether its parameters are finite, to the directory it is given."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

import keepstep

STEPS = (12, 60)
WRONG_FROM = 20
WORK = 20  # products, so that a step takes longer than words between processes


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    model, ballast = torch.nn.Linear(8, 8), torch.randn(256, 256)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    job = keepstep.protect(model=model, optimizer=optimizer)
    for _ in range(STEPS[rank]):
        step = job.step_begin()
        with step:
            for _ in range(WORK):
                torch.mm(ballast, ballast)
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            if rank == 1 and step == WRONG_FROM:
                model.weight.grad[0, 0] = float("nan")  # type: ignore[index]
            optimizer.step()
        job.step_end()
    kind = "finite" if all(bool(torch.isfinite(p).all()) for p in model.parameters()) else ""
    told = f"{job.step + 1} {kind or 'not finite'}"
    (Path(sys.argv[1]) / f"rank-{rank}").write_text(told)
    job.close()


if __name__ == "__main__":
    main()
