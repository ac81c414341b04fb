"""Two ranks, one of which is killed; the other stays in its process.

    KEEPSTEP_UNTESTED_NCCL_GROUPS=1 keepstep run --nproc-per-node 2 benchmarks/gpu/two_ranks.py
    MODE=gloo keepstep run --nproc-per-node 2 benchmarks/gpu/two_ranks.py
    WRAP=fsdp KEEPSTEP_UNTESTED_NCCL_GROUPS=1 keepstep run --nproc-per-node 2 ...

On one device NCCL refuses two ranks (nccl#418). It tells devices apart by host and bus, so each
rank calls its host by another name and they meet over sockets: a try, and no more; with two devices
each takes its own. MODE=gloo copies gradients to the host and sums them there: that shows rollback,
slots and staying, not NCCL. WRAP=fsdp: FSDP2 in place of DDP, each rank sums its own part. Compare
the sums with a run under CALM=1.
"""

from __future__ import annotations

import os
import signal
import time

RANK = int(os.environ["RANK"])
MODE = os.environ.get("MODE", "nccl")
WRAP = os.environ.get("WRAP", "ddp")
DIES_AT, STEPS = 20, 60

if MODE == "nccl":
    os.environ["NCCL_HOSTID"] = f"h{RANK}"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_IB_DISABLE", "1")

import torch  # noqa: E402  NCCL reads what is set above
import torch.distributed as dist  # noqa: E402

import keepstep  # noqa: E402


def summed_on_host(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        host = parameter.grad.cpu()
        dist.all_reduce(host)
        parameter.grad.copy_(host / dist.get_world_size())


def wrapped(model: torch.nn.Module) -> torch.nn.Module:
    if MODE != "nccl":
        return model
    if WRAP == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def own_part(parameter: torch.Tensor) -> torch.Tensor:
    found = parameter.detach()
    return found.to_local() if hasattr(found, "to_local") else found


def main() -> None:
    device = torch.device("cuda", RANK % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if MODE == "nccl":
        keepstep.init_process_group(device_id=device)
    else:
        keepstep.init_process_group()
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(8)])
    model = wrapped(model.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    job = keepstep.protect(model=model, optimizer=optimizer)
    dies = RANK == 1 and os.environ.get("KEEPSTEP_ATTEMPT") == "0" and "CALM" not in os.environ
    for step in job.steps(STEPS):
        with step:
            generator = torch.Generator(device).manual_seed(1000 * step + RANK)
            x = torch.randn(64, 2048, device=device, generator=generator)
            optimizer.zero_grad()
            y = model(x).square().mean()
            if dies and step == DIES_AT:
                print("rank 1 dies", time.time(), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            y.backward()
            if MODE == "gloo":
                summed_on_host(model)
            optimizer.step()
        torch.cuda.synchronize()
        if abs(int(step) - DIES_AT) <= 3:
            print(RANK, os.getpid(), int(step), f"{time.time():.3f}", flush=True)
    all_of_it = torch.cat([own_part(p).flatten() for p in model.parameters()]).double()
    print("sum", RANK, float(all_of_it.sum()), float(all_of_it.square().sum()), flush=True)


if __name__ == "__main__":
    main()
