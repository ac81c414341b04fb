"""Page model: everything the page shows of a job, as one plain document.

Comes in: the `JobView` that `keepstep status` shows, the run that `keepstep explain` shows, what is
known of the network. Goes out: objects within objects, so that `delta.py` finds what has changed.
Pure.

Invariant: nothing in it grows older by itself. What has an age stands there as the moment it is
counted from (`_ms` since 1970), so a job in which nothing happens makes no changes but for its
account; the page counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from keepstep.core.economics.goodput import Account
from keepstep.dashboard.account_table import PARTS, unknown_losses_words
from keepstep.dashboard.ages import clock
from keepstep.dashboard.collective_profiles import NetworkView, network_words
from keepstep.dashboard.moment import Moment
from keepstep.dashboard.nodes import NodesView
from keepstep.dashboard.run_page import shown
from keepstep.dashboard.sentences import (
    STATE_TONES,
    Said,
    held_words,
    holding,
    keeper_words,
    nodes_words,
    period_words,
    ranks_of,
)
from keepstep.dashboard.slots import SlotRow
from keepstep.dashboard.slowness import LOUD, SlowRow
from keepstep.dashboard.view import JobView, RankRow
from keepstep.model.rhythm import Interleaved
from keepstep.model.units import MS_NS, S_NS, counted, first_names, human_bytes, human_ns

# A living rank that says nothing for so long, and for as many of its steps, calls for a look;
# `keepstep timeouts` has the limits after which something is done.
SILENT_NS = 10 * S_NS
SILENT_STEPS = 3


@dataclass(frozen=True, slots=True)
class CopyTraffic:
    """What is known of copies on this node; None where nothing is."""

    view: NetworkView | None = None
    interleaved: Interleaved | None = None


def page_model(
    view: JobView,
    network: CopyTraffic,
    runs: Sequence[dict[str, Any]],
    run: dict[str, Any] | None,
    now: Moment,
    release: str = "",
) -> dict[str, Any]:
    """The document. `runs`: an outline of each run; `run`: the last one, as `run_page` has it.
    `release`: of keepstep."""
    return {
        "release": release,
        "job": shown(view.job),
        "state": view.state,
        "tone": STATE_TONES[view.state],
        "why": shown(view.why),
        "memory": _memory(view),
        "horizon": _horizon(view, now),
        "at_risk_steps": _at_risk(view),
        "period": _said(period_words(view.period_steps)),
        "protection": _numbered(_protection(view, now)),
        "nodes": _nodes(view.nodes, now),
        "ranks": {str(row.rank): rank for row, rank in _ranks(view, now)},
        "copies": _numbered(_copies(view, network)),
        "health": _numbered(_health(view, now)),
        "account": _account(view.account),
        "runs": _numbered(runs),
        "run": run,
    }


def _numbered(rows: Any) -> dict[str, Any]:
    return {str(index): row for index, row in enumerate(rows)}


def _said(said: Said | None) -> dict[str, str] | None:
    return None if said is None else {"text": shown(said.text), "tone": said.tone}


def _since(age_ns: int | None, now: Moment) -> int | None:
    """The moment an age is counted from."""
    return None if age_ns is None else (now.wall_ns - age_ns) // MS_NS


# -- what is protected


def _memory(view: JobView) -> dict[str, str] | None:
    if view.job_dir is None:
        return None
    keeper = keeper_words(view.keeper_alive)
    return {"text": shown(f"memory in {view.job_dir}; {keeper.text}"), "tone": keeper.tone}


def _horizon(view: JobView, now: Moment) -> dict[str, Any] | None:
    if view.horizon is None:
        return None
    return {"step": view.horizon.step, "since_ms": _since(view.horizon_age_ns, now)}


def _at_risk(view: JobView) -> int | None:
    """How many completed steps would be done again if a process were killed now; None where nobody
    can tell."""
    done = max((row.completed_step for row in view.ranks), default=None)
    if view.horizon is None or done is None:
        return None
    return max(0, done - view.horizon.step)


def _protection(view: JobView, now: Moment) -> Iterator[dict[str, Any]]:
    for row in view.protection:
        if not row.is_known:
            upto, tone = "unknown", "warn"
        elif row.step is None:
            upto, tone = "no", "bad"
        else:
            upto, tone = f"step {row.step}", "good"
        yield {
            "against": row.against,
            "upto": upto,
            "tone": tone,
            "since_ms": _since(row.age_ns, now),
            "why": shown(row.why),
        }


# -- nodes and ranks


def _nodes(nodes: NodesView | None, now: Moment) -> dict[str, Any] | None:
    if nodes is None:
        return None
    told = [
        [
            shown("".join(said.text for said in line)),
            next((said.tone for said in reversed(line) if said.tone), ""),
        ]
        for line in nodes_words(nodes)
    ]
    return {
        "words": told,
        "told_ms": _since(nodes.told_age_ns, now),
        "rows": {str(row["node"]): row for row in _node_rows(nodes)},
    }


def _node_rows(nodes: NodesView) -> Iterator[dict[str, Any]]:
    for row in nodes.nodes:
        fate, tone = _fate(nodes, row.node)
        yield {
            "node": row.node,
            "host": shown(row.host),
            "rack": None if row.rack is None else shown(row.rack),
            "ranks": ranks_of(row),
            "is_here": row.node == nodes.here,
            "link": "open" if row.linked else "not open",
            "fate": fate,
            "tone": tone if row.linked else "warn",
        }


def _fate(nodes: NodesView, node: int) -> tuple[str, str]:
    """What goes with a node, as the leading keeper said last."""
    if nodes.doubt or nodes.step is None:
        return "unknown", "warn"
    if node in nodes.out_of_reach:
        return "its snapshots are no longer in memory", "bad"
    owners = (nodes.critical or {}).get(node)
    if owners is not None:
        names = ", ".join(map(str, owners))
        return f"with it go the snapshots of node{'s' * (len(owners) > 1)} {names}", "bad"
    return ("may be lost", "good") if node in nodes.safe else ("unknown", "warn")


def _ranks(view: JobView, now: Moment) -> Iterator[tuple[RankRow, dict[str, Any]]]:
    slots: dict[int, list[SlotRow]] = {}
    for slot in view.slots:
        slots.setdefault(slot.rank, []).append(slot)
    horizon = None if view.horizon is None else view.horizon.step
    slow_ranks = {slow.rank for slow in view.slow}
    for row in view.ranks:
        held = slots.get(row.rank, [])
        slow = row.rank in slow_ranks
        yield (
            row,
            {
                "pid": row.pid or None,
                "alive": row.alive,
                "doing": f"{_doing(row)}, slow" if slow else _doing(row),
                "tone": _rank_tone(row, held, slow),
                "done": row.completed_step,
                "newest": row.newest_step,
                "since_ms": _since(row.newest_age_ns, now),
                "at_risk": None if horizon is None else max(0, row.completed_step - horizon),
                "holds": ", ".join(map(holding, held)),
                "loss": row.loss,
                "step_ms": row.step_ns_last / MS_NS,
                "stall_ms": row.stall_ns_total / MS_NS,
                "captured": row.captured_steps,
                "skipped": row.skipped_steps,
                "torn": row.torn_steps,
                "bytes": row.payload_bytes,
                "bytes_per_s": row.copy_bytes_per_s,
            },
        )


def _doing(row: RankRow) -> str:
    doing = f"{row.phase} of step {row.step}" if row.step >= 0 else row.phase
    return doing if row.alive else f"gone in {doing}"


def _rank_tone(row: RankRow, held: Sequence[SlotRow], slow: bool) -> str:
    if not row.alive and row.phase != "done":
        return "bad"
    is_odd = slow or any(slot.state == "damaged" for slot in held) or _is_silent(row)
    return "warn" if is_odd else "good" if row.alive else "quiet"


def _is_silent(row: RankRow) -> bool:
    if not row.alive or row.phase == "done":
        return False
    return (row.silent_ns or 0) > max(SILENT_NS, SILENT_STEPS * row.step_ns_last)


# -- copies, health, time


def _copies(view: JobView, network: CopyTraffic) -> Iterator[dict[str, str]]:
    """What other nodes keep and when it goes there."""
    nodes = view.nodes
    if nodes is not None and nodes.policy is not None:
        yield {"text": shown(f"Policy {nodes.policy}: {nodes.policy_why}."), "tone": ""}
    held = held_words(view.held)
    if held is not None:
        yield {"text": f"{held[:1].upper()}{held[1:]}.", "tone": ""}
    if network.view is not None and network.view.ranks:
        for words in network_words(network.view):
            yield {"text": shown(words), "tone": ""}
    done = network.interleaved
    if done is not None:
        yield {"text": _interleaved(done), "tone": "warn" if done.late_bytes else ""}


def _interleaved(done: Interleaved) -> str:
    return (
        f"Since the keeper began: {human_bytes(done.idle_bytes)} went while the network was idle, "
        f"{human_bytes(done.late_bytes)} after waiting for too long, "
        f"{human_bytes(done.free_bytes)} while nothing was held back. Of a step "
        f"{human_ns(done.idle_ns)} of idle time are counted on, and copies take "
        f"{human_ns(done.used_ns + done.overflow_ns)}."
    )


def _health(view: JobView, now: Moment) -> Iterator[dict[str, Any]]:
    """What calls for a look now, beside what the journal tells."""
    if view.job_dir is not None and view.keeper_alive is False:
        why = "Nobody scrubs, copies or commits until a rank or an agent starts another one."
        yield _finding("The keeper of this node is not alive.", "bad", why)
    gone = [row.rank for row in view.ranks if not row.alive and row.phase != "done"]
    if gone:
        yield _finding(f"Gone: {_names(gone)}.", "bad", "Its page tells what it did last.")
    silent = [row.rank for row in view.ranks if _is_silent(row)]
    if silent:
        why = f"Alive, and nothing told for {SILENT_NS // S_NS} s and {SILENT_STEPS} steps' time."
        yield _finding(f"Silent: {_names(silent)}.", "warn", why)
    for slow in view.slow:
        why = ". ".join(filter(None, (slow.why, slow.detail, slow.confirmed_why)))
        yield _finding(f"Rank {slow.rank} is slow{_in_section(slow)}.", "warn", f"{why}.")
    for row in view.doubts:
        tone, why = "warn" if row.doubt in LOUD else "quiet", row.why
        if row.doubt == "silence":
            why += "" if row.age_ns is None else f" since {clock(now.wall_ns - row.age_ns)}"
        yield _finding(f"Unknown: {row.of}.", tone, f"{why}.")
    for link in view.links.slow:
        nodes = f"node{'s' * (len(link.nodes) > 1)} {first_names([*map(str, link.nodes)])}"
        text = f"Copies are slow: {link.side}, {nodes} ({link.cause})."
        yield _finding(text, "warn", f"{link.why}.")
    for damage in view.links.damages:
        text = f"What comes from node {damage.node} is damaged: {damage.count} in a minute."
        yield _finding(text, "warn", f"{damage.why}.")
    for slot in (*view.slots, *view.held):
        if slot.state == "damaged":
            text = f"Slot {slot.slot} of rank {slot.rank} ({slot.kind}) is damaged."
            yield _finding(text, "bad", slot.why)
    yield from _captures(view)


def _in_section(slow: SlowRow) -> str:
    section = f" in {slow.section}" if slow.section else ""
    return f"{section} ({slow.cause})" if slow.cause else section


def _captures(view: JobView) -> Iterator[dict[str, Any]]:
    for name, why in (
        ("skipped", "No slot was free in time: `slots`, or copies that take too long."),
        ("torn", "The state changed while it was copied: `keepstep explain` names the tensors."),
    ):
        counts = {row.rank: getattr(row, f"{name}_steps") for row in view.ranks}
        total, captured = sum(counts.values()), sum(row.captured_steps for row in view.ranks)
        if total:
            worst = max(counts, key=lambda rank: counts[rank])
            share = total / max(1, total + captured)
            text = (
                f"{counted(total, 'capture')} {name}, {share:.1%} of all; most by rank {worst} "
                f"({counts[worst]})."
            )
            yield _finding(text, "warn" if share > 0.01 else "quiet", why)


def _finding(text: str, tone: str, why: str) -> dict[str, Any]:
    return {"text": shown(text), "tone": tone, "why": shown(why)}


def _names(ranks: Sequence[int]) -> str:
    shown_ranks = ", ".join(map(str, ranks[:10]))
    more = f" and {len(ranks) - 10} more" if len(ranks) > 10 else ""
    return f"rank{'s' * (len(ranks) > 1)} {shown_ranks}{more}"


def _account(spent: Account | None) -> dict[str, Any] | None:
    if spent is None or spent.goodput_ratio is None:
        return None
    return {
        "wall_ms": spent.wall_ns // MS_NS,
        "goodput": round(spent.goodput_ratio, 4),
        "parts": {name: ns // MS_NS for name, ns in spent.parts().items()},
        "what": PARTS,
        "doubt": unknown_losses_words(spent.unknown_losses),
    }


def account_page(spent: Account) -> dict[str, Any] | None:
    """The account of a run before the last one."""
    return _account(spent)
