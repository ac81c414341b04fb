"""`keepstep preflight`: whether machines are fit for a training, measured before it starts.

Comes in: a command line. Goes out: a table or JSON, and an exit code. Decides nothing: what is
measured is in `runtime/preflight`, what is judged in `core/preflight`. As JSON: {"fit",
"exit_code", "node", "nodes": [{"node", "host", "checks": {name: outcome}}, ...], "figures":
{quantity: {"check", "unit", "floor", "nodes": {node: figure}}}, "findings": [{"check", "outcome",
"nodes", "hosts", "found", "why", "fix"}, ...], "notes": [sentence, ...]}.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from keepstep import __version__
from keepstep.cli.doctor import find_left
from keepstep.cli.job_choice import JsonOption, print_json
from keepstep.cli.launch_arguments import (
    RDZV_PORT,
    count_nodes,
    count_ranks,
    parse_endpoint,
    parse_etcd,
)
from keepstep.cli.preflight_report import as_document, print_report
from keepstep.config import Settings, resolve
from keepstep.core.doctor.defect import Grade
from keepstep.core.doctor.examination import Examination, examine
from keepstep.core.preflight.catalogue import BY_CHECK, SAME, STATIC, with_floors
from keepstep.dashboard.screen import Screen
from keepstep.edge.doctor.host import Host
from keepstep.edge.doctor.machine import read_machine
from keepstep.edge.os.needs import check_torch
from keepstep.errors import ConfigError
from keepstep.model.machine_facts import MachineFacts
from keepstep.model.messages.preflight import CheckOutcome, CheckReading, FleetTrait
from keepstep.model.units import MIB
from keepstep.runtime.preflight.local_checks import Efforts
from keepstep.runtime.preflight.process import FleetPlace, run_preflight
from keepstep.runtime.preflight.request import PreflightRequest, refuse_what_cannot_run

INTERRUPTED = 130
LOOPBACK = "127.0.0.1"
LIBRARIES = ("NCCL_", "TORCH_NCCL_", "GLOO_")
SIZES = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def preflight(
    nodes: Annotated[
        int, typer.Option("--nnodes", min=1, help="Nodes; start the same command on each.")
    ] = 1,
    nproc: Annotated[
        str, typer.Option("--nproc-per-node", metavar="N", help="Ranks of a node in the ring.")
    ] = "1",
    endpoint: Annotated[
        str,
        typer.Option("--rdzv-endpoint", metavar="HOST:PORT", help="Where the nodes meet."),
    ] = "",
    backend: Annotated[
        str, typer.Option("--rdzv-backend", metavar="c10d|etcd", help="How the nodes meet.")
    ] = "c10d",
    conf: Annotated[
        str, typer.Option("--rdzv-conf", metavar="KEY=VALUE,...", help="TLS to etcd.")
    ] = "",
    node_rank: Annotated[
        int | None,
        typer.Option("--node-rank", min=0, metavar="N", help="Number of this node. Default: any."),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option("--host", help="This node's address for others. Default: KEEPSTEP_HOST."),
    ] = None,
    job: Annotated[
        str, typer.Option("--job", metavar="NAME", help="Keeps preflights at one endpoint apart.")
    ] = "preflight",
    wait: Annotated[
        float, typer.Option("--wait", min=1, help="Seconds to wait for the other nodes.")
    ] = 300.0,
    within: Annotated[
        float | None,
        typer.Option(
            "--within",
            min=0,
            metavar="SECONDS",
            help="Run only the checks that found most for their time, in so many seconds.",
        ),
    ] = None,
    only: Annotated[
        str, typer.Option("--only", metavar="CHECK,...", help=f"Of {', '.join(BY_CHECK)}.")
    ] = "",
    skip: Annotated[
        str, typer.Option("--skip", metavar="CHECK,...", help="All checks but these.")
    ] = "",
    memory: Annotated[
        str, typer.Option("--memory", metavar="SIZE", help="Memory to test, such as 4g.")
    ] = "64m",
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", metavar="DIR", help="Whose disk to measure. Default: store, else state_dir."
        ),
    ] = None,
    floor: Annotated[
        list[str] | None,
        typer.Option(
            "--floor",
            metavar="FIGURE=N",
            help="Worst figure that passes, in bytes/s, flop/s or ns, such as link-speed=1e9.",
        ),
    ] = None,
    own: Annotated[
        bool, typer.Option("--own", help="Exit code 1 only for defects of this node.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Measure whether machines are fit for a training before it starts; name what is not.

    Exit code 0: all is in order; 1: a defect is named; 2: none is, and something gave no answer.
    """
    settings = resolve({"host": host} if host else None, os.environ, job)
    count_nodes(str(nodes), node_rank)
    place = _place(nodes, endpoint, backend, conf, settings)
    facts = read_machine(Host(), os.environ, nodes, None, find_left)
    request = PreflightRequest(
        efforts=Efforts(_directory(directory, settings), parse_size("--memory", memory)),
        own=(static_reading(examine(facts)), same_reading(facts, os.environ)),
        nodes=nodes,
        node_rank=node_rank,
        ranks=count_ranks(nproc),
        host=socket.gethostname()[:255],
        address=_address(place, settings),
        only=_names("--only", only),
        skip=_names("--skip", skip),
        within_s=within,
        has_device=facts.gpus.on_bus > 0 or os.path.exists("/dev/kfd"),
        wait_s=wait,
        floors=parse_floors(floor or []),
    )
    refuse_what_cannot_run(request)
    console = Screen(stderr=True, highlight=False, soft_wrap=True)
    with _ended_as_by_ctrl_c():
        end = run_preflight(
            request,
            place,
            settings.state_dir,
            os.environ,
            lambda what: None if json else console.print(f"preflight: {what}", style="dim"),
        )
    if json:
        print_json(as_document(end))
    else:
        print_report(Screen(highlight=False, soft_wrap=True), end)
    code = end.verdict.exit_code
    if own and code == 1 and not end.verdict.is_bad(end.node):
        code = 0
    raise typer.Exit(code)


def static_reading(found: Examination) -> CheckReading:
    """What the doctor says, as one reading: bad where something will break. Warnings are told."""
    broken = found.of_grade(Grade.BROKEN)
    warnings = ", ".join(check for check, _ in found.of_grade(Grade.WARNING))
    if not broken:
        told = f"warnings: {warnings}" if warnings else ""
        return CheckReading(STATIC, CheckOutcome.OK, told)
    told = "; ".join(f"{check}: {defect.found}" for check, defect in broken)
    check, first = broken[0]
    return CheckReading(
        STATIC,
        CheckOutcome.BAD,
        told,
        first.why,
        first.fix if len(broken) == 1 else f"{check}: {first.fix}; keepstep doctor has the others",
    )


def same_reading(facts: MachineFacts, environ: Mapping[str, str]) -> CheckReading:
    """What must be the same on all nodes. Which interface a library takes may differ."""
    software = facts.software
    found = {
        "keepstep": __version__,
        "python": ".".join(map(str, software.python)),
        "torch": software.torch or "",
        "torch's CUDA": software.torch_cuda or "",
        "numpy": _version("numpy"),
        "GPU driver": facts.gpus.driver or "",
        "GPUs": str(facts.gpus.of_driver),
    }
    found["NCCL's and gloo's variables"] = " ".join(
        f"{name}={environ[name]}"
        for name in sorted(environ)
        if name.startswith(LIBRARIES) and not name.endswith("_IFNAME")
    )
    traits = tuple(FleetTrait(name, value[:1000]) for name, value in found.items())
    return CheckReading(SAME, CheckOutcome.OK, traits=traits)


def parse_floors(given: list[str]) -> dict[str, int]:
    """`link-speed=1e9`, each. Raises ConfigError."""
    floors = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            number = float(value)
            floors[name] = int(number)
        except (ValueError, OverflowError):
            number = -1.0
        if not number >= 0:
            raise ConfigError(f"--floor: expected FIGURE=NUMBER, found {text!r}")
    with_floors(floors)
    return floors


def parse_size(option: str, text: str) -> int:
    """`64m`, `4g`, or bytes; at least a MiB. Raises ConfigError."""
    digits, unit = (text[:-1], text[-1].lower()) if text[-1:].isalpha() else (text, "")
    if not digits.isdecimal() or len(digits) > 15 or unit not in ("", *SIZES):
        raise ConfigError(f"{option}: expected a size such as 64m or 4g, found {text!r}")
    size = int(digits) * SIZES.get(unit, 1)
    if size < MIB:
        raise ConfigError(f"{option}: expected at least 1m, found {text!r}")
    return size


def _names(option: str, text: str) -> frozenset[str]:
    found = frozenset(name.strip() for name in text.split(",") if name.strip())
    if unknown := sorted(found - set(BY_CHECK)):
        raise ConfigError(f"{option}: expected some of {', '.join(BY_CHECK)}, found {unknown[0]!r}")
    return found


def _place(
    nodes: int, endpoint: str, backend: str, conf: str, settings: Settings
) -> FleetPlace | None:
    if nodes == 1:
        return None
    etcd = parse_etcd(backend, endpoint, conf)
    if etcd is not None:
        return FleetPlace(settings.job, etcd.endpoints[0], etcd, settings.secret)
    check_torch("keepstep preflight --nnodes")
    if not endpoint:
        raise ConfigError(
            f"--rdzv-endpoint: expected host:port at which the {nodes} nodes meet, found none"
        )
    where, port = parse_endpoint(endpoint)
    return FleetPlace(settings.job, (where, port or RDZV_PORT), None, settings.secret)


def _address(place: FleetPlace | None, settings: Settings) -> str:
    if place is None:
        return LOOPBACK
    if settings.host:
        return settings.host
    from keepstep.edge.torch.meeting_place import local_address  # imports torch

    return local_address(place.endpoint)


def _directory(given: Path | None, settings: Settings) -> Path:
    if given is not None:
        if not given.is_dir():
            raise ConfigError(f"--dir: expected a directory, found {str(given)!r}")
        return given.absolute()
    store = str(settings.store) if settings.store is not None else ""
    if store and "://" not in store and os.path.isdir(store):
        return Path(store).absolute()
    settings.state_dir.mkdir(parents=True, exist_ok=True)
    return settings.state_dir


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@contextmanager
def _ended_as_by_ctrl_c() -> Iterator[None]:
    """So that children are ended, too: a batch system ends by SIGTERM. No code of a verdict is left
    behind then."""
    before = signal.getsignal(signal.SIGTERM)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and before is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    finally:
        if is_main and before is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, before)
