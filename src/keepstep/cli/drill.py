"""`keepstep drill`: does it hold? A small deterministic job, faults on purpose, and the same final
state as without them.

Comes in: a command line. Goes out: a report (rich or JSON) and an exit code: 0 proved, 1 not, 2 a
wrong command line, 3 a fault could not be injected here. The work is done in testing/.
"""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from keepstep.cli import soaking
from keepstep.errors import ConfigError
from keepstep.model.topology import parse_policy
from keepstep.model.units import S_NS, human_bytes
from keepstep.testing.conductor import LAUNCHERS, Drill, conduct, reference
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
from keepstep.testing.verdict import judge
from keepstep.testing.witness import Facts

PROVED, FAILED, WRONG, CANNOT_INJECT = 0, 1, 2, 3
TAIL_STEPS = 12  # what a campaign trains on after its last fault
TOLD = {
    "resumed",
    "rank-exited",
    "rank-left",
    "ranks-restarted",
    "keeper-started",
    "keeper-restarted",
    "damaged",
    "checkpoint-damaged",
}
TOLD |= {
    "restore-failed",
    "next-step",
    "persist-failed",
    "restore-offered",
    "job-over",
    "keeper-ended",
    "keeper-lost",
    "torn",
}
LONG_TIMELINE = 60
TOLD |= {"fetched", "peer-dead", "node-replaced"}
SOAK_STEP_MS = 50.0  # long enough that the undisturbed run of as many steps is soon done
STEP_MS = {False: 20.0, True: 150.0}  # on several nodes a step leaves time for the copies
SPEC = (
    "kind:rank=R,step=S,phase=P[,where=arena|store][,after=MS], for nodes "
    "kind:node=N[+N],step=S,phase=P[,after=MS][,for=MS]; "
)
SPEC += f"may be repeated. Kinds: {', '.join(KINDS)}. Phases: {', '.join((*PHASES, PROTECT))}."


def drill(
    fault: Annotated[list[str] | None, typer.Option(help=SPEC)] = None,
    nproc: Annotated[int, typer.Option(help="Ranks a node.")] = 2,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes, in a lab on this machine.")] = 1,
    policy: Annotated[
        str,
        typer.Option(
            help="What nodes keep of each other: none, copies:M, parity:N, rs:K+M or auto."
        ),
    ] = "auto",
    rate: Annotated[
        str | None, typer.Option(help="How fast a node's link is, such as 1gbit; needs root.")
    ] = None,
    loopback: Annotated[
        bool,
        typer.Option(
            "--loopback", help="Loopback addresses, also where network namespaces can be made."
        ),
    ] = False,
    steps: Annotated[
        int, typer.Option(help="Steps of the job; a campaign takes as many as its faults need.")
    ] = 60,
    seed: Annotated[int, typer.Option(help="Of the job, of flipped bits and of --random.")] = 0,
    random: Annotated[
        int, typer.Option(help="A campaign: so many faults at random moments in one job.")
    ] = 0,
    soak: Annotated[
        float,
        typer.Option(
            help="Faults for so many seconds, each after the job has recovered from the one before."
        ),
    ] = 0,
    kinds: Annotated[
        str,
        typer.Option(
            help="What --random and --soak draw from; nothing: all that can be done here."
        ),
    ] = "",
    rdzv_backend: Annotated[
        str, typer.Option(help="How several nodes meet: c10d, or etcd (one is started).")
    ] = "c10d",
    launcher: Annotated[
        str,
        typer.Option(
            help="run (keepstep run), torchrun, or plain (one rank, started again when it dies)."
        ),
    ] = "run",
    store: Annotated[
        Path | None,
        typer.Option(help="Directory for checkpoints; one of its own when a fault needs it."),
    ] = None,
    arena_dir: Annotated[Path, typer.Option(help="Where the job's memory lives.")] = Path(
        "/dev/shm"
    ),
    width: Annotated[
        int, typer.Option(help="Of the network: the state grows with its square.")
    ] = 64,
    step_ms: Annotated[
        float | None,
        typer.Option(
            help="How long a step takes at least; 20, in a soak 50, on several nodes 150."
        ),
    ] = None,
    persist_every: Annotated[
        int, typer.Option(help="With a store: a checkpoint every so many steps.")
    ] = 10,
    reference_hash: Annotated[
        str | None, typer.Option(help="The undisturbed run's hash, if it is known.")
    ] = None,
    predict: Annotated[
        int,
        typer.Option(
            help="Have the simulation do it again with so many seeds; seen and predicted."
        ),
    ] = 0,
    work: Annotated[
        Path | None, typer.Option(help="Keep journals, logs and the undisturbed run's hash here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The report as one JSON object.")] = False,
) -> None:
    """Inject faults into a small job and prove that it ends in the same state as without them."""
    if predict:
        from keepstep.cli import predicting

    console = Console(stderr=True)
    try:
        faults: Sequence[Fault] = _faults(fault or [], random, seed, nproc, kinds, nodes, soak)
        if random:
            steps = max(f.step for f in faults) + TAIL_STEPS
        check(faults, nproc, steps, nodes, rdzv_backend == "etcd")
        _check_launcher(launcher, nproc, nodes, rdzv_backend, predict)
        parse_policy(policy)
        bits = None if rate is None else parse_rate(rate)
    except ConfigError as error:
        raise _wrong(console, error) from error
    room = Path(tempfile.mkdtemp(prefix="keepstep-drill-")) if work is None else work.absolute()
    room.mkdir(parents=True, exist_ok=True)
    # as Ctrl-C: the job and its memory go before the drill does
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    own_store = None if store is None else store.absolute()
    order = Drill(
        *(
            room,
            nproc,
            steps,
            seed,
            width,
            _step_ms(nodes, soak) if step_ms is None else step_ms,
            persist_every,
            launcher,
            own_store,
        ),
        *(
            arena_dir,
            tuple(faults),
            nodes,
            policy,
            bits,
            False if loopback else None,
            rdzv_backend == "etcd",
        ),
        measures=predict > 0,
    )
    try:
        faults, facts, report = (
            _run_soak(order, soak, kinds, not as_json)
            if soak
            else _run(order, reference_hash, not as_json)
        )
        prediction = (
            predicting.predict(order, faults, facts, predict, not as_json)
            if predict and facts.exit_code == 0
            else None
        )
    except ConfigError as error:
        raise _wrong(console, error) from error
    if as_json:
        print(json.dumps(report | (predicting.as_data(prediction) if predict else {})))
    else:
        _show(Console(), facts, report)
        if predict:
            predicting.show(Console(), prediction)
    code = exit_code(report)
    if work is None and code == PROVED:
        shutil.rmtree(room, ignore_errors=True)
    elif code != PROVED:
        console.print(
            f"Journal and output of the job: {room / facts.job}", highlight=False, soft_wrap=True
        )
    raise typer.Exit(code)


def _wrong(console: Console, error: ConfigError) -> typer.Exit:
    console.print(f"keepstep drill: {escape(str(error))}", highlight=False, soft_wrap=True)
    return typer.Exit(WRONG)


def exit_code(report: dict[str, Any]) -> int:
    """What the report means to a script."""
    if report["proved"]:
        return PROVED
    asked_in_vain = any(not f["injected"] for f in report["faults"])
    return (
        CANNOT_INJECT
        if asked_in_vain and (report["recovered"] or report["exit_code"] is None)
        else FAILED
    )


def _step_ms(nodes: int, soak: float) -> float:
    return STEP_MS[nodes > 1] if nodes > 1 or not soak else SOAK_STEP_MS


def _faults(
    texts: Sequence[str], count: int, seed: int, nproc: int, kinds: str, nodes: int, soak: float
) -> list[Fault]:
    if bool(texts) + bool(count) + bool(soak) > 1:
        raise ConfigError("--fault, --random and --soak: expected one of them, found several")
    if soak:
        return []
    if count:
        return draw(seed, count, nproc, kinds_of(kinds, nodes), nodes=nodes)
    if not texts:
        raise ConfigError(
            "expected --fault kind:rank=R,step=S,phase=P, --random N or --soak S, found none"
        )
    return with_triggers([parse(text) for text in texts])


def _check_launcher(launcher: str, nproc: int, nodes: int, backend: str, predict: int) -> None:
    if backend not in ("c10d", "etcd") or (backend == "etcd" and nodes == 1):
        raise ConfigError(
            f"--rdzv-backend: expected c10d, or etcd with more than one node, found {backend}"
        )
    if launcher not in LAUNCHERS:
        raise ConfigError(f"--launcher: expected one of {', '.join(LAUNCHERS)}, found {launcher!r}")
    if nodes > 1 and launcher != "run":
        raise ConfigError(f"--launcher: expected run with --nodes {nodes}, found {launcher}")
    if predict and launcher != "run":
        raise ConfigError(
            f"--predict: expected --launcher run, whose agents are simulated, found {launcher}"
        )
    if nproc < 1 or (launcher == "plain" and nproc != 1):
        raise ConfigError(
            "--nproc: expected "
            f"{'1 with --launcher plain' if launcher == 'plain' else 'at least 1'}, found {nproc}"
        )


def _run(
    order: Drill, known: str | None, shows_progress: bool
) -> tuple[Sequence[Fault], Facts, dict[str, Any]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not shows_progress
    ) as bar:
        undisturbed = bar.add_task("undisturbed run, steps", total=order.steps)
        expected = known or reference(
            order, lambda step, _: bar.update(undisturbed, completed=step + 1)
        )
        bar.update(undisturbed, completed=order.steps)
        disturbed = bar.add_task("disturbed run, steps", total=order.steps)
        done = bar.add_task("faults", total=len(order.faults))

        def tell(step: int, faults: int) -> None:
            bar.update(disturbed, completed=step + 1)
            bar.update(done, completed=faults)

        facts = conduct(order, tell)
    return order.faults, facts, _with_order(judge(order.faults, facts, expected), order)


def _run_soak(
    order: Drill, seconds: float, kinds: str, shows_progress: bool
) -> tuple[Sequence[Fault], Facts, dict[str, Any]]:
    soak = soaking.make(order, seconds, kinds)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not shows_progress
    ) as bar:
        task = bar.add_task("soak", total=None)
        facts, report = soaking.run(
            order,
            soak,
            lambda step, faults: bar.update(
                task, description=f"soak: step {step}, {faults} faults"
            ),
        )
    return soak.faults, facts, _with_order(report, order)


def _with_order(report: dict[str, Any], order: Drill) -> dict[str, Any]:
    took = [t for t in report["recovery_s"] if t is not None]
    return {
        "max_lost_steps": max(report["lost_steps"], default=0),
        "recovery_s_median": round(median(took), 3) if took else None,
        **{
            "launcher": order.launcher,
            "nproc": order.nproc,
            "steps": order.steps,
            "seed": order.seed,
        },
        **{"nodes": order.nodes, "policy": order.policy},
        **report,
    }


def _show(console: Console, facts: Facts, report: dict[str, Any]) -> None:
    if "soak" in report:
        soaking.show(console, report)
    else:
        _show_faults(console, report)
        _show_timeline(console, facts)
    for name in ("recovered", "bit_equal", "within_one_step"):
        console.print(
            f"{name.replace('_', ' ')}: {'[green]yes[/]' if report[name] else '[red]no[/]'}",
            highlight=False,
            soft_wrap=True,
        )
    console.print(
        f"hash {report['hash']}\nundisturbed {report['expected_hash']}",
        highlight=False,
        soft_wrap=True,
    )
    _show_recoveries(console, report)
    if report["left_over"]:
        console.print(
            f"[red]left behind:[/] {', '.join(report['left_over'])}",
            highlight=False,
            soft_wrap=True,
        )


def _show_faults(console: Console, report: dict[str, Any]) -> None:
    table = Table("fault", "whom", "step", "phase", "seen", "evidence", title="Faults")
    for f in report["faults"]:
        whom = f"node {', '.join(map(str, f['nodes']))}" if f["nodes"] else f"rank {f['rank']}"
        seen = (
            "[green]yes[/]"
            if f["seen"]
            else "[red]no[/]"
            if f["injected"]
            else "[red]not injected[/]"
        )
        table.add_row(f["kind"], whom, str(f["step"]), f["phase"], seen, escape(f["evidence"]))
    console.print(table)


def _show_recoveries(console: Console, report: dict[str, Any]) -> None:
    median_s = report["recovery_s_median"]
    console.print(
        f"{report['restarts']} restarts, {report['max_lost_steps']} steps lost at most in one, "
        + (f"median {median_s:.2f} s from fault to next step; " if median_s is not None else "")
        + f"{report['captured_steps']} snapshots, {report['skipped_steps']} skipped, "
        f"{report['torn_steps']} torn",
        highlight=False,
        soft_wrap=True,
    )
    for r in report["recoveries"]:
        if r["lost_nodes"] or r["fetched_bytes"]:
            whom = (
                f"after node {', '.join(map(str, r['lost_nodes']))} was lost"
                if r["lost_nodes"]
                else "after a software failure"
            )
            beyond = "" if r["covered"] else f", more than {report['policy']} survives"
            console.print(
                f"{whom}{beyond}: step {r['step']} from {r['source']}, "
                f"{human_bytes(r['fetched_bytes'])} from other nodes",
                highlight=False,
                soft_wrap=True,
            )


def _show_timeline(console: Console, facts: Facts) -> None:
    said = [(e.mono_ns, e.who, e.why) for e in facts.events if e.kind in TOLD]
    said += [(int(n["mono_ns"]), "drill", f"fault {n['fault']}: {n['what']}") for n in facts.notes]
    if not said:
        return
    said.sort()
    table = Table("s", "who", "what", title="Timeline", box=None)
    for at_ns, who, why in said[:LONG_TIMELINE]:
        table.add_row(f"{(at_ns - said[0][0]) / S_NS:.3f}", who, escape(why))
    console.print(table)
    if len(said) > LONG_TIMELINE:
        console.print(
            f"and {len(said) - LONG_TIMELINE} lines more in the journal",
            highlight=False,
            soft_wrap=True,
        )
