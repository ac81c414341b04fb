"""Launch: what `keepstep run` is to start on a node, and the ranks' place in the job once the nodes
have met.

Values only.
"""

from __future__ import annotations

from dataclasses import dataclass

# In the environment of a rank: where its agent listens; that it takes a lost rank's place; its run,
# which is the same after a restart; the option `prebuild`.
PREBUILD = "KEEPSTEP_PREBUILD"
AGENT_SOCKET = "KEEPSTEP_AGENT_SOCKET"
RANK_OF = "KEEPSTEP_RANK_OF"  # the directory of the job whose rank a process is, or has forked
REJOIN = "KEEPSTEP_REJOIN"
RUN = "KEEPSTEP_RUN"
DEFAULT_ROLE = "default"


@dataclass(frozen=True, slots=True)
class Etcd:
    """Where the members of an etcd answer, and how to ask them.

    endpoints: host and port of each member.
    tls: ask over TLS; so does any of the PEM files `ca`, `cert` and `key`.
    """

    endpoints: tuple[tuple[str, int], ...]
    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def in_words(self) -> str:
        """For a sentence: what it is and where."""
        return "etcd at " + " or ".join(f"{host}:{port}" for host, port in self.endpoints)


@dataclass(frozen=True, slots=True)
class Launch:
    """What one node starts.

    command: the whole command of a rank.
    argv: the script and its own arguments, from which the job's name is derived when `job` is None.
    ranks: how many on this node.
    max_restarts: of the whole job.
    role: stands in front of the ranks' output where it is shown besides; DEFAULT_ROLE: "rank".
    master_addr, master_port: where the ranks of one node meet; port 0 is any free one.
    log_dir, redirects, tee: as torchrun's, the latter two `0`, `3` or `0:1,1:2`.
    shown_ranks: whose output is shown; None means all.
    standby: processes that wait to become a rank.
    nodes, min_nodes: how many nodes the job has, and with how many it may go on.
    node_rank: which of them this one would like to be.
    endpoint: where the agents of several nodes meet; with `etcd` its first member.
    """

    command: tuple[str, ...]
    argv: tuple[str, ...]
    ranks: int
    max_restarts: int = 100
    role: str = DEFAULT_ROLE
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
class Predecessor:
    """The agents of this node that were killed before this one, since one of them took part in an
    attempt: their processes, and the newest attempt of which they may have started ranks; -1: of
    none. `signum`: the signal that was to end them, and the job; 0: none."""

    pids: tuple[int, ...]
    attempt: int
    signum: int = 0


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """This node's ranks among all ranks during one attempt, and where all of them meet.

    attempt: number of the attempt. node: number of this node, of `nodes`. first_rank: the lowest
    rank here, of `world_size`.
    """

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
    left nothing. `is_refusal`: it is an error of keepstep's that lasts until a person changes
    something; `is_stop`: one with which the job is to end, for a person to decide. `writer`: the
    process that wrote it, where it was keepstep's own words; else 0."""

    message: str = ""
    place: str = ""
    path: str = ""
    is_refusal: bool = False
    is_stop: bool = False
    writer: int = 0


@dataclass(frozen=True, slots=True)
class RankEnd:
    """A rank's process is over. `rank` is its number on the node; `code` as subprocess tells it: 0
    ended well, n exit code, -n killed by signal n."""

    rank: int
    pid: int
    code: int
    report: ErrorReport = ErrorReport()
