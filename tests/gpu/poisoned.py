"""A training on a device in which one value is not finite once: a test starts it. `POISON`: the
step and what is poisoned, `5 weight` or `5 moment`; nothing is. Prints the hash of what it has
trained, and what the journal says of numbers."""

from __future__ import annotations

import hashlib
import os

import torch

import keepstep

STEPS = 16


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 32)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    step_to_poison, what = (os.environ.get("POISON") or "-1 nothing").split()
    is_poisoned = False
    job = keepstep.protect(model=model, optimizer=optimizer)
    for step in job.steps(STEPS):
        with step:
            optimizer.zero_grad()
            x = torch.randn(64, 256, device="cuda")
            model(x).square().mean().backward()
            torch.cuda._sleep(50_000_000)  # cycles: a step takes longer than its capture
            optimizer.step()
            if int(step) == int(step_to_poison) and not is_poisoned:
                is_poisoned = True
                weight = model[2].weight
                victim = weight if what == "weight" else optimizer.state[weight]["exp_avg"]
                with torch.no_grad():
                    victim[3, 7] = float("nan")
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    print("hash", digest.hexdigest(), flush=True)


if __name__ == "__main__":
    main()
