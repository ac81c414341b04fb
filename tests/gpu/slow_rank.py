"""Two ranks on one device, whose gradients are summed on the host: as `test_slow_ranks.py` starts
it. From `SLOW_FROM` on rank `SLOW_RANK` multiplies twice as often as the other one. Ends by itself
after `STEPS` steps, or as soon as the file `STOP` is there: all ranks see it in the same step."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

import keepstep

PRODUCTS = 24  # of 2048 x 2048: some milliseconds


def main() -> None:
    rank = int(os.environ["RANK"])
    steps, slow_from = int(os.environ["STEPS"]), int(os.environ["SLOW_FROM"])
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    keepstep.init_process_group()
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(512, 512, device=device) / 32)
    factor = torch.randn(2048, 2048, device=device) / 64
    optimizer = torch.optim.AdamW([weight], lr=1e-4)
    job = keepstep.protect(weight=weight, optimizer=optimizer)
    for step in job.steps(steps):
        with step:
            is_slow = rank == int(os.environ["SLOW_RANK"]) and int(step) >= slow_from
            product = factor
            for _ in range(PRODUCTS * (2 if is_slow else 1)):
                product = torch.tanh(product @ factor)
            optimizer.zero_grad()
            loss = (weight @ weight).square().mean() + product.mean().detach()
            loss.backward()
            gradient = weight.grad
            assert gradient is not None
            host = torch.cat([gradient.flatten().cpu(), torch.zeros(1)])
            host[-1] = float(Path(os.environ["STOP"]).exists())
            dist.all_reduce(host)
            gradient.copy_((host[:-1] / dist.get_world_size()).view_as(gradient))
            optimizer.step()
        if host[-1] > 0:
            break
    print("trained", rank, int(step), flush=True)


if __name__ == "__main__":
    main()
