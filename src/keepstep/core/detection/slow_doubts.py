"""Slow doubts: why nobody can tell of some rank whether it is slow.

Comes in: what is judged of a node's ranks, and how much their steps vary. Goes out: one sentence
for each reason. That nobody is called slow says something only where none of these holds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from keepstep.core.detection.drift import LEARNT_BLOCKS, MOST_NOISE
from keepstep.model.units import S_NS, first_names

# DEVICE: what ranks compute there takes no time of theirs. ALONE: a rank has no peers on its node.
# NOISE: steps vary too much. RECORDS: a rank that trains shows nothing of its steps. NODES: ranks
# are not compared with those of other nodes. BLIND: what judges them does not see a slow rank that
# is planted (slow_canary.py). LEARNING: nobody knows yet what steps usually take.
Doubt = Literal["device", "alone", "noise", "records", "nodes", "blind", "learning"]

# A rank that trains has shown a step by then, unless its page cannot be read or is not there.
UNRECORDED_NS = 30 * S_NS


def standing_doubts(
    ranks: Collection[int], computes_here: bool, has_peers: bool
) -> dict[Doubt, str]:
    """What holds as long as these ranks train. computes_here: their threads' time is the time that
    they compute; on a device it is not. has_peers: the job has more than one rank, else whom one
    holds up is no question."""
    found: dict[Doubt, str] = {}
    alone = f"rank {min(ranks)} is alone on its node" if len(ranks) == 1 else ""
    if not computes_here:
        both = f", and {alone}, so that neither is" if alone else ""
        found["device"] = (
            "whether a rank computes slowly cannot be told: on a device only data loading is "
            "judged (of four ranks or more, passes without a collective, too) where groups are not "
            f"keepstep's, or not all ranks measure their device{both}"
        )
    elif alone and has_peers:
        found["alone"] = (
            f"whether the rank computes or loads slowly cannot be told: {alone}, with no peer to "
            "compare it with; only what the kernel counts (quota, memory, neighbours) is judged"
        )
    return found


def of_learning(block_steps: int) -> str:
    """Until then nobody is called slow, whatever its steps take. block_steps: of the shortest
    blocks that there are."""
    return (
        "whether a rank of this node is slow cannot be told yet: what its steps usually take is "
        f"still learnt, from {LEARNT_BLOCKS} blocks of {block_steps} steps or more"
    )


def of_noise(noises: Mapping[int, float], tells_tokens: bool) -> str:
    """noises: of the ranks of which nothing can be concluded, how much their steps vary against
    their peers'. tells_tokens: what varies with the batch is taken out already."""
    rank = min(noises)
    what_to_do = (
        "see what else uses its processors, or whether its work varies by more than its tokens"
        if tells_tokens
        else "job.report(tokens=...) takes out what varies with the batch"
    )
    return (
        f"whether rank {rank} is slow cannot be told: against its peers its steps vary by "
        f"{100 * noises[rank]:.0f} %, and nothing is concluded from more than "
        f"{100 * MOST_NOISE:.0f} %; {what_to_do}"
    )


def of_records(missing: Collection[int], silent_ns: int) -> str:
    """missing: ranks that train, and whose steps nobody has seen for so long."""
    ranks = first_names([str(rank) for rank in sorted(missing)])
    return (
        f"whether a rank of this node is slow cannot be told: steps are completed, and for "
        f"{silent_ns // S_NS} s nothing was seen of what rank{'s' * (len(missing) > 1)} {ranks} "
        "did in them; a `caveat` in the journal says why a rank measures nothing"
    )


def of_silent_nodes(silent: Collection[int], waited_ns: int) -> str:
    """silent: nodes of which the leader hears nothing, while it hears others."""
    nodes = first_names([str(node) for node in sorted(silent)])
    return (
        f"whether ranks of node{'s' * (len(silent) > 1)} {nodes} are slow among all nodes' cannot "
        f"be told: for {waited_ns // S_NS} s nothing was heard of their steps, while others' come"
    )


def of_no_word(waited_ns: int) -> str:
    """This node's ranks are compared with each other alone."""
    return (
        "whether this node's ranks are slow beside those of other nodes cannot be told: for "
        f"{waited_ns // S_NS} s node 0 has not said that it compares them"
    )
