"""keepstep under TorchX: `dist.ddp`, with keepstep's agents in place of torchrun's.

    torchx run --scheduler kubernetes examples/torchx/component.py:protected \
        --nodes 2 --nproc_per_node 8 --image keepstep-train:latest --store s3://bucket/run train.py
"""

from __future__ import annotations

import torchx.specs as specs

GIB = 1024  # TorchX counts memory in MiB


def protected(
    script: str,
    *script_args: str,
    image: str,
    nodes: int = 2,
    nproc_per_node: int = 8,
    cpu: int = 16,
    gpu: int = 0,
    memory_gib: int = 64,
    redundancy: str = "copies:2",
    store: str = "",
    job: str = "keepstep-train",
) -> specs.AppDef:
    """A training on several nodes, protected by keepstep.

    Args:
        script: the training script, as the image has it
        script_args: its arguments
        image: with torch and keepstep
        nodes: how many
        nproc_per_node: ranks on each
        cpu: cores of a node
        gpu: GPUs of a node
        memory_gib: memory of a node, with its snapshots
        redundancy: what other nodes keep
        store: where checkpoints go; empty: nowhere
        job: the training's name, by which it finds its own state
    """
    options = ["--store", store] if store else []
    if nodes > 1:
        # `macros.rank0_env` names the variable by which the scheduler tells where replica 0 is.
        host = f"$${{{specs.macros.rank0_env}:=localhost}}"
        options += ["--rdzv-endpoint", f"{host}:29400", "--redundancy", redundancy]
    words = [
        *("keepstep", "run", "--job", job),
        *("--nnodes", str(nodes), "--nproc-per-node", str(nproc_per_node)),
        *options,
        script,
        *script_args,
    ]
    return specs.AppDef(
        name=job,
        roles=[
            specs.Role(
                name="trainer",
                image=image,
                num_replicas=nodes,
                entrypoint="bash",
                args=["-c", " ".join(words)],
                max_retries=100,
                retry_policy=specs.RetryPolicy.REPLICA,
                resource=specs.Resource(cpu=cpu, gpu=gpu, memMB=memory_gib * GIB),
                port_map={"meeting": 29400},
            )
        ],
    )
