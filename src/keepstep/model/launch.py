"""Launch: what `keepstep run` was asked to start, after its arguments have been understood, and
what the nodes have agreed on since."""

from __future__ import annotations

from dataclasses import dataclass

# In the environment of a rank: where its agent listens; that it takes a lost rank's place.
AGENT_SOCKET = "KEEPSTEP_AGENT_SOCKET"
REJOIN = "KEEPSTEP_REJOIN"


@dataclass(frozen=True, slots=True)
class Etcd:
    """Where etcd's members answer. With any of the PEM files, or `tls`, it is asked by TLS."""

    endpoints: tuple[tuple[str, int], ...]
    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def in_words(self) -> str:
        return "etcd at " + " or ".join(f"{host}:{port}" for host, port in self.endpoints)


@dataclass(frozen=True, slots=True)
class Launch:
    """One node's ranks.

    `command` is the whole command of a rank; `argv` the script and its own arguments, which name
    the job when `job` does not.
    `master_port` 0 means a free one. `redirects`, `tee` are torchrun's (`0`, `3`, `0:1,1:2`);
    `shown_ranks` None shows the output of all.
    `standby` processes wait on each node to become a rank at once.
    `min_nodes`: with so many a job goes on when no more come in time.
    `endpoint` is where the agents of several `nodes` meet, with `etcd` its first; `node_rank` which
    of them this one would like to be.
    """

    command: tuple[str, ...]
    argv: tuple[str, ...]
    ranks: int
    max_restarts: int = 100
    role: str = "default"
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    log_dir: str | None = None
    redirects: str = "0"
    tee: str = "0"
    shown_ranks: frozenset[int] | None = None
    standby: int = 1
    nodes: int = 1
    min_nodes: int = 1
    node_rank: int | None = None
    endpoint: tuple[str, int] | None = None
    job: str | None = None
    etcd: Etcd | None = None


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """This node's ranks among all ranks, for one life of them (`attempt`), and where they meet. -1:
    none yet."""

    attempt: int
    node: int
    nodes: int
    first_rank: int
    world_size: int
    master_addr: str
    master_port: int


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """What a rank leaves behind when its program fails. `message` is the error's type and message,
    `place` where in the program it was raised, `path` the file that says more; all empty when it
    left nothing."""

    message: str = ""
    place: str = ""
    path: str = ""


@dataclass(frozen=True, slots=True)
class RankEnd:
    """A rank's process is over. `rank` is its number on the node; `code` as subprocess tells it: 0
    ended well, n exit code, -n killed by signal n."""

    rank: int
    pid: int
    code: int
    report: ErrorReport = ErrorReport()
