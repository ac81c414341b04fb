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
    "stopping": "the ranks are told to end",
    "job-ended": "the agent has ended, with this exit code",
    "rank-exited": "a rank's process has ended",
    "late-death": "a rank was killed by a signal after its training had ended",
    "suspicion": "a rank seems to make no progress",
    "suspicion-over": "the suspected rank makes progress again",
    "diagnosis": "what is wrong, with which rank, and how that is known",
    "recurrence": "the same failure again: what that says of the program or the hardware",
    "stacks": "the stacks of the ranks' threads are saved, or could not be",
    "plan": "the ranks that live stay in their process",
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
    "slot-added": "captures found no slot free, and a rank has one more",
    "slot-refused": "one more slot cannot be made",
    "slot-unlocked": "CUDA does not page-lock a slot: copies from the device take longer",
    "caveat": "what the program does that keepstep cannot protect",
    "protected": "a training is protected: what of it, and how to start it over",
    "goes-on": "where a training begins, or goes on",
    "not-stored": "a checkpoint that a rank had asked for is not in the store",
    "next-step": "a rank has done its first step since it was restored",
    "skipped": "a step was not captured because no slot was free",
    "torn": "a capture was dropped: the state changed while it was copied",
    "capture-failed": "a snapshot was lost",
    "slot-voided": "a slot holds nothing any more",
    "lost-notice": "a rank hears that another one is lost",
    "regrouped": "a rank is among its peers again, in the same process",
    "keeper-stuck": "a keeper that did not answer was ended",
    "keeper-lost": "a rank's connection to its keeper has ended",
    "preempted": "SIGTERM came, and is answered with a checkpoint",
    "summary": "what capturing has cost a rank",
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
    "message-refused": "an invalid message came in",
    "not-understood": "the other side could not read a message of ours",
    "condemned": "a state after which the program failed twice is not offered again",
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
