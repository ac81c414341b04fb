"""A training as it stands in nobody's checkout: run by `.ci/wheel` where the wheel alone is
installed. Prints the step it begins after and the state's sha256 at its end. From step KILL_AT on
it has the last step persisted, prints which step that is, and kills itself; where that step was
skipped, as on a busy machine, it tries again in the next one.

    python training.py JOB PLACE [KILL_AT]
"""

from __future__ import annotations

import hashlib
import io
import os
import signal
import sys

import torch

import keepstep

STEPS = 100

job_name, place = sys.argv[1:3]
kill_at = int(sys.argv[3]) if len(sys.argv) > 3 else STEPS
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters())
config = keepstep.Config(
    job=job_name,
    arena_dir=f"{place}/arena",
    state_dir=f"{place}/state",
    store=f"{place}/store-{job_name}",
    persist_every_steps=2,
)
job = keepstep.protect(config, model=model, optimizer=optimizer)
print("begins after", job.step)
for step in job.steps(STEPS):
    if step >= kill_at:
        try:
            print("stored", job.persist(wait=True).result().step, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        except keepstep.StoreError as error:
            print(error)
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
state = io.BytesIO()
torch.save([list(model.state_dict().values()), torch.get_rng_state()], state)
print("sha256", hashlib.sha256(state.getvalue()).hexdigest())
