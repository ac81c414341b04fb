"""Events: what happened and why, one line of the journal each; and which kinds of event there are.

Comes in: a fact or decision, or a line of a journal. Goes out: that line, or the fact.

Invariant: every kind that anybody records, or looks for in a journal, is in `KINDS`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from keepstep.model.decoding import a_record, an_object, from_json

# How loud an event is in the log, as `logging` counts.
DEBUG, INFO, WARNING, ERROR = 10, 20, 30, 40

# What each kind of event means, by who records it.
KINDS = {
    # the agent: its job
    "job-started": "an agent begins its part of the job",
    "agent-restarted": "an agent was killed and this one has taken over",
    "left-ranks-ended": "processes that an earlier run had left at work were ended",
    "stopping": "the ranks are told to end",
    "job-ended": "the agent has ended, with this exit code",
    "rank-exited": "a rank's process has ended",
    "late-death": "a rank was killed by a signal after its training had ended",
    "suspicion": "a rank seems to make no progress",
    "suspicion-over": "the suspected rank makes progress again",
    "diagnosis": "what is wrong, with which rank, and how that is known",
    "recurrence": "the same failure again: what that says of the program or the hardware",
    "slow-rank": "a rank needs more for its steps than its peers, in which section, and what for",
    "slow-over": "a slow rank is as fast as before, or is no longer judged",
    "slow-confirmed": "fixed work where a slow rank runs: is its processor slow, or its program",
    "slow-unknown": "why nobody can tell whether a rank is slow: still learnt, noise, no peers",
    "slow-known": "what kept anybody from telling that is over",
    "link-damages": "what comes from a node is again and again not as it was sent",
    "slow-link": "copies go more slowly than before: from, to or between which nodes, and why",
    "slow-link-over": "copies go as fast as before there, or it is another that is slow",
    "link-unknown": "why nobody can tell whether a link is slow: noise, silence, too little known",
    "link-known": "what kept anybody from telling that is over",
    "part-sick": "a part of the machine is sick, and what is done about it",
    "part-unknown": "nobody can tell how a part of the machine is",
    "part-well": "a part of the machine that was sick or unknown is well",
    "probes-lost": "the process that probes the machine's parts has ended or is silent",
    "stacks": "the stacks of the ranks' threads are saved, or could not be",
    "plan": "why a way back begins, in which the ranks that live stay in their process",
    "anew": "why a way back begins, in which all ranks start anew",
    "refused": "a cheaper way to recover is not taken",
    "ranks-restarted": "the ranks of this node run again",
    "rank-respawned": "the process that stood by has become a rank",
    "recovered": "all ranks of this node train on after one was lost",
    "standby-ready": "a process stands by to become a rank",
    # the agent: its keeper
    "keeper-listens": "the keeper can be reached by keepers of other nodes",
    "keeper-unheard": "the new keeper cannot listen where the one before it did",
    "keeper-missing": "no keeper can be started or reached",
    "keeper-replaced": "a keeper with other settings was found, and ended",
    "keeper-restarted": "the keeper has died and another one has taken its place",
    "dashboard-served": "where the page that shows the job is",
    "dashboard-missing": "an agent that follows another one cannot serve the page where it was",
    "keeper-busy": "the keeper has not ended in time and cleans up by itself",
    # the agent: the other nodes
    "nodes-awaited": "an attempt waits for more nodes",
    "attempt-formed": "all nodes of an attempt are here",
    "attempt-closed": "an attempt begins with fewer nodes",
    "attempt-wanted": "an attempt is ended so that another one begins",
    "job-stopped": "the other nodes are told that the job has to stop",
    "job-done": "the other nodes are told that the job has ended well",
    "meeting-away": "the KV where agents meet does not answer, or answers again",
    "memory-removed": "somebody has removed the job's directory while it trains",
    "meeting-lost": "the KV where agents meet is lost",
    "meeting-found": "agents that had lost it have a KV to meet in again",
    "coordinator": "who ends the attempts that nobody in them can end",
    "coordinator-left": "this agent no longer takes part in coordinating",
    "order-refused": "an order of a coordinator came too late",
    "replacement-wanted": "the platform is asked for a node in the place of a lost one",
    "replacement-asked": "what the platform answered",
    # a rank
    "waiting": "a rank waits for the others to ask where to resume",
    "restore-remark": "something to know about what was loaded",
    "loaded": "a rank has loaded and proven what was offered",
    "restored": "a rank trains on from that state",
    "slots-made": "a rank has the memory for its snapshots",
    "copies-needed": "a holder has no memory, and ranks with one slot capture nothing until it has",
    "slot-added": "captures found no slot free, and a rank has one more",
    "slot-refused": "one more slot cannot be made",
    "shared": "replicas of one node keep one snapshot between them",
    "not-shared": "replicas keep a snapshot each, or have differed at a step",
    "slot-unlocked": "CUDA does not page-lock a slot: copies from the device take longer",
    "caveat": "what the program does that keepstep cannot protect",
    "protected": "a training is protected: what of it, and how to start it over",
    "goes-on": "where a training begins, or goes on",
    "not-stored": "a checkpoint that a rank had asked for is not in the store",
    "next-step": "a rank has done its first step since it was restored",
    "skipped": "a step was not captured because no slot was free",
    "torn": "a capture was dropped: the state changed while it was copied",
    "capture-failed": "a snapshot was lost",
    "replicas-agree": "what must be equal on several ranks is, and is compared from now on",
    "replicas-differ": "what must be equal on several ranks is not: silent corruption",
    "gradient-differs": "a rank's local gradient is not what another rank finds: silent corruption",
    "not-repeatable": "what is computed again comes to other bits here, and what follows from it",
    "repeats": "whether a step that is run again comes to the same bits here",
    "slot-voided": "a slot holds nothing any more",
    "lost-notice": "a rank hears that another one is lost",
    "device-release": "whether a rank's device is free of what waited for a lost peer",
    "regrouped": "a rank is among its peers again, in the same process",
    "keeper-stuck": "a keeper that did not answer was ended",
    "keeper-lost": "a rank's connection to its keeper has ended",
    "wrong-numbers": "a step's numbers are wrong, and what was seen of that",
    "run-again": "a step whose numbers are wrong is taken back and run again",
    "numbers-judged": "what is at fault for a step's wrong numbers, and how that is known",
    "held-back": "a snapshot with infinities, until it is known whether they are meant",
    "meant": "infinities in the state that do no harm are taken for the program's own",
    "batch-skipped": "the batches of a step are left out of the training",
    "soft-error": "a device has computed wrong for a while",
    "device-ageing": "a device computes wrong more often than chance allows",
    "preempted": "SIGTERM came, and is answered with a checkpoint",
    "persist-awaited": "somebody waits for a checkpoint, and it takes long",
    "summary": "what capturing has cost a rank",
    "rebalanced": "the micro-batches of a step are shared by how fast ranks are",
    "left-out": "a step's mean gradient is not that of all ranks: some came too late",
    # the keeper
    "keeper-started": "a keeper has the node's memory",
    "keeper-ended": "the job's memory is removed",
    "nothing-left": "all steps that the program asks for were done in an earlier life",
    "memory-kept": "the memory is kept although the job has failed",
    "job-over": "all ranks have ended, well or not",
    "rank-joined": "a rank asks where to resume",
    "rank-attached": "a rank that trains has found its new keeper",
    "rank-bye": "a rank has said how it ends",
    "rank-left": "a rank's process is gone",
    "connection-refused": "a process cannot connect: no descriptor is left, say",
    "stranger-refused": "another user's process, or a word without the job's secret, was refused",
    "no-secret": "who reaches the meeting point of the nodes can stop or join the job",
    "option-unheard": "code sets an option that only the agents of `keepstep run` read",
    "blocks-unsigned": "what crosses between nodes is under checksums alone, which do not tell an "
    "attacker's change",
    "message-refused": "an invalid message came in",
    "not-understood": "the other side could not read a message of ours",
    "condemned": "nobody resumes from that state any more: it is wrong, or may be",
    "restore-offered": "the leading keeper offers a state to all ranks",
    "restore-failed": "a rank could not load what was offered",
    "restore-refused": "nothing can be offered",
    "resumed": "all ranks have proven what was offered, and may train",
    "permitted-again": "ranks that had not heard of `resumed` hear it from another keeper",
    "offer": "a keeper hears of `restore-offered`",
    "go": "a keeper hears of `resumed`",
    "damaged": "a snapshot at rest is not what it was",
    "mended": "a damaged snapshot is whole again",
    "not-mended": "a damaged snapshot cannot be had from other nodes' memory",
    "store-unreachable": "the store does not answer, and nobody starts before it does",
    "checkpoint-damaged": "a checkpoint in the store cannot be read",
    "persist-late": "checkpoints take longer than what lies between them",
    "no-loss": "a rule asks for a loss that nobody reports",
    "no-metrics": "metrics are asked for where nobody serves them",
    "last-step-waits": "the last step waits for a free slot",
    "run-begun": "a fresh start leaves the checkpoints of the run before behind",
    "persist-started": "a checkpoint is being written",
    "persisted": "a checkpoint is written",
    "persist-failed": "a checkpoint could not be written",
    "persist-again": "a checkpoint is asked for again, since those who were to write it have died",
    "persister-ended": "the process that writes checkpoints is gone",
    "persister-stuck": "the process that writes checkpoints stands still: the store hangs",
    "persist-impossible": "a checkpoint was asked for, and there is no store",
    # the keeper: other nodes
    "mesh": "the keepers of an attempt know each other",
    "mesh-refused": "a keeper was told of the others and does not listen",
    "node-lost": "the keeper of another node does not answer",
    "policy": "what other nodes keep, as the leading keeper has decided",
    "redundancy": "what other nodes keep, as a keeper hears it",
    "interleave": "when copies go",
    "declined": "this node has no memory for what another one sends",
    "copy-refused": "what another node sent did not prove",
    "copy-failed": "a snapshot could not be sent",
    "copy-lost": "another node holds a snapshot no more",
    "fetched": "a snapshot came back from other nodes",
    "fetch-failed": "a snapshot could not be had from other nodes",
}


@dataclass(frozen=True, slots=True)
class Event:
    """One fact or decision.

    `wall_ns` places it among other machines' events, `mono_ns` measures (CLOCK_MONOTONIC, of one
    machine from one `boot` to the next; empty: not told). `who` is `rank 3`, `keeper`, `persister`,
    `agent` or `drill`; `kind` is a word of `KINDS`, which tools may match; `why` is the sentence
    people read; `data` holds its numbers.
    """

    wall_ns: int
    mono_ns: int
    who: str
    kind: str
    why: str
    data: dict[str, Any] = field(default_factory=dict)
    boot: str = ""

    def to_line(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"), default=str) + "\n"


def event_from_line(line: str) -> Event:
    """The inverse of `to_line`. Raises ValueError on a torn or foreign line."""
    try:
        plain = an_object(from_json(line))
        data = an_object(plain.pop("data", {}))
        return replace(a_record(Event, plain), data=data)
    except ValueError as error:
        raise ValueError(f"not an event: {line[:80]!r}") from error
