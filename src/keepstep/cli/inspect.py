"""`keepstep inspect`: the slots in memory, or the checkpoints of a store, proven block by block.

As JSON for memory: {"jobs": [{"job", "slots": [slot, ...]}, ...], "damaged"}, a slot being a
`dashboard.view.SlotRow` field by field with "proof" and "tensors", the copies and parities that
this node holds for others behind its own; for a store: {"store", "checkpoints": [{"step", "url",
"proof", "why", "job", "world_size", "bytes", "files", "metrics", "wall_ns"}, ...], "damaged",
"other_runs": [where each run before the newest one lies, ...]}.

`proof` is intact, damaged (`why` names file, block, expected and found; with KEEPSTEP_SECRET what
is not signed with that secret is damaged, too), unproven (--no-verify, or
nothing to prove), busy (written while it was being read) or, in a store, unfinished (without a
manifest). `damaged` counts; the exit code is 1 when it is not 0.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from keepstep.cli.job_choice import JsonOption, job_option, no_memory, print_json, with_memory
from keepstep.cli.progress_bar import bytes_bar
from keepstep.config import resolve
from keepstep.dashboard import terminal
from keepstep.dashboard.ages import clock, human_age
from keepstep.dashboard.document import as_json
from keepstep.dashboard.finding import FoundJob
from keepstep.dashboard.moment import Moment
from keepstep.dashboard.screen import Screen
from keepstep.dashboard.sentences import holding
from keepstep.dashboard.slots import SlotRow, held_rows, slot_row, slot_rows
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot
from keepstep.edge.shm.whole import whole
from keepstep.edge.store.manifest import Manifest
from keepstep.edge.store.signer import Signer
from keepstep.edge.store.store import Store
from keepstep.errors import ConfigError, DamageError, StoreError
from keepstep.model.layout import Segment
from keepstep.model.units import human_bytes

# A rank that looks whether a slot may be overwritten holds its lock for microseconds.
LOCK_TRIES = 20
LOCK_EVERY_S = 0.005
PROOF_COLOURS = {
    "intact": "green",
    "damaged": "bold red",
    "busy": "yellow",
    "unfinished": "yellow",
    "unproven": "dim",
}


@dataclass(frozen=True, slots=True)
class Proof:
    """A slot, whether its bytes are as written, why not, and its tensors if they were asked
    for."""

    row: SlotRow
    proof: str
    why: str
    tensors: tuple[Segment, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointProof:
    """A checkpoint of a store, whether its bytes are as written, and why not. Times are nanoseconds
    since 1970."""

    step: int
    url: str
    proof: str
    why: str = ""
    job: str | None = None
    world_size: int | None = None
    bytes: int | None = None
    files: int | None = None
    metrics: dict[str, float] | None = None
    wall_ns: int | None = None


def inspect(
    job: Annotated[str | None, job_option("every job that has memory")] = None,
    store: Annotated[
        str | None,
        typer.Option(
            "--store", metavar="URL", help="Inspect the checkpoints there, instead of memory."
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Verify the checksum of every block.")
    ] = True,
    tensors: Annotated[
        bool,
        typer.Option("--tensors", help="List the tensors in each rank's newest snapshot."),
    ] = False,
    json: JsonOption = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also epochs, lives of ranks, and blocks.")
    ] = False,
) -> None:
    """Verify the snapshots in memory, or the checkpoints in a store.

    Exit code 1: some are damaged.
    """
    if store is not None and (job or tensors):
        raise ConfigError(
            "--store: expected to be alone, found --job or --tensors, which look into memory"
        )
    if store is not None:
        damaged = _inspect_store(store, verify, json)
    else:
        damaged = _inspect_memory(job, verify, tensors, json, verbose)
    if damaged:
        raise typer.Exit(1)


# -- memory


def _inspect_memory(
    name: str | None, verify: bool, tensors: bool, json: bool, is_whole: bool
) -> int:
    jobs = [(found, prove_slots(found, verify, tensors)) for found in with_memory(name)]
    damaged = sum(p.proof == "damaged" for _, proofs in jobs for p in proofs)
    if json:
        documents = [
            {"job": found.name, "slots": [_document(p) for p in proofs]} for found, proofs in jobs
        ]
        print_json({"jobs": documents, "damaged": damaged})
        return damaged
    console = Screen()
    if not jobs:
        console.print(no_memory(), highlight=False)
    for found, proofs in jobs:
        console.print(Text(found.name, style="bold"), _slot_table(proofs))
        if is_whole and proofs:
            console.print(_lives_table(proofs))
        for p in (p for p in proofs if p.proof == "damaged"):
            console.print(Text(p.why, style="red"), soft_wrap=True)
        if tensors:
            _print_tensors(console, proofs)
    return damaged


def prove_slots(job: FoundJob, verify: bool, tensors: bool) -> list[Proof]:
    """Every slot of the job on this node: its ranks' own, then those it holds for other nodes."""
    now = Moment.now()
    rows = (*slot_rows(job.job_dir, now), *held_rows(job.job_dir, now))
    proofs = []
    with bytes_bar() as bar:
        task = bar.add_task(f"verifying {job.name}", total=sum(r.payload_bytes for r in rows))
        for row in rows:
            proofs.append(prove(row, verify, tensors))
            bar.advance(task, row.payload_bytes)
    return proofs


def prove(row: SlotRow, verify: bool, tensors: bool) -> Proof:
    """Verify one slot.

    A slot of a rank here is locked meanwhile, so that the rank writes into another one or skips a
    step. What is held for other nodes may be overwritten; it is busy then. `tensors`: list those of
    own slots; a parity has none.
    """
    if row.state == "damaged":
        return Proof(row, "damaged", row.why)
    if row.state != "sealed" or not (verify or tensors):
        return Proof(row, "unproven", "" if row.state == "sealed" else "it holds no snapshot")
    try:
        slot = Slot(MEMORY, row.path)
        try:
            if not lock_slot(slot):
                return Proof(row, "busy", "it is being written")
            # it may have been written anew since it was listed
            row = slot_row(row.path, row.rank, Moment.now(), row.kind)
            if verify:
                with whole(MEMORY, slot) as found:
                    found.verify_bytes()
            segments = (
                slot.manifest(slot.header()).segments if tensors and row.kind == "own" else ()
            )
        finally:
            slot.close()
    except DamageError as error:
        return Proof(row, "damaged", str(error))
    except (LookupError, OSError) as error:
        return Proof(row, "busy", str(error))
    return Proof(row, "intact" if verify else "unproven", "", segments)


def lock_slot(slot: Slot) -> bool:
    """Keep its rank from writing into it; False while somebody does."""
    for _ in range(LOCK_TRIES):
        if slot.lock(exclusive=False):
            return True
        time.sleep(LOCK_EVERY_S)
    return False


def _document(proof: Proof) -> dict[str, Any]:
    tensors = [{**as_json(s.spec), "offset": s.offset} for s in proof.tensors]
    return {**as_json(replace(proof.row, why=proof.why)), "proof": proof.proof, "tensors": tensors}


def _slot_table(proofs: Sequence[Proof]) -> Table:
    """What is in each slot, and whether it is proven."""
    names = ("rank", "kind", "slot", "holds", "size", "age", "loss", "proof")
    made = terminal.table(*names, right=("rank", "slot", "size", "age", "loss"))
    for proof in proofs:
        row = proof.row
        made.add_row(
            str(row.rank),
            row.kind,
            str(row.slot),
            Text(holding(row), style=terminal.SLOT_COLOURS[row.state]),
            _size(row) if row.payload_bytes > 0 else "-",
            human_age(row.age_ns),
            _or_dash(row.loss),
            Text(proof.proof, style=PROOF_COLOURS[proof.proof]),
        )
    return made


def _lives_table(proofs: Sequence[Proof]) -> Table:
    """What tells the lives of a rank and of the training apart, and the blocks: a table of its own,
    since both do not fit beside each other on 80 columns."""
    names = ("rank", "kind", "slot", "epoch", "life", "blocks")
    made = terminal.table(*names, right=("rank", "slot", "epoch", "life", "blocks"))
    for row in (proof.row for proof in proofs):
        made.add_row(
            str(row.rank),
            row.kind,
            str(row.slot),
            _or_dash(row.epoch),
            _or_dash(row.incarnation),
            str(row.blocks) if row.payload_bytes > 0 else "-",
        )
    return made


def _size(row: SlotRow) -> str:
    whole = human_bytes(row.payload_bytes)
    is_shared = row.kept_bytes < row.payload_bytes
    return f"{whole}, {human_bytes(row.kept_bytes)} here" if is_shared else whole


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _print_tensors(console: Console, proofs: Sequence[Proof]) -> None:
    for rank, proof in _newest(proofs).items():
        title = f"rank {rank}, step {proof.row.step}, slot {proof.row.slot}"
        console.print(title, style="bold", highlight=False)
        console.print(_tensor_table(proof.tensors))


def _newest(proofs: Sequence[Proof]) -> dict[int, Proof]:
    """Of each rank the newest snapshot whose tensors are known."""
    newest: dict[int, Proof] = {}
    for proof in proofs:
        before = newest.get(proof.row.rank)
        if proof.tensors and (before is None or _stamp(proof) > _stamp(before)):
            newest[proof.row.rank] = proof
    return newest


def _stamp(proof: Proof) -> tuple[int, int]:
    return proof.row.epoch or 0, proof.row.step or 0


def _tensor_table(tensors: Sequence[Segment]) -> Table:
    made = terminal.table(
        "tensor", "type", "shape", "bytes", "offset", "part of", right=("bytes", "offset")
    )
    for tensor in tensors:
        spec = tensor.spec
        part = "-"
        if spec.shard:
            part = f"{list(spec.shard.global_shape)} at {list(spec.shard.offsets)}"
        made.add_row(
            Text(spec.name),
            spec.dtype,
            Text(str(list(spec.shape))),
            str(spec.nbytes),
            str(tensor.offset),
            Text(part),
        )
    return made


# -- store


def _inspect_store(url: str, verify: bool, json: bool) -> int:
    secret = resolve(None, os.environ, default_job="any").secret
    store = Store(url, signer=None if secret is None else Signer(secret))
    if store.is_nowhere():
        raise ConfigError(f"--store: expected a directory, found none at {store.root!r}")
    store.follow()
    others = [url + directory for directory in store.other_runs()]
    url += store.run_directory
    proofs = prove_checkpoints(store, verify)
    damaged = sum(p.proof == "damaged" for p in proofs)
    if json:
        document = {"store": url, "checkpoints": proofs, "damaged": damaged, "other_runs": others}
        print_json(document)
        return damaged
    console = Screen()
    console.print(
        Text(url, style="bold"),
        _checkpoint_table(proofs) if proofs else "There is no checkpoint.",
    )
    for p in (p for p in proofs if p.why):
        console.print(Text(p.why, style="red" if p.proof == "damaged" else ""), soft_wrap=True)
    if others:
        told = f"This is the newest run. The ones before lie in {', '.join(others)}."
        console.print(told, highlight=False, soft_wrap=True)
    return damaged


def prove_checkpoints(store: Store, verify: bool) -> list[CheckpointProof]:
    """Every checkpoint, the newest first. Raises StoreError when the store cannot be read."""
    listing = store.list_checkpoints()
    proofs = [_broken(store, step, why) for step, why in listing.broken.items()]
    with bytes_bar() as bar:
        task = bar.add_task("verifying", total=sum(m.total_bytes for m in listing.checkpoints))
        before = 0
        for manifest in listing.checkpoints:
            proof, why = "unproven", ""
            if verify:
                bar.update(task, description=f"verifying step {manifest.step}")
                proof, why = _verified(store, manifest.step, _reporter(bar, task, before))
            before += manifest.total_bytes
            proofs.append(_about(store, manifest, proof, why))
    return sorted(proofs, key=lambda p: -p.step)


def _reporter(bar: Progress, task: Any, before: int) -> Callable[[int, int], None]:
    return lambda done, _: bar.update(task, completed=before + done)


def _verified(store: Store, step: int, progress: Callable[[int, int], None]) -> tuple[str, str]:
    try:
        store.verify(step, progress)
    except DamageError as error:
        return "damaged", str(error)
    return "intact", ""


def _broken(store: Store, step: int, why: str) -> CheckpointProof:
    """With a manifest it is damaged. Without one it was never finished, or is being written or
    removed."""
    try:
        manifest = store.read_manifest(step)
    except DamageError:
        return CheckpointProof(step, store.url(step), "damaged", why)
    except StoreError:
        return CheckpointProof(step, store.url(step), "unfinished", why)
    return _about(store, manifest, "damaged", why)


def _about(store: Store, manifest: Manifest, proof: str, why: str) -> CheckpointProof:
    return CheckpointProof(
        step=manifest.step,
        url=store.url(manifest.step),
        proof=proof,
        why=why,
        job=manifest.job,
        world_size=manifest.world_size,
        bytes=manifest.total_bytes,
        files=len(manifest.files),
        metrics=dict(manifest.metrics),
        wall_ns=manifest.wall_ns,
    )


def _checkpoint_table(proofs: Sequence[CheckpointProof]) -> Table:
    names = ("step", "written", "job", "ranks", "size", "files", "metrics", "proof")
    made = terminal.table(*names, right=("step", "ranks", "size", "files"))
    for proof in proofs:
        metrics = ", ".join(f"{name} {value:.6g}" for name, value in (proof.metrics or {}).items())
        made.add_row(
            str(proof.step),
            clock(proof.wall_ns) if proof.wall_ns else "-",
            proof.job or "-",
            _or_dash(proof.world_size),
            human_bytes(proof.bytes) if proof.bytes is not None else "-",
            _or_dash(proof.files),
            metrics or "-",
            Text(proof.proof, style=PROOF_COLOURS[proof.proof]),
        )
    return made
