"""A training on a device under `keepstep.protect`, as tests start it: prints the hash of what it
has trained. `DIES_AT` names the step in which it kills itself."""

from __future__ import annotations

import hashlib
import os
import signal

import torch

import keepstep

STEPS = 12


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 2048), torch.nn.BatchNorm1d(2048), torch.nn.Dropout(), torch.nn.ReLU(),
        torch.nn.Linear(2048, 64),
    ).cuda()  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), fused=os.environ.get("FUSED") == "1")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    job = keepstep.protect(model=model, optimizer=optimizer, schedule=schedule)
    print("begins at", job.step, flush=True)
    for step in job.steps(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(64, 512, device="cuda")).square().mean()
        loss.backward()
        torch.cuda._sleep(100_000_000)  # cycles: a step takes longer than its capture
        optimizer.step()
        schedule.step()
        if int(step) == int(os.environ.get("DIES_AT", "-1")):
            torch.cuda.synchronize()
            os.kill(os.getpid(), signal.SIGKILL)
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    for state in optimizer.state.values():
        for value in state.values():
            digest.update(value.cpu().numpy().tobytes())
    print("hash", digest.hexdigest(), flush=True)


if __name__ == "__main__":
    main()
