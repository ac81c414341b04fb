"""Launch arguments: torchrun's options, and what they mean to keepstep.

Comes in: the values of one command line, as text and numbers. Goes out: a `Launch`. Starts nothing
and reads no environment; looks whether the script is there, and imports torch only to count devices
(`--nproc-per-node auto`).
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from keepstep.cli.parameters import argument, panel_of
from keepstep.config.option import Topic
from keepstep.errors import ConfigError
from keepstep.model.bounds import MAX_RANKS_OF_NODE, MAX_WORLD_SIZE
from keepstep.model.launch import DEFAULT_ROLE, Etcd, Launch

LOOPBACK = "127.0.0.1"
# torchrun's, where none is given
RDZV_PORT = 29400
MASTER_PORT = 29500
ETCD_PORT = 2379
BACKENDS = ("c10d", "static", "etcd")  # the first two are one here
MAX_PORT = 65535
MAX_DIGITS, MAX_SHOWN = 9, 40

Address = tuple[str, int]

# torchrun's options that mean nothing here, by field, and why: they are accepted, and told.
WITHOUT_EFFECT = {
    "start_method": "ranks are programs of their own, which are neither forked nor spawned",
    "run_path": "the script runs in a process of its own in any case",
    "logs_specs": "logs go where --log-dir, --redirects and --tee say",
    "numa_binding": "ranks are not bound to cores: bind them with numactl",
    "signals_to_handle": "SIGTERM, SIGINT, SIGHUP and SIGQUIT are handled",
    "shutdown_timeout": "ranks have 5 s to leave",
    "virtual_local_rank": "LOCAL_RANK is the rank's number on its node",
    "event_log_handler": "events go to the journal: `keepstep explain`",
    "duplicate_stdout_filters": "filter what --redirects or --tee has written",
    "duplicate_stderr_filters": "filter what --redirects or --tee has written",
}
TORCHRUN = "Options of torchrun, also read from PET_<NAME>"
torchrun = partial(argument, panel=TORCHRUN, variable_prefix="PET_")
without_effect = partial(torchrun, help="Accepted, without effect.", is_hidden=True)


@dataclass(frozen=True, slots=True)
class LaunchArguments:
    """One command line of `keepstep run`, without the options of a Config. Names, types and
    defaults are torchrun's.

    script, script_args: the training script, and its own arguments.
    """

    script: str
    script_args: tuple[str, ...] = ()
    nproc_per_node: str = torchrun(
        "1", "Ranks to start on this node: a number, auto, cpu or gpu.", metavar="N"
    )
    nnodes: str = torchrun(
        "1",
        "Nodes of the job; start the same command on each. MIN:MAX: with a store, go on with as "
        "few as MIN.",
        metavar="N|MIN:MAX",
    )
    node_rank: int | None = torchrun(
        None, "Number of this node. Default: nodes are numbered as they arrive.", metavar="N"
    )
    max_restarts: int = torchrun(100, "Restarts before the job is given up.", metavar="N")
    module: bool = torchrun(False, "Run the script as a module, as `python -m` does.", short="-m")
    no_python: bool = torchrun(False, "Run the script as a program of its own, without Python.")
    log_dir: str | None = torchrun(None, "Directory for the ranks' logs.", metavar="DIR")
    redirects: str = torchrun(
        "0",
        "Write the ranks' output to files: 1 stdout, 2 stderr, 3 both, or a map such as 0:1,1:3.",
        short="-r",
        metavar="STREAMS",
    )
    tee: str = torchrun(
        "0", "The same, and show the output here too.", short="-t", metavar="STREAMS"
    )
    local_ranks_filter: str = torchrun(
        "", "Show the output of these ranks only, such as 0,1.", metavar="RANKS"
    )
    role: str = torchrun(
        DEFAULT_ROLE, "Prefix of the ranks' output with --tee; default: [rankN].", metavar="NAME"
    )
    master_addr: str = torchrun(
        "",
        "Address at which the ranks meet. With several nodes, the host of --rdzv-endpoint.",
        metavar="HOST",
    )
    master_port: int = torchrun(0, "Port at which the ranks meet. 0: any free one.", metavar="PORT")
    rdzv_endpoint: str = torchrun(
        "",
        "Where the nodes meet, as host:port, the same on every node. With etcd: its members, such "
        "as h1:2379,h2:2379.",
        metavar="ENDPOINT",
    )
    rdzv_backend: str = torchrun(
        "c10d",
        "How the nodes meet. c10d: in the agent at the endpoint, whose node must not be lost. "
        "etcd: in an etcd that you run, so any node may be lost.",
        metavar="c10d|etcd",
    )
    rdzv_id: str = torchrun("", "Name of the job where --job gives none.", metavar="NAME")
    rdzv_conf: str = torchrun(
        "",
        "TLS to etcd: protocol=https,cacert=PEM,cert=PEM,key=PEM.",
        metavar="KEY=VALUE,...",
    )
    standalone: bool = torchrun(False, "Implied without --nnodes.", is_hidden=True)
    monitor_interval: float = torchrun(0.0, "Ignored: nothing is polled.", is_hidden=True)
    local_addr: str = torchrun("", "The same as --host.", metavar="ADDRESS")
    start_method: str | None = without_effect(None)
    run_path: bool = without_effect(False)
    logs_specs: str | None = without_effect(None)
    numa_binding: str | None = without_effect(None)
    signals_to_handle: str | None = without_effect(None)
    shutdown_timeout: str | None = without_effect(None)
    virtual_local_rank: bool = without_effect(False)
    event_log_handler: str | None = without_effect(None)
    duplicate_stdout_filters: str | None = without_effect(None)
    duplicate_stderr_filters: str | None = without_effect(None)
    standby: int = argument(
        1,
        "Processes per node, 0 or 1, that have imported torch and wait to replace a dead rank.",
        panel=panel_of(Topic.FAILURES),
        metavar="N",
    )


def remarks(arguments: LaunchArguments) -> list[str]:
    """A line for each option of torchrun's that was given and has no effect."""
    return [
        f"--{name.replace('_', '-')} has no effect here: {why}"
        for name, why in WITHOUT_EFFECT.items()
        if getattr(arguments, name) not in (None, False)
    ]


def check_script(arguments: LaunchArguments) -> None:
    """Raises ConfigError when there is no such script, module or program to start."""
    script = arguments.script
    if arguments.no_python:
        if shutil.which(script) is None:
            raise ConfigError(f"SCRIPT: expected a program that can be run, found no {script!r}")
    elif arguments.module:
        if not _is_module(script):
            raise ConfigError(f"SCRIPT: expected a module with -m, found no {script!r}")
    elif not os.path.exists(script):
        raise ConfigError(f"SCRIPT: expected a Python script, found no file {script!r}")


def check_prebuild(prebuild: str, arguments: LaunchArguments) -> None:
    """Raises ConfigError when the option names a module that nobody can import. The functions in it
    are looked for by the process that stands by, which imports it."""
    script_dir = "" if arguments.module else str(Path(arguments.script).resolve().parent)
    for target in prebuild.replace(",", " ").split():
        top = target.partition(":")[0].partition(".")[0]
        if PathFinder.find_spec(top, [script_dir, *sys.path]) is None and find_spec(top) is None:
            raise ConfigError(
                f"prebuild: expected a module that the program can import, found no {top!r} for "
                f"{target!r} (looked beside the program, too)"
            )


def _is_module(name: str) -> bool:
    """Whether `python -m name` would find it, which looks in the working directory first. A package
    is not imported to look inside."""
    top = name.partition(".")[0]
    return PathFinder.find_spec(top, ["", *sys.path]) is not None or find_spec(top) is not None


class NodeCount(NamedTuple):
    """How many nodes a job has, and with how many it may go on."""

    least: int
    most: int


class MeetingPoint(NamedTuple):
    """Where nodes and ranks meet.

    endpoint: where the agents of several nodes do; None for one node.
    master_addr, master_port: where the ranks of one node do; port 0 is any free one.
    """

    endpoint: Address | None
    master_addr: str
    master_port: int


def build_launch(arguments: LaunchArguments, python: str) -> Launch:
    """What the arguments ask for. `python`: the interpreter that runs the script. Raises
    ConfigError naming option, expected and found."""
    nodes = count_nodes(arguments.nnodes, arguments.node_rank)
    ranks = count_ranks(arguments.nproc_per_node)
    _check_numbers(arguments)
    if nodes.most * ranks > MAX_WORLD_SIZE:
        raise ConfigError(
            f"--nnodes and --nproc-per-node: expected at most {MAX_WORLD_SIZE} ranks, found "
            f"{nodes.most} x {ranks}"
        )
    etcd = parse_etcd(arguments.rdzv_backend, arguments.rdzv_endpoint, arguments.rdzv_conf)
    if etcd is None:
        meeting = meeting_point(
            nodes.most, arguments.rdzv_endpoint, arguments.master_addr, arguments.master_port
        )
    else:
        endpoint = etcd.endpoints[0] if nodes.most > 1 else None
        meeting = MeetingPoint(endpoint, LOOPBACK, arguments.master_port)
    return Launch(
        command=rank_command(arguments, python),
        argv=(arguments.script, *arguments.script_args),
        ranks=ranks,
        max_restarts=arguments.max_restarts,
        role=arguments.role,
        master_addr=meeting.master_addr,
        master_port=meeting.master_port,
        log_dir=arguments.log_dir,
        redirects=arguments.redirects,
        tee=arguments.tee,
        shown_ranks=parse_ranks(arguments.local_ranks_filter),
        standby=arguments.standby,
        nodes=nodes.most,
        min_nodes=nodes.least,
        node_rank=arguments.node_rank if nodes.most > 1 else None,
        endpoint=meeting.endpoint,
        job=arguments.rdzv_id or None,
        etcd=etcd if nodes.most > 1 else None,
    )


def _check_numbers(arguments: LaunchArguments) -> None:
    if arguments.max_restarts < 0:
        raise ConfigError(f"--max-restarts: expected 0 or more, found {arguments.max_restarts}")
    if arguments.standby not in (0, 1):
        raise ConfigError(f"--standby: expected 0 or 1, found {arguments.standby}")
    if not 0 <= arguments.master_port <= MAX_PORT:
        raise ConfigError(f"--master-port: expected 0 to {MAX_PORT}, found {arguments.master_port}")


def count_nodes(nnodes: str, node_rank: int | None) -> NodeCount:
    """`4` or `MIN:MAX`; a `node_rank` must be below it. Raises ConfigError."""
    low, _, high = nnodes.partition(":")
    least, most = _whole(low), _whole(high or low)
    if most > MAX_WORLD_SIZE:
        raise ConfigError(f"--nnodes: expected at most {MAX_WORLD_SIZE}, found {_short(nnodes)}")
    if not 0 < least <= most:
        raise ConfigError(f"--nnodes: expected a number of nodes, or MIN:MAX, found {nnodes!r}")
    if node_rank is not None and not 0 <= node_rank < most:
        raise ConfigError(
            f"--node-rank: expected 0 to {most - 1} with --nnodes {nnodes}, found {node_rank}"
        )
    return NodeCount(least, most)


def _whole(text: str) -> int:
    """The number; -1 for anything else. One that is too large for every bound here is cut: `int`
    refuses thousands of digits in words of its own."""
    return int(text.lstrip("0")[:MAX_DIGITS] or "0") if text.isdecimal() else -1


def _short(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def meeting_point(
    nodes: int, rdzv_endpoint: str, master_addr: str, master_port: int
) -> MeetingPoint:
    """Where they meet when it is not in etcd. The agents of several nodes find a place for their
    ranks by themselves. Raises ConfigError where several nodes have no endpoint."""
    asked = parse_endpoint(rdzv_endpoint) if rdzv_endpoint else None
    if nodes == 1:
        host, port = asked or (master_addr or LOOPBACK, master_port)
        return MeetingPoint(None, host, port or 0)
    host, port = asked or (master_addr, master_port or MASTER_PORT)
    if not host or port == 0:
        found = f"port 0 of {host}" if host else "none"
        raise ConfigError(
            f"--rdzv-endpoint: expected host:port at which the {nodes} nodes meet, the same for "
            f"all, found {found}"
        )
    return MeetingPoint((host, port or RDZV_PORT), LOOPBACK, master_port if asked else 0)


def parse_etcd(backend: str, endpoint: str, conf: str) -> Etcd | None:
    """Where etcd is, if that is where the nodes meet. `conf`: `key=value,...`, as torchrun's.
    Raises ConfigError."""
    if backend not in BACKENDS:
        raise ConfigError(
            f"--rdzv-backend: expected one of {', '.join(BACKENDS)}, found {backend!r}"
        )
    if backend != "etcd":
        return None
    members = [parse_endpoint(one.strip()) for one in endpoint.split(",") if one.strip()]
    if not members:
        raise ConfigError(
            "--rdzv-endpoint: expected etcd's members as host:port,host:port, found none"
        )
    given = dict(part.strip().partition("=")[::2] for part in conf.split(","))
    return Etcd(
        endpoints=tuple((host, port or ETCD_PORT) for host, port in members),
        tls=given.get("protocol") == "https",
        ca=given.get("cacert"),
        cert=given.get("cert"),
        key=given.get("key"),
    )


def parse_endpoint(text: str) -> tuple[str, int | None]:
    """Host and port of `host:port`, or of `host`, whose port is None. Raises ConfigError."""
    host, colon, port = text.rpartition(":") if ":" in text else (text, "", "0")
    if not host or not 0 <= _whole(port) <= MAX_PORT:
        raise ConfigError(f"--rdzv-endpoint: expected host:port, found {text!r}")
    return host, _whole(port) if colon else None


def rank_command(arguments: LaunchArguments, python: str) -> tuple[str, ...]:
    """The whole command of a rank. Raises ConfigError on a contradiction."""
    if arguments.no_python and arguments.module:
        raise ConfigError("--no-python and --module: expected at most one of them, found both")
    own = (arguments.script, *arguments.script_args)
    if arguments.no_python:
        return own
    return (python, "-u", *(["-m"] if arguments.module else []), *own)


def count_ranks(nproc_per_node: str) -> int:
    """Ranks on this node; `auto`, `cpu` and `gpu` count what is there. Raises ConfigError."""
    if not nproc_per_node.isdecimal():
        from keepstep.edge.torch import ranks as devices  # imports torch

        return devices.count_ranks(nproc_per_node)
    ranks = _whole(nproc_per_node)
    if not 0 < ranks <= MAX_RANKS_OF_NODE:
        raise ConfigError(
            f"--nproc-per-node: expected 1 to {MAX_RANKS_OF_NODE}, found {_short(nproc_per_node)}"
        )
    return ranks


def parse_ranks(text: str) -> frozenset[int] | None:
    """`0,1`; None, which is all of them, where nothing is said. Raises ConfigError."""
    if not text:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(f"--local-ranks-filter: expected numbers such as 0,1, found {text!r}")
    return frozenset(_whole(part.strip()) for part in parts)
