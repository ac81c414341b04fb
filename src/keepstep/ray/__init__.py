"""keepstep.ray: a protected training on a Ray cluster. Ray replaces a lost node, keepstep resumes.

    import ray, keepstep.ray

    ray.init()
    code = keepstep.ray.run(
        ["train.py", "--steps", "1000"], nodes=4, nproc_per_node=8, gpus_per_rank=1,
        options=["--redundancy", "copies:2"],
    )

Decides which bundles Ray is asked for and when a training is over; moves exit codes. Comes in: a
command line. Goes out: one agent (`keepstep run`) on each of several Ray nodes, and their exit
code. Ray sees where they run and starts the one of a lost node on another; everything else is
between the agents, as without Ray.

The agents meet in a store that the driver keeps, so no node of the training is special. The driver
is: when it ends, its actors end, and with them the training; its memory stays for `grace_s`.

Invariant: at most one agent of a training runs on a Ray node.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keepstep.edge.os.needs import check_torch, has_package
from keepstep.errors import ConfigError, MeetingError
from keepstep.ray.node_agent import NodeAgent

__all__ = ["run"]

SECRET = "KEEPSTEP_SECRET"
EVERY_TIME = -1  # Ray's word for no limit


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What every node gets."""

    bundle: dict[str, float]
    command: tuple[str, ...]
    environ: dict[str, str]


def run(
    program: Sequence[str],
    *,
    nodes: int,
    nproc_per_node: int,
    cpus_per_rank: float = 1.0,
    gpus_per_rank: float = 0.0,
    resources: Mapping[str, float] | None = None,
    options: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    placed_within_s: float = 600.0,
) -> int:
    """Train on `nodes` nodes of the Ray cluster that this driver is connected to, and wait.

    A node that is lost is replaced by another one of the cluster, as soon as one has room; the
    other ranks' memory, or a store, gives its ranks their state back. Output goes where Ray puts
    that of actors.

    Args:
        program: the script and its arguments, or `-m`, a module and its arguments. Paths are those
            of the nodes; see Ray's `working_dir`.
        nodes: how many, each a Ray node of its own.
        nproc_per_node: ranks on each.
        cpus_per_rank: cores that Ray sets aside for each rank.
        gpus_per_rank: likewise GPUs; which ones, Ray says by CUDA_VISIBLE_DEVICES.
        resources: more that a node has to have, by Ray's names.
        options: of `keepstep run`, such as `["--redundancy", "copies:2", "--store", URL]`.
        environ: variables for the agents and ranks. `{node_id}` in a value is the
            first 12 digits of the Ray node's id.
        placed_within_s: how long the cluster may take to have room for all nodes.

    Returns:
        The exit code of the job, as `keepstep run` gives it: 0 when all ranks have ended well.

    Raises:
        ConfigError: Ray or torch is missing, the driver is not connected, or a number is below 1.
        MeetingError: the cluster had no room for all nodes within `placed_within_s`.
    """
    _check(program, nodes, nproc_per_node)
    import ray

    asked: Any = ray.util  # its functions have no types
    host = asked.get_node_ip_address()
    store = _meeting_point(host)
    ranks = float(nproc_per_node)
    bundle = {"CPU": cpus_per_rank * ranks, "GPU": gpus_per_rank * ranks, **(resources or {})}
    wanted = _Wanted(
        bundle={name: amount for name, amount in bundle.items() if amount > 0} or {"CPU": 1.0},
        command=(
            *("--nnodes", str(nodes), "--nproc-per-node", str(nproc_per_node)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{store.port}"),
            *options,
            *program,
        ),
        # Of this training alone, so that nobody else on the network can join it.
        environ={SECRET: secrets.token_hex(16), **(environ or {})},
    )
    return _train(wanted, nodes, placed_within_s)


def _check(program: Sequence[str], nodes: int, nproc_per_node: int) -> None:
    if not has_package("ray"):
        raise ConfigError("keepstep.ray: expected Ray, found none: pip install 'keepstep[ray]'")
    check_torch("keepstep.ray")
    import ray

    if not ray.is_initialized():
        raise ConfigError("keepstep.ray: expected ray.init() before run(), found no connection")
    if isinstance(program, str) or not program:
        raise ConfigError(
            "keepstep.ray: expected program as a list, such as ['train.py', '--steps', '10'], "
            f"found {program!r}"
        )
    for name, number in (("nodes", nodes), ("nproc_per_node", nproc_per_node)):
        if number < 1:
            raise ConfigError(f"keepstep.ray: expected {name} of 1 or more, found {number}")


def _meeting_point(host: str) -> Any:
    """A store of this process, for as long as the driver keeps it."""
    from keepstep.edge.torch.tcp_store import host_store

    return host_store((host, 0))


def _train(wanted: _Wanted, nodes: int, placed_within_s: float) -> int:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([wanted.bundle] * nodes, strategy="STRICT_SPREAD")
    actors: list[Any] = []
    cluster: Any = ray
    try:
        if not group.wait(placed_within_s):
            raise MeetingError(
                f"keepstep.ray: expected {nodes} nodes with {wanted.bundle} each within "
                f"{placed_within_s:g} s, found {cluster.cluster_resources()} in all"
            )
        actors = [_actor(wanted, group, index) for index in range(nodes)]
        codes: list[int] = ray.get([actor.serve.remote() for actor in actors])
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)
    return max(codes)


def _actor(wanted: _Wanted, group: Any, index: int) -> Any:
    """The one agent of a bundle: Ray starts it again, where the bundle is then."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    more = {n: a for n, a in wanted.bundle.items() if n not in ("CPU", "GPU")}
    placed = ray.remote(NodeAgent).options(
        num_cpus=wanted.bundle.get("CPU", 0.0),
        num_gpus=wanted.bundle.get("GPU", 0.0),
        resources=more,
        max_restarts=EVERY_TIME,
        max_task_retries=EVERY_TIME,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=index
        ),
    )
    return placed.remote(wanted.command, wanted.environ)
