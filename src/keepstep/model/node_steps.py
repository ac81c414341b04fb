"""Node steps: what the agents of several nodes tell each other of their ranks' steps, as texts that
stand where they meet.

    a node      the last few blocks of its ranks            `NodeSteps`
    the leader  who is slow among all of them, and which    `SlowWord`
                nodes' words it lacks

Values, and the one place where they become text and are read again: field by field, within bounds,
ValueError for anything else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from keepstep.model.decoding import (
    a_count,
    a_list,
    a_number,
    a_record,
    a_whole_number,
    an_object,
    counts,
    from_json,
)
from keepstep.model.step_work import MOST_GROUPS, GroupEntries, Section, Slow, Timing, WorkBlock

MOST_BLOCKS = 4  # a node's newest
MOST_RANKS = 64  # of a node
MOST_LETTERS = 256 * 1024
MOST_NAMED = 256  # the slowest
MOST_NODES = 4096
SECTIONS = len(Section)
_SINGLE = (
    "wait_ns",
    "collectives",
    "tokens",
    "throttled_ns",
    "memory_stall_ns",
    "micro_batches",
)
_PLAIN = 4 * SECTIONS + len(_SINGLE)
GROUP = len(GroupEntries._fields)


@dataclass(frozen=True, slots=True)
class NodeSteps:
    """Of one node. post: a number that rises, so that no text is written twice. epoch: of the life
    whose steps these are. timing: what they say of what is computed. blocks: by the
    last step of each, by rank."""

    post: int
    epoch: int
    timing: Timing
    blocks: Mapping[int, Mapping[int, WorkBlock]]


@dataclass(frozen=True, slots=True)
class NamedSlow:
    """A slow rank, and what its remedy is decided by: usual_cost_ns: of one micro-batch, the median
    of the others; micro_batches: of a step, all ranks'; 0: they share none."""

    slow: Slow
    usual_cost_ns: int = 0
    micro_batches: int = 0


@dataclass(frozen=True, slots=True)
class SlowWord:
    """Of the leader. block_steps: in how many steps all are to cut their blocks, each ending at a
    multiple. judged_step: the last one judged, -1: none yet. ranks: how many were compared in it.
    silent: nodes whose blocks are not there. noises: by rank of which nothing can be concluded, how
    much its steps vary."""

    post: int
    epoch: int
    block_steps: int
    judged_step: int = -1
    ranks: int = 0
    silent: tuple[int, ...] = ()
    noises: Mapping[int, float] | None = None
    slow: tuple[NamedSlow, ...] = ()


def node_steps_to_text(steps: NodeSteps) -> str:
    newest = sorted(steps.blocks)[-MOST_BLOCKS:]
    return _text(
        {
            "post": steps.post,
            "epoch": steps.epoch,
            "timing": int(steps.timing),
            "blocks": [
                [end, [[rank, *_numbers(b)] for rank, b in sorted(steps.blocks[end].items())]]
                for end in newest
            ],
        }
    )


def node_steps_from_text(text: str) -> NodeSteps:
    """The inverse. Raises ValueError on anything else."""
    plain = _plain(text, {"post", "epoch", "timing", "blocks"})
    blocks: dict[int, dict[int, WorkBlock]] = {}
    for entry in _at_most(MOST_BLOCKS, a_list(plain["blocks"])):
        end, ranks = a_list(entry)
        blocks[a_count(end)] = dict(_rank_block(one) for one in _at_most(MOST_RANKS, a_list(ranks)))
    timing = Timing(a_count(plain["timing"]))  # ValueError for another number
    return NodeSteps(a_count(plain["post"]), a_whole_number(plain["epoch"]), timing, blocks)


def slow_word_to_text(word: SlowWord) -> str:
    named = sorted(word.slow, key=lambda one: -one.slow.excess_ratio)[:MOST_NAMED]
    noises = sorted((word.noises or {}).items(), key=lambda one: -one[1])[:MOST_NAMED]
    return _text(
        {
            "post": word.post,
            "epoch": word.epoch,
            "steps": word.block_steps,
            "judged": word.judged_step,
            "ranks": word.ranks,
            "silent": list(word.silent[:MOST_NODES]),
            "noises": [[rank, noise] for rank, noise in noises],
            "slow": [_slow_to_json(one) for one in named],
        }
    )


def slow_word_from_text(text: str) -> SlowWord:
    """The inverse, but for sentences, which whoever tells them makes anew. Raises ValueError on
    anything else."""
    names = {"post", "epoch", "steps", "judged", "ranks", "silent", "noises", "slow"}
    plain = _plain(text, names)
    noises = {}
    for entry in _at_most(MOST_NAMED, a_list(plain["noises"])):
        rank, noise = a_list(entry)
        noises[a_count(rank)] = _ratio(noise)
    return SlowWord(
        post=a_count(plain["post"]),
        epoch=a_whole_number(plain["epoch"]),
        block_steps=a_count(plain["steps"], least=1),
        judged_step=a_count(plain["judged"], least=-1),
        ranks=a_count(plain["ranks"]),
        silent=counts(_at_most(MOST_NODES, a_list(plain["silent"]))),
        noises=noises,
        slow=tuple(map(_slow_from_json, _at_most(MOST_NAMED, a_list(plain["slow"])))),
    )


def _text(plain: Mapping[str, Any]) -> str:
    return json.dumps(plain, separators=(",", ":"))


def _plain(text: str, names: set[str]) -> dict[str, Any]:
    if len(text) > MOST_LETTERS:
        raise ValueError(f"expected at most {MOST_LETTERS} letters, found {len(text)}")
    plain = an_object(from_json(text))
    if plain.keys() != names:
        raise ValueError(f"expected {sorted(names)}, found {sorted(map(str, plain))!r:.80}")
    return plain


def _at_most(most: int, entries: list[Any]) -> list[Any]:
    if len(entries) > most:
        raise ValueError(f"expected at most {most} entries, found {len(entries)}")
    return entries


def _numbers(block: WorkBlock) -> list[int]:
    """None below 0: a clock that went back took no time. At the end, of each process group its
    number, collectives and messages."""
    by_section = (*block.own_ns, *block.cpu_ns, *block.delay_ns, *block.device_ns)
    single = (getattr(block, name) for name in _SINGLE)
    entered = (number for entries in block.groups for number in entries)
    return [max(0, number) for number in (block.steps, *by_section, *single, *entered)]


def _rank_block(entry: Any) -> tuple[int, WorkBlock]:
    rank, steps, *numbers = counts(entry)
    plain, entered = numbers[:_PLAIN], numbers[_PLAIN:]
    groups = tuple(
        GroupEntries(*entered[n : n + GROUP])
        for n in range(0, len(entered) // GROUP * GROUP, GROUP)
    )
    is_whole = len(plain) == _PLAIN and len(entered) == GROUP * len(groups)
    if not steps or not is_whole or len(groups) > MOST_GROUPS:
        raise ValueError(f"expected a rank's block of steps, found {entry!r:.80}")
    by_section = [tuple(plain[n * SECTIONS : (n + 1) * SECTIONS]) for n in range(4)]
    own, cpu, delay, device = by_section
    single = dict(zip(_SINGLE, plain[4 * SECTIONS :], strict=True))
    return rank, WorkBlock(
        steps, own_ns=own, cpu_ns=cpu, delay_ns=delay, device_ns=device, groups=groups, **single
    )


def _slow_to_json(named: NamedSlow) -> list[Any]:
    slow = asdict(replace(named.slow, why=""))
    return [slow, named.usual_cost_ns, named.micro_batches]


def _slow_from_json(entry: Any) -> NamedSlow:
    plain, usual_cost_ns, micro_batches = a_list(entry)
    slow = a_record(Slow, plain)
    if slow.why:
        raise ValueError("expected numbers, found a sentence")
    times = slow.own_ns, slow.peers_ns, slow.excess_ns, slow.lost_ns
    for number in (slow.rank, slow.since_step, *times):
        a_count(number)
    _ratio(slow.excess_ratio)
    return NamedSlow(slow, a_count(usual_cost_ns), a_count(micro_batches))


def _ratio(plain: Any) -> float:
    if isinstance(plain, int):  # one that is no float at all, too
        plain = a_count(plain)
    number = a_number(plain)
    if not 0 <= number <= 1e9:
        raise ValueError(f"expected a share, found {plain!r:.40}")
    return number
