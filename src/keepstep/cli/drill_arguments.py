"""Drill arguments: what `keepstep drill` can be asked for, and the drill that is meant.

Comes in: the values of one command line. Goes out: a `Drill`, or a ConfigError. Starts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from keepstep.cli.job_choice import arena_dir
from keepstep.cli.parameters import argument
from keepstep.config.option import check_seconds
from keepstep.config.settings import BY_NAME
from keepstep.config.settings import check as check_option
from keepstep.errors import ConfigError
from keepstep.model.topology import parse_policy
from keepstep.testing.conductor import LAUNCHERS, Drill
from keepstep.testing.faults import (
    KINDS,
    PHASES,
    PROTECT,
    Fault,
    check,
    draw,
    kinds_of,
    parse,
    with_triggers,
)
from keepstep.testing.network import parse_rate

TAIL_STEPS = 12  # what a campaign trains on after its last fault
ONE_NODE_STEP_MS = 20.0
SEVERAL_NODES_STEP_MS = 150.0  # a step leaves time for the copies
SOAK_STEP_MS = 50.0  # long enough that the undisturbed run of as many steps is soon done
FAULTS = "Faults"
JOB = "The job"
PLACE = "Nodes and memory"
REPORT = "The report"


@dataclass(frozen=True, slots=True)
class DrillArguments:
    """One command line of `keepstep drill`."""

    fault: list[str] | None = argument(
        None,
        "A fault, as KIND:rank=R,step=S,phase=P[,where=arena|store][,after=MS]; of nodes, as "
        "KIND:node=N[+N],step=S,phase=P[,after=MS]; a link, etcd or the store is away or rough for "
        "a time: ,for=MS; numbers of a rank become wrong: KIND:site=SITE,rank=R,step=S[,bit=B]"
        "[,factor=F][,times=N]; a rank becomes slow: KIND:rank=R,step=S[,factor=F]. May be given "
        "several times. "
        f"Kinds: {', '.join(KINDS)}. Phases: {', '.join((*PHASES, PROTECT))}.",
        panel=FAULTS,
        metavar="FAULT",
    )
    random: int = argument(
        0, "Draw this many faults at random moments of one job.", panel=FAULTS, metavar="N"
    )
    soak: float = argument(
        0,
        "Inject faults for this long, each after the job has recovered from the one before.",
        panel=FAULTS,
        metavar="SECONDS",
    )
    kinds: str = argument(
        "",
        "Kinds that --random and --soak draw from. Default: all that are possible here.",
        panel=FAULTS,
        metavar="KIND,...",
    )
    nproc: int = argument(2, "Ranks per node.", panel=JOB, metavar="N")
    steps: int = argument(
        60, "Steps of the job. --random takes as many as its faults need.", panel=JOB, metavar="N"
    )
    seed: int = argument(
        0, "Seed of the job, and of whatever is drawn at random.", panel=JOB, metavar="N"
    )
    launcher: str = argument(
        "run",
        "run (keepstep run), torchrun, or plain (one rank, started again when it dies).",
        panel=JOB,
        metavar="|".join(LAUNCHERS),
    )
    width: int = argument(
        64, "Width of the network: the state grows with its square.", panel=JOB, metavar="N"
    )
    step_ms: float | None = argument(
        None,
        f"Shortest duration of a step. Default: {ONE_NODE_STEP_MS:g}, in a soak "
        f"{SOAK_STEP_MS:g}, on several nodes {SEVERAL_NODES_STEP_MS:g}.",
        panel=JOB,
        metavar="MS",
    )
    persist_every: int = argument(
        10, "With a store: write a checkpoint every N steps.", panel=JOB, metavar="N"
    )
    on_difference: str = argument(
        "rollback",
        "What the job does when replicas differ: rollback, tell or stop.",
        panel=JOB,
        metavar="WAY",
    )
    digest_every_steps: int = argument(
        1, "The job compares its replicas every N steps. 0: never.", panel=JOB, metavar="N"
    )
    buddy_every_steps: int = argument(
        0,
        "One rank's gradient is computed by another one, too, every N steps. 0: never.",
        panel=JOB,
        metavar="N",
        least=0,
    )
    replay_update_bytes: int = argument(
        0,
        "In steps that are looked at, so many bytes of what one rank alone has are updated again. "
        "0: none.",
        panel=JOB,
        metavar="BYTES",
        least=0,
    )
    nodes: int = argument(
        1, "Nodes, all of them on this machine.", panel=PLACE, metavar="N", least=1
    )
    policy: str = argument(
        "auto",
        "What nodes keep of each other's snapshots: none, copies:M, parity:N, rs:K+M or auto.",
        panel=PLACE,
        metavar="POLICY",
    )
    rate: str | None = argument(
        None, "Speed of each node's link, such as 1gbit. Needs root.", panel=PLACE, metavar="RATE"
    )
    loopback: bool = argument(
        False, "Use loopback addresses even where network namespaces are possible.", panel=PLACE
    )
    rdzv_backend: str = argument(
        "c10d",
        "How several nodes meet: c10d, or etcd, which the drill starts.",
        panel=PLACE,
        metavar="c10d|etcd",
    )
    arena_dir: Path | None = argument(
        None,
        "Directory for the job's memory. Default: KEEPSTEP_ARENA_DIR, or /dev/shm.",
        panel=PLACE,
        metavar="DIR",
    )
    store: Path | None = argument(
        None,
        "Directory for checkpoints. Default: a fresh one, if a fault needs it. Where a fault is "
        "the store's own, the job reaches it through a server that the drill starts.",
        panel=PLACE,
        metavar="DIR",
    )
    work: Path | None = argument(
        None,
        "Keep journals, logs and the undisturbed run's hash in this directory.",
        panel=REPORT,
        metavar="DIR",
    )
    reference_hash: str | None = argument(
        None,
        "Hash of the undisturbed run, if you know it: it is not run again.",
        panel=REPORT,
        metavar="HASH",
    )
    json: bool = argument(False, "Print the report as one JSON object.", panel=REPORT)


def checked_faults(arguments: DrillArguments) -> tuple[Fault, ...]:
    """The faults that are asked for; none of a soak, which draws them as it goes. Raises
    ConfigError naming option, expected and found where anything on the command line cannot be."""
    check_seconds("--soak", arguments.soak)
    faults = tuple(_faults(arguments))
    steps = _steps(arguments, faults)
    check(faults, arguments.nproc, steps, arguments.nodes, arguments.rdzv_backend == "etcd")
    _check_launcher(arguments)
    for name in ("on_difference", "digest_every_steps"):
        check_option(BY_NAME[name], getattr(arguments, name))
    parse_policy(arguments.policy)
    if arguments.rate is not None:
        parse_rate(arguments.rate)
    return faults


def build_drill(arguments: DrillArguments, faults: tuple[Fault, ...], work: Path) -> Drill:
    """The drill that is asked for; everything it keeps is below `work`."""
    return Drill(
        work=work,
        nproc=arguments.nproc,
        steps=_steps(arguments, faults),
        seed=arguments.seed,
        width=arguments.width,
        step_ms=_step_ms(arguments),
        persist_every=arguments.persist_every,
        launcher=arguments.launcher,
        store=None if arguments.store is None else arguments.store.absolute(),
        arena_dir=arguments.arena_dir or arena_dir(),
        faults=faults,
        nodes=arguments.nodes,
        policy=arguments.policy,
        rate_bits_per_s=None if arguments.rate is None else parse_rate(arguments.rate),
        namespaces=False if arguments.loopback else None,
        etcd=arguments.rdzv_backend == "etcd",
        on_difference=arguments.on_difference,
        digest_every_steps=arguments.digest_every_steps,
        buddy_every_steps=arguments.buddy_every_steps,
        replay_update_bytes=arguments.replay_update_bytes,
    )


def _steps(arguments: DrillArguments, faults: Sequence[Fault]) -> int:
    if arguments.random:
        return max(fault.step for fault in faults) + TAIL_STEPS
    return arguments.steps


def _faults(arguments: DrillArguments) -> Sequence[Fault]:
    texts = arguments.fault or []
    if bool(texts) + bool(arguments.random) + bool(arguments.soak) > 1:
        raise ConfigError("--fault, --random and --soak: expected one of them, found several")
    if arguments.soak:
        return []
    if arguments.random:
        kinds = kinds_of(arguments.kinds, arguments.nodes)
        return draw(arguments.seed, arguments.random, arguments.nproc, kinds, nodes=arguments.nodes)
    if not texts:
        raise ConfigError(
            "expected --fault kind:rank=R,step=S,phase=P, --random N or --soak S, found none"
        )
    return with_triggers([parse(text) for text in texts])


def _step_ms(arguments: DrillArguments) -> float:
    if arguments.step_ms is not None:
        return arguments.step_ms
    if arguments.nodes > 1:
        return SEVERAL_NODES_STEP_MS
    return SOAK_STEP_MS if arguments.soak else ONE_NODE_STEP_MS


def _check_launcher(arguments: DrillArguments) -> None:
    launcher = arguments.launcher
    nodes = arguments.nodes
    backend = arguments.rdzv_backend
    if backend not in ("c10d", "etcd") or (backend == "etcd" and nodes == 1):
        raise ConfigError(
            f"--rdzv-backend: expected c10d, or etcd with more than one node, found {backend}"
        )
    if launcher not in LAUNCHERS:
        raise ConfigError(f"--launcher: expected one of {', '.join(LAUNCHERS)}, found {launcher!r}")
    if nodes > 1 and launcher != "run":
        raise ConfigError(f"--launcher: expected run with --nodes {nodes}, found {launcher}")
    expected = "1 with --launcher plain" if launcher == "plain" else "at least 1"
    if arguments.nproc < 1 or (launcher == "plain" and arguments.nproc != 1):
        raise ConfigError(f"--nproc: expected {expected}, found {arguments.nproc}")
