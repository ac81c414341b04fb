"""Remedy: what is done about a rank that is slow, cheapest first, and at what price.

Comes in: who is slow and by how much, what one micro-batch takes each rank where they share them,
and what has been lost until now. Goes out: one rung of

    observe     nothing changes; all wait for the slow one
    rebalance   the ranks share micro-batches by speed, by themselves, where the program lets them
    leave out   nobody waits for the slow one's gradient, where the program takes partial sums
    swap        its node leaves its place to a spare, where that is wished for

and sentences: one line with what it costs, and why each dearer one is not taken. What a pipeline's
stage has to do no other rank can: it is observed, until its node is swapped. A node is swapped when
what has been lost is what a swap costs: whoever does so never pays more than twice what the best
choice would have been (ski rental; Karlin et al., Algorithmica 1988; FALCON, ATC 2025, escalates
so).

Invariant: nothing that costs a restart before it has been lost already, nor where it is known not
to help: a program that has more to do has as much on another node. At most one rung at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from keepstep.core.balance.shares import LEAST_SHARE, best_shares, equal_shares, step_ns
from keepstep.core.detection.reference import Confirmed
from keepstep.core.detection.slow_words import ACTIONS, in_a_line
from keepstep.core.economics.swap_price import ASSUMED, SwapPrice
from keepstep.model.step_work import Slow
from keepstep.model.units import human_ns

Rung = Literal["observe", "rebalance", "leave-out", "swap"]
MOST_SHARED = 1 << 16  # micro-batches of a step; more are a page that somebody has damaged


@dataclass(frozen=True, slots=True)
class SlowFacts:
    """costs_ns: of one micro-batch, by rank of this node; empty: the program shares none. total: of
    a step, on this node. ranks: on this node. lost_ns: since it has become slow, of what is left
    after rebalancing. why_no_swap: empty: it may be swapped. computes_ratio: of the slow rank's
    steps, those in which it has computed; less than 1 where others do not wait for it. confirmed:
    what fixed work has said of its processor. swap: what one costs; all ranks end, meet, and
    restore from memory, and what was computed is not lost."""

    slow: Slow
    ranks: int
    costs_ns: Mapping[int, int]
    total: int
    lost_ns: int
    why_no_swap: str
    computes_ratio: float = 1.0
    confirmed: Confirmed = ""
    swap: SwapPrice = ASSUMED


@dataclass(frozen=True, slots=True)
class Remedy:
    """left_ns: what a step still takes longer than with all as fast as the others. line: who is
    slow, and this, for a journal's reader."""

    rung: Rung
    left_ns: int
    why: str
    line: str


def remedy(facts: SlowFacts) -> Remedy:
    """The rung for now."""
    slow = facts.slow
    least = LEAST_SHARE * len(facts.costs_ns)
    can_share = slow.rank in facts.costs_ns and least <= facts.total <= MOST_SHARED
    can_share = can_share and not slow.is_stage
    rung: Rung = "observe"
    done = ""
    if facts.computes_ratio < 1:
        rung, left_ns = "leave-out", _left_out_ns(slow)
        words = _left_out(facts, left_ns)
        done = f"left out, costs {human_ns(left_ns)}"
    elif can_share:
        rung, left_ns = "rebalance", _left_ns(facts)
        words = _shared(facts, left_ns)
        done = f"shared by speed, costs {human_ns(left_ns)}"
    else:
        left_ns, words = slow.excess_ns, _not_shared(facts)
    if not _why_no_swap(facts) and left_ns > 0 and facts.lost_ns >= facts.swap.ns:
        why = (
            f"rank {slow.rank} has cost {human_ns(facts.lost_ns)} since step {slow.since_step} and "
            f"costs {human_ns(left_ns)} more with each step; its node leaves its place to a spare, "
            f"which costs about {human_ns(facts.swap.ns)} once ({facts.swap.source})"
        )
        return Remedy("swap", left_ns, why, in_a_line(slow, "its node leaves to a spare"))
    return Remedy(rung, left_ns, f"{words}; {_swap(facts)}", in_a_line(slow, done))


def _left_ns(facts: SlowFacts) -> int:
    costs = [facts.costs_ns[rank] for rank in sorted(facts.costs_ns)]
    others = [cost for rank, cost in facts.costs_ns.items() if rank != facts.slow.rank]
    usual = sorted(others)[(len(others) - 1) // 2] if others else costs[0]
    after_ns = step_ns(best_shares(facts.total, costs), costs)
    even = equal_shares(facts.total, len(costs))
    return max(0, after_ns - step_ns(even, [min(cost, usual) for cost in costs]))


def _shared(facts: SlowFacts, left_ns: int) -> str:
    costs = [facts.costs_ns[rank] for rank in sorted(facts.costs_ns)]
    shares = best_shares(facts.total, costs)
    share = shares[sorted(facts.costs_ns).index(facts.slow.rank)]
    return (
        f"the ranks share micro-batches by speed: with {share} of {facts.total} for it a step "
        f"takes {human_ns(left_ns)} longer instead of {human_ns(facts.slow.excess_ns)}, and "
        "gradients of what moves are sent"
    )


def _not_shared(facts: SlowFacts) -> str:
    slow = facts.slow
    cheapest = f"nothing is changed; cheapest by hand: {ACTIONS[slow.cause]}"
    if slow.is_stage:
        return f"nothing is changed; {_of_a_stage(slow)}"
    if facts.ranks < 2 or not slow.has_peers:
        return cheapest
    left = facts.ranks / (facts.ranks - 1 + 1 / (1 + slow.excess_ratio)) - 1
    left_out = max(0.0, (slow.excess_ratio - 1) / 2)
    return (
        f"{cheapest}; a program that takes its work from job.micro_batches would lose "
        f"{100 * left:.0f} % of a step instead of {100 * slow.excess_ratio:.0f} %, with the same "
        f"numbers; with job.partial_sum {100 * left_out:.0f} %, and up to half of this rank's "
        "gradients would be dropped or added a step late; job.local_steps saves nothing where the "
        "same rank is slow in each step"
    )


def _of_a_stage(slow: Slow) -> str:
    by_hand = ACTIONS[slow.cause]
    if slow.cause == "compute":
        by_hand = f"give its stage fewer layers and its neighbours' more, or {by_hand}"
    return (
        "it passes tensors to other ranks, as a pipeline's stage, so no rank can take "
        f"micro-batches from it, nor can its gradient be left out; cheapest by hand: {by_hand}"
    )


def _left_out_ns(slow: Slow) -> int:
    """Who is late sits out the next step, so the others wait for it once in two steps."""
    usual_ns = slow.excess_ns / slow.excess_ratio if slow.excess_ratio > 0 else 0
    return max(0, int((slow.excess_ns - usual_ns) / 2))


def _left_out(facts: SlowFacts, left_ns: int) -> str:
    return (
        f"nobody waits for its gradient (job.partial_sum): it has computed in "
        f"{100 * facts.computes_ratio:.0f} % of its steps, and a step takes {human_ns(left_ns)} "
        f"longer instead of {human_ns(facts.slow.excess_ns)}; what it computed too late is dropped "
        "or added late, as the program has it"
    )


def _why_no_swap(facts: SlowFacts) -> str:
    """Empty: its node may be swapped."""
    if facts.why_no_swap:
        return facts.why_no_swap
    if facts.confirmed == "program":
        return "fixed work says that the program has more to do there, as it would on a spare"
    if facts.confirmed == "asked":
        return "fixed work has not said yet whether the processor is slow or the program"
    return ""


def _swap(facts: SlowFacts) -> str:
    if why := _why_no_swap(facts):
        return f"no swap for a spare: {why}"
    return (
        f"no swap for a spare before {human_ns(facts.swap.ns)} are lost, which is what one costs "
        f"({facts.swap.source}; {human_ns(facts.lost_ns)} lost until now)"
    )
