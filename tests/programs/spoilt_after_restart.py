"""A loop of one process that is killed once, and one gradient of which is not finite in the first
step after the restart. `LIFE`: 1 is killed in step 19, 2 meets the NaN, 0 neither. Prints the hash
of what it has trained."""

import hashlib
import os
import signal

import torch

import keepstep

STEPS, DIES_IN = 40, 19

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
job = keepstep.protect(model=model, optimizer=optimizer)
life = os.environ["LIFE"]
first = job.step + 1
is_spoilt = False
for step in job.steps(STEPS):
    with step:
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        if life == "2" and int(step) == first and not is_spoilt:
            is_spoilt = True
            model[0].weight.grad[0, 0] = float("nan")
        optimizer.step()
    if life == "1" and int(step) == DIES_IN:
        os.kill(os.getpid(), signal.SIGKILL)
digest = hashlib.sha256()
for tensor in model.state_dict().values():
    digest.update(tensor.numpy().tobytes())
print(digest.hexdigest())
