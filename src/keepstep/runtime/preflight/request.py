"""Request: what a preflight is asked for, and which checks that means.

Comes in: a command's options, what earlier preflights have brought. Goes out: a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from keepstep.core.preflight import catalogue
from keepstep.core.preflight.catalogue import CHECKS, PreflightCheck
from keepstep.core.preflight.selection import choose
from keepstep.errors import ConfigError
from keepstep.model.messages.preflight import CheckReading, CheckRecord, PreflightPlan
from keepstep.runtime.preflight.local_checks import Efforts


@dataclass(frozen=True, slots=True)
class PreflightRequest:
    """What one node is asked for.

    ranks: of this node, in the ring. only: the names of checks, none: all. own: readings that need
    no process of their own: what the doctor found, what must be the same everywhere. has_device:
    whether there is a GPU to be measured. wait_s: how long to wait for the other nodes.
    """

    efforts: Efforts
    own: tuple[CheckReading, ...]
    nodes: int = 1
    node_rank: int | None = None
    ranks: int = 1
    host: str = ""
    address: str = ""
    only: frozenset[str] = frozenset()
    skip: frozenset[str] = frozenset()
    within_s: float | None = None
    has_device: bool = False
    wait_s: float = 300.0
    floors: Mapping[str, int] = field(default_factory=dict)


def refuse_what_cannot_run(request: PreflightRequest) -> None:
    """What was asked for by name and cannot run with these options would pass unseen: all that was
    measured would be in order. Raises ConfigError."""
    for check in CHECKS:
        why_not = _why_not(request, check)
        if not why_not and check.name == catalogue.PCIE and request.nodes == 1:
            why_not = "" if request.has_device else "needs a GPU, and there is none"
        if why_not and check.name in request.only - request.skip:
            raise ConfigError(
                f"--only: expected checks that can run here, found {check.name!r}, which {why_not}"
            )
    if all(_why_not(request, check) for check in CHECKS):
        raise ConfigError("--skip: expected to leave a check that can run here, found none left")


def plan_checks(request: PreflightRequest, past: Mapping[str, CheckRecord]) -> PreflightPlan:
    """Which checks to run, and why not the others."""
    skipped: dict[str, str] = {}
    wanted: list[PreflightCheck] = []
    for check in CHECKS:
        why_not = _why_not(request, check)
        if why_not:
            skipped[check.name] = why_not
        else:
            wanted.append(request.efforts.planned(check))
    chosen = choose(wanted, past, request.within_s)
    skipped.update(chosen.skipped)
    return PreflightPlan(tuple(check.name for check in chosen.checks), skipped)


def planned_checks(request: PreflightRequest, plan: PreflightPlan) -> list[PreflightCheck]:
    """Those of the plan, with the time that they take."""
    return [request.efforts.planned(check) for check in CHECKS if check.name in plan.checks]


def _why_not(request: PreflightRequest, check: PreflightCheck) -> str:
    if check.name in request.skip or (request.only and check.name not in request.only):
        return "not asked for"
    if check.needs_fleet and request.nodes == 1:
        if check.name != catalogue.RING:
            return "needs several nodes (--nnodes)"
        if request.ranks == 1:
            return "needs several ranks (--nnodes, --nproc-per-node)"
    return ""
