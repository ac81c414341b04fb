"""Process: the world of a preflight: where its nodes meet, its door, its history.

Comes in: a request, where the nodes meet, settings. Goes out: a verdict and this node's number.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from keepstep.core.preflight.history import NO_HISTORY, remember
from keepstep.core.preflight.judgement import FleetEvidence, PreflightVerdict, judge
from keepstep.core.wire.codec import Codec, NotAMessage
from keepstep.edge.net.kv_client import BlockingClient
from keepstep.edge.preflight.history_file import history_path, read_history, write_history
from keepstep.edge.preflight.link_probe import TOKEN_LETTERS, ProbeDoor
from keepstep.errors import ConfigError
from keepstep.model.launch import Etcd
from keepstep.model.messages.preflight import CheckOutcome, PreflightHistory, PreflightSeat
from keepstep.runtime.preflight.fleet import FleetPart, Told, check_alone
from keepstep.runtime.preflight.meeting import PreflightMeeting
from keepstep.runtime.preflight.request import PreflightRequest

HISTORIES: Codec[PreflightHistory] = Codec((PreflightHistory,), max_bytes=1 << 20)
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class FleetPlace:
    """Where the nodes meet: an etcd, or a store at `endpoint`, hosted by whoever's machine that
    is. `secret`: the job's, None: it has none."""

    job: str
    endpoint: tuple[str, int]
    etcd: Etcd | None
    secret: str | None


@dataclass(frozen=True, slots=True)
class PreflightEnd:
    """What came of it. `node`: this one's number."""

    node: int
    evidence: FleetEvidence
    verdict: PreflightVerdict


def run_preflight(
    request: PreflightRequest,
    place: FleetPlace | None,
    state_dir: Path,
    environ: Mapping[str, str],
    told: Told,
) -> PreflightEnd:
    """From the first check to the verdict. place: None for a single node. Raises ConfigError,
    MeetingError."""
    history = load_history(state_dir, told)
    if place is None:
        node, evidence = 0, check_alone(request, history, environ, told)
    else:
        node, evidence = _with_others(request, place, history, environ, told)
    verdict = judge(evidence)
    found = frozenset(f.check for f in verdict.findings if f.outcome is CheckOutcome.BAD)
    keep_history(state_dir, remember(history, evidence.readings.get(node, ()), found), told)
    return PreflightEnd(node, evidence, verdict)


def load_history(state_dir: Path, told: Callable[[str], None]) -> PreflightHistory:
    """What earlier ones brought. A file that is damaged counts as none, and that is told."""
    raw = read_history(state_dir)
    try:
        return HISTORIES.decode(raw)
    except NotAMessage as error:
        if raw:
            told(f"{history_path(state_dir)} is damaged ({error}): nothing of earlier ones counts")
        return NO_HISTORY


def keep_history(state_dir: Path, history: PreflightHistory, told: Callable[[str], None]) -> None:
    """For the next one. Where it cannot be written, that is told and nothing else."""
    try:
        write_history(state_dir, HISTORIES.encode(history))
    except OSError as error:
        told(f"history is not kept: {state_dir}: {error.strerror}")


def _with_others(
    request: PreflightRequest,
    place: FleetPlace,
    history: PreflightHistory,
    environ: Mapping[str, str],
    told: Told,
) -> tuple[int, FleetEvidence]:
    client = _client(place, request.wait_s)
    token = secrets.token_hex(TOKEN_LETTERS // 2)
    with ExitStack() as undo:
        try:
            door = ProbeDoor(request.address, token)
        except OSError as error:
            raise ConfigError(
                f"--host: expected an address of this machine, found {request.address!r}: "
                f"{error.strerror or error}"
            ) from error
        undo.callback(door.close)
        mine = PreflightSeat(
            host=request.host,
            address=request.address,
            port=door.port,
            machine=_machine(),
            token=token,
            nodes=request.nodes,
            ranks=request.ranks,
            life=secrets.token_hex(8),
        )
        told(f"waiting for {request.nodes} nodes")
        meeting = PreflightMeeting(client, place.secret, place.job)
        seats = meeting.take_seat(mine, request.node_rank, request.wait_s)
        part = FleetPart(request, history, meeting, seats, environ, told)
        evidence = part.run()
        part.leave(client.hosted)
        return seats.node, evidence


def _client(place: FleetPlace, within_s: float) -> BlockingClient:
    prefix = f"keepstep/preflight/{place.job}/"
    if place.etcd is not None:
        from keepstep.edge.net.etcd import EtcdClient

        return EtcdClient(place.etcd, prefix)
    from keepstep.edge.torch.tcp_store import meet_embedded  # imports torch

    return meet_embedded(place.endpoint, prefix, within_s)


def _machine() -> str:
    """Which machine this is: containers of one have the same."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return f"{socket.gethostname()}-{os.getpid()}"
