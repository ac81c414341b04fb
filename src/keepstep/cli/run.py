"""`keepstep run`: torchrun's arguments, so that a user replaces one word, and keepstep's own.

Comes in: a command line and torchrun's `PET_*` variables. Goes out: a `Launch` and a `Config`, then
the agent's exit code. Decides nothing about the job; imports torch only when it runs one.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated, Any

import typer

from keepstep.config import Config, from_mapping
from keepstep.errors import ConfigError
from keepstep.model.launch import Etcd, Launch
from keepstep.runtime.agent.supervisor import LAST_WORD, RESTARTED_AGENT, SUPERVISOR, keep_agent

LOOPBACK = "127.0.0.1"
RDZV_PORT, MASTER_PORT, ETCD_PORT = 29400, 29500, 2379  # torchrun's, when none is given
BACKENDS = ("c10d", "static", "etcd")  # the first two are one here

# The first word that is no option is the script: what follows is its own. `--nproc_per_node` is
# `--nproc-per-node`.
CONTEXT_SETTINGS: dict[str, Any] = {
    "allow_interspersed_args": False,
    "token_normalize_func": lambda name: name.replace("_", "-"),
}


def _torchrun(name: str, words: str, *short: str, hidden: bool = False) -> Any:
    """An option of torchrun's, with the variable torchrun reads it from."""
    variable = "PET_" + name[2:].replace("-", "_").upper()
    return typer.Option(
        name, *short, help=words, envvar=variable, hidden=hidden, rich_help_panel="As torchrun"
    )


def _own(name: str, words: str) -> Any:
    return typer.Option(name, help=words, rich_help_panel="keepstep's own")


def run(
    script: Annotated[
        str,
        typer.Argument(
            help="The training script (with -m: a module; with --no-python: a program)."
        ),
    ],
    script_args: Annotated[
        list[str] | None, typer.Argument(help="The script's own arguments, handed on untouched.")
    ] = None,
    nproc_per_node: Annotated[
        str, _torchrun("--nproc-per-node", "Ranks: a number, auto, cpu or gpu.")
    ] = "1",
    nnodes: Annotated[
        str,
        _torchrun(
            "--nnodes",
            "Machines, on each of which the same command is started; MIN:MAX: with MIN it goes on.",
        ),
    ] = "1",
    node_rank: Annotated[
        int | None,
        _torchrun(
            "--node-rank", "Which machine this is; without it they are counted as they come."
        ),
    ] = None,
    max_restarts: Annotated[
        int, _torchrun("--max-restarts", "How often all ranks may be restarted.")
    ] = 100,
    module: Annotated[
        bool, _torchrun("--module", "The script is a module, as in python -m.", "-m")
    ] = False,
    no_python: Annotated[
        bool, _torchrun("--no-python", "The script is a program of its own.")
    ] = False,
    log_dir: Annotated[
        str | None, _torchrun("--log-dir", "Directory for the ranks' log and error files.")
    ] = None,
    redirects: Annotated[
        str,
        _torchrun(
            "--redirects", "Streams that go to files: 1 out, 2 err, 3 both, or a map 0:1,1:3.", "-r"
        ),
    ] = "0",
    tee: Annotated[
        str, _torchrun("--tee", "Streams that go to files and here, in the same form.", "-t")
    ] = "0",
    local_ranks_filter: Annotated[
        str, _torchrun("--local-ranks-filter", "Ranks whose output is shown: 0,1.")
    ] = "",
    role: Annotated[str, _torchrun("--role", "Name in front of a rank's output.")] = "default",
    master_addr: Annotated[
        str,
        _torchrun(
            "--master-addr",
            "Address at which the ranks meet; with several machines the same as --rdzv-endpoint.",
        ),
    ] = "",
    master_port: Annotated[
        int, _torchrun("--master-port", "Port at which the ranks meet; 0: a free one.")
    ] = 0,
    rdzv_endpoint: Annotated[
        str,
        _torchrun(
            "--rdzv-endpoint",
            "host:port at which several machines meet; with etcd: of its members, h1:2379,h2:2379.",
        ),
    ] = "",
    rdzv_backend: Annotated[
        str,
        _torchrun(
            "--rdzv-backend",
            "c10d: the agent on that host makes the meeting point; etcd: it is there, and no "
            "machine's loss ends it.",
        ),
    ] = "c10d",
    rdzv_id: Annotated[str, _torchrun("--rdzv-id", "Names the job when --job does not.")] = "",
    rdzv_conf: Annotated[
        str,
        _torchrun("--rdzv-conf", "For etcd by TLS: protocol=https,cacert=PEM,cert=PEM,key=PEM."),
    ] = "",
    standalone: Annotated[
        bool, _torchrun("--standalone", "Accepted: it is so without --nnodes.", hidden=True)
    ] = False,
    monitor_interval: Annotated[
        float, _torchrun("--monitor-interval", "Accepted: nothing is polled.", hidden=True)
    ] = 0.0,
    standby: Annotated[
        int,
        _own(
            "--standby",
            "Processes with torch imported that wait to take a dead rank's place: 0 or 1.",
        ),
    ] = 1,
    job: Annotated[
        str | None, _own("--job", "Name of the job; the same name finds its own state again.")
    ] = None,
    store: Annotated[
        str | None, _own("--store", "Directory or URL (s3://...) for checkpoints.")
    ] = None,
    persist_every_steps: Annotated[
        int | None, _own("--persist-every-steps", "A checkpoint to the store every n steps.")
    ] = None,
    keep: Annotated[
        str | None, _own("--keep", "Which checkpoints stay: latest:2,every:1000,best:loss:min:1.")
    ] = None,
    slots: Annotated[int | None, _own("--slots", "Slots a rank; 0: choose.")] = None,
    arena_dir: Annotated[
        str | None, _own("--arena-dir", "Where slots live; must be memory.")
    ] = None,
    grace_s: Annotated[
        float | None, _own("--grace-s", "How long memory is kept when agent and ranks are gone.")
    ] = None,
    lazy: Annotated[
        bool | None,
        _own("--lazy/--no-lazy", "Copy during the next forward and backward, or at the boundary."),
    ] = None,
    scrub_every_s: Annotated[
        float | None, _own("--scrub-every-s", "How often resting slots are verified; 0: never.")
    ] = None,
    state_dir: Annotated[str | None, _own("--state-dir", "Where journals live.")] = None,
    redundancy: Annotated[
        str | None,
        _own("--redundancy", "What other nodes keep: none, copies:M, parity:N, rs:K+M, auto."),
    ] = None,
    host: Annotated[str | None, _own("--host", "This machine's address for the others.")] = None,
    rack: Annotated[str | None, _own("--rack", "What this machine fails together with.")] = None,
    metrics_port: Annotated[
        int | None,
        _own("--metrics-port", "Serve Prometheus metrics on this port of every machine."),
    ] = None,
    link_dead_s: Annotated[
        float | None,
        _own("--link-dead-s", "How long a machine may be silent before it counts as lost."),
    ] = None,
    replace_command: Annotated[
        str | None,
        _own("--replace-command", "Has the platform start a machine in place of a lost one."),
    ] = None,
    budget: Annotated[
        str | None,
        _own(
            "--budget",
            "Restarts each cause may cost in a row: crash=3,hang=3,node=unlimited,refill=100 "
            "(new steps).",
        ),
    ] = None,
    shrink_after_s: Annotated[
        float | None,
        _own(
            "--shrink-after-s", "With --nnodes MIN:MAX: how long missing machines are waited for."
        ),
    ] = None,
    hang_after_s: Annotated[
        float | None,
        _own("--hang-after-s", "No progress for so long is a hang; without it: learnt."),
    ] = None,
) -> None:
    """Run a training script on this machine, or on several, and keep it alive: torchrun's
    arguments, every step protected."""
    raise typer.Exit(_run(dict(locals()), script_args or []))


def _run(given: dict[str, Any], script_args: list[str]) -> int:
    launch = build_launch(given, script_args)
    config = from_mapping(
        {name: value for name, value in given.items() if name in Config.__dataclass_fields__}
    )
    _log_to_stderr()
    if SUPERVISOR not in os.environ:
        return keep_agent(sys.argv[1:], os.environ)
    environ = dict(os.environ)
    for name in (SUPERVISOR, RESTARTED_AGENT, LAST_WORD):  # not for the ranks
        os.environ.pop(name, None)
    from keepstep.runtime.agent.process import supervise  # imports torch

    return supervise(launch, config, environ)


def build_launch(given: dict[str, Any], script_args: list[str]) -> Launch:
    """What the options mean; `given` holds them by name. Raises ConfigError."""
    least_nodes, nodes = _count_nodes(given["nnodes"], given["node_rank"])
    if given["max_restarts"] < 0:
        raise ConfigError(f"--max-restarts: expected 0 or more, found {given['max_restarts']}")
    if given["standby"] not in (0, 1):
        raise ConfigError(f"--standby: expected 0 or 1, found {given['standby']}")
    if not 0 <= given["master_port"] < 1 << 16:
        raise ConfigError(f"--master-port: expected 0 to 65535, found {given['master_port']}")
    etcd = _etcd(given["rdzv_backend"], given["rdzv_endpoint"], given["rdzv_conf"])
    if etcd is not None:
        endpoint, address, port = (
            etcd.endpoints[0] if nodes > 1 else None,
            LOOPBACK,
            given["master_port"],
        )
    else:
        endpoint, address, port = _meeting_points(
            nodes, given["rdzv_endpoint"], given["master_addr"], given["master_port"]
        )
    return Launch(
        command=_command(given["script"], script_args, given["module"], given["no_python"]),
        argv=(given["script"], *script_args),
        ranks=_count(given["nproc_per_node"]),
        max_restarts=given["max_restarts"],
        role=given["role"],
        master_addr=address,
        master_port=port,
        log_dir=given["log_dir"],
        redirects=given["redirects"],
        tee=given["tee"],
        shown_ranks=_ranks(given["local_ranks_filter"]),
        standby=given["standby"],
        nodes=nodes,
        min_nodes=least_nodes,
        node_rank=given["node_rank"] if nodes > 1 else None,
        endpoint=endpoint,
        job=given["rdzv_id"] or None,
        etcd=etcd if nodes > 1 else None,
    )


def _count_nodes(nnodes: str, node_rank: int | None) -> tuple[int, int]:
    """(how many at least, how many)."""
    least, _, most = nnodes.partition(":")
    most = most or least
    if not (least.isdecimal() and most.isdecimal() and 0 < int(least) <= int(most)):
        raise ConfigError(f"--nnodes: expected a number of machines, or MIN:MAX, found {nnodes!r}")
    if node_rank is not None and not 0 <= node_rank < int(most):
        raise ConfigError(
            f"--node-rank: expected 0 to {int(most) - 1} with --nnodes {nnodes}, found {node_rank}"
        )
    return int(least), int(most)


def _meeting_points(
    nodes: int, rdzv_endpoint: str, master_addr: str, master_port: int
) -> tuple[tuple[str, int] | None, str, int]:
    """Where the agents of several nodes meet, and where the ranks of one node do. Several nodes'
    ranks get a place by themselves."""
    asked = _endpoint(rdzv_endpoint) if rdzv_endpoint else None
    if nodes == 1:
        host, port = asked or (master_addr or LOOPBACK, master_port)
        return None, host, port or 0
    host, port = asked or (master_addr, master_port or MASTER_PORT)
    if not host or port == 0:
        found = f"port 0 of {host}" if host else "none"
        raise ConfigError(
            f"--rdzv-endpoint: expected host:port at which the {nodes} machines meet, the "
            f"same for all, found {found}"
        )
    return (host, port or RDZV_PORT), LOOPBACK, master_port if asked else 0


def _etcd(backend: str, endpoint: str, conf: str) -> Etcd | None:
    """Where etcd is, when that is where they meet."""
    if backend not in BACKENDS:
        raise ConfigError(
            f"--rdzv-backend: expected one of {', '.join(BACKENDS)}, found {backend!r}"
        )
    if backend != "etcd":
        return None
    found = [_endpoint(one.strip()) for one in endpoint.split(",") if one.strip()]
    if not found:
        raise ConfigError(
            "--rdzv-endpoint: expected etcd's members as host:port,host:port, found none"
        )
    said = dict(part.strip().partition("=")[::2] for part in conf.split(","))
    endpoints = tuple((host, port or ETCD_PORT) for host, port in found)
    return Etcd(
        endpoints,
        said.get("protocol") == "https",
        said.get("cacert"),
        said.get("cert"),
        said.get("key"),
    )


def _endpoint(text: str) -> tuple[str, int | None]:
    host, colon, port = text.rpartition(":") if ":" in text else (text, "", "0")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise ConfigError(f"--rdzv-endpoint: expected host:port, found {text!r}")
    return host, int(port) if colon else None


def _command(script: str, script_args: list[str], module: bool, no_python: bool) -> tuple[str, ...]:
    if no_python and module:
        raise ConfigError("--no-python and --module: expected at most one of them, found both")
    if no_python:
        return (script, *script_args)
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    return (python, "-u", *(["-m"] if module else []), script, *script_args)


def _count(text: str) -> int:
    if not text.isdecimal():
        from keepstep.edge.torch.ranks import count_ranks  # imports torch

        return count_ranks(text)
    if int(text) < 1:
        raise ConfigError(f"--nproc-per-node: expected at least 1, found {text}")
    return int(text)


def _ranks(text: str) -> frozenset[int] | None:
    if not text:
        return None
    parts = text.split(",")
    if not all(p.strip().isdecimal() for p in parts):
        raise ConfigError(f"--local-ranks-filter: expected numbers such as 0,1, found {text!r}")
    return frozenset(int(p) for p in parts)


def _log_to_stderr() -> None:
    """The agent's sentences, unless the program already has its own way to show them."""
    log = logging.getLogger("keepstep")
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s keepstep %(message)s", "%H:%M:%S"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
