"""`keepstep inspect`: the slots in memory, or the checkpoints of a store, proven block by block.

As JSON for memory: {"jobs": [{"job", "slots": [slot, ...]}, ...], "damaged"}, a slot being a
`dashboard.view.SlotRow` field by field with "proof" and "tensors", the copies and parities that
this node holds for others behind its own; for a store: {"store", "checkpoints": [{"step", "url",
"proof", "why", "job", "world_size", "bytes", "files", "metrics", "wall_ns"}, ...], "damaged"}.

`proof` is intact, damaged (`why` names file, block, expected and found), unproven (--no-verify, or
nothing to prove), busy (written while it was being read) or, in a store, unfinished (without a
manifest). `damaged` counts; the exit code is 1 when it is not 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.text import Text

from keepstep.cli.job_choice import JobOption, JsonOption, places, print_json, with_memory
from keepstep.dashboard import terminal
from keepstep.dashboard.finding import FoundJob
from keepstep.dashboard.view import Now, SlotRow, as_json, held_rows, slot_row, slot_rows
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot
from keepstep.edge.store.manifest import Manifest
from keepstep.edge.store.store import Store
from keepstep.errors import ConfigError, DamageError, StoreError
from keepstep.model.layout import Segment
from keepstep.model.units import human_bytes

# a session that looks whether a slot is pinned holds its lock for microseconds
LOCK_TRIES, LOCK_EVERY_S = 20, 0.005
PROOF_COLOURS = {
    "intact": "green",
    "damaged": "bold red",
    "busy": "yellow",
    "unfinished": "yellow",
    "unproven": "dim",
}


@dataclass(frozen=True, slots=True)
class Proof:
    """A slot, whether its bytes are as written, and its tensors when they were asked for."""

    row: SlotRow
    proof: str
    why: str
    tensors: tuple[Segment, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointProof:
    """A checkpoint of a store, and whether its bytes are as written."""

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
    job: JobOption = None,
    store: Annotated[
        str | None,
        typer.Option(
            "--store", metavar="URL", help="Look at the checkpoints there instead of at memory."
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Prove every block by its checksum.")
    ] = True,
    tensors: Annotated[
        bool,
        typer.Option("--tensors", help="Which tensor lies where, from each rank's newest slot."),
    ] = False,
    json: JsonOption = False,
) -> None:
    """The slots, or checkpoints, and their checksums; exit code 1 on damage."""
    if store is not None and (job or tensors):
        raise ConfigError(
            "--store: expected to be alone, found --job or --tensors, which look into memory"
        )
    damaged = (
        _inspect_store(store, verify, json)
        if store is not None
        else _inspect_memory(job, verify, tensors, json)
    )
    if damaged:
        raise typer.Exit(1)


def progress_bar() -> Progress:
    """On standard error and only for people, so that standard output holds nothing but the
    answer."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


# -- memory


def _inspect_memory(name: str | None, verify: bool, tensors: bool, json: bool) -> int:
    jobs = [(found, prove_slots(found, verify, tensors)) for found in with_memory(name)]
    damaged = sum(p.proof == "damaged" for _, proofs in jobs for p in proofs)
    if json:
        documents = [
            {"job": found.name, "slots": [_document(p) for p in proofs]} for found, proofs in jobs
        ]
        print_json({"jobs": documents, "damaged": damaged})
        return damaged
    console = Console()
    if not jobs:
        console.print(f"No job holds memory in {places().arena_dir}.", highlight=False)
    for found, proofs in jobs:
        console.print(Text(found.name, style="bold"), _slot_table(proofs))
        for p in (p for p in proofs if p.proof == "damaged"):
            console.print(Text(p.why, style="red"), soft_wrap=True)
        if tensors:
            _print_tensors(console, proofs)
    return damaged


def prove_slots(job: FoundJob, verify: bool, tensors: bool) -> list[Proof]:
    """Every slot of the job on this node: its ranks' own, then what it holds for other nodes."""
    now = Now.read()
    rows = (*slot_rows(job.job_dir, now), *held_rows(job.job_dir, now))
    proofs = []
    with progress_bar() as bar:
        task = bar.add_task(f"proving {job.name}", total=sum(r.payload_bytes for r in rows))
        for row in rows:
            proofs.append(prove(row, verify, tensors))
            bar.advance(task, row.payload_bytes)
    return proofs


def prove(row: SlotRow, verify: bool, tensors: bool) -> Proof:
    """Prove one slot. One of a rank here is pinned meanwhile, so that it writes into another one or
    skips a step; what is held for others may be overwritten, and is busy then. `tensors`: of own
    slots; a parity has none."""
    if row.state == "damaged":
        return Proof(row, "damaged", row.why)
    if row.state != "sealed" or not (verify or tensors):
        return Proof(row, "unproven", "" if row.state == "sealed" else "nothing is sealed in it")
    try:
        slot = Slot(MEMORY, row.path)
        try:
            if not _pin(slot):
                return Proof(row, "busy", "it is being written")
            # it may have been written anew since it was listed
            row = slot_row(row.path, row.rank, Now.read(), row.kind)
            if verify:
                slot.verify_bytes()
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


def _pin(slot: Slot) -> bool:
    for _ in range(LOCK_TRIES):
        if slot.lock(exclusive=False):
            return True
        time.sleep(LOCK_EVERY_S)
    return False


def _document(proof: Proof) -> dict[str, Any]:
    tensors = [{**as_json(s.spec), "offset": s.offset} for s in proof.tensors]
    return {**as_json(replace(proof.row, why=proof.why)), "proof": proof.proof, "tensors": tensors}


def _slot_table(proofs: Sequence[Proof]) -> Any:
    names = (
        "rank",
        "kind",
        "slot",
        "holds",
        "epoch",
        "life",
        "size",
        "blocks",
        "age",
        "loss",
        "proof",
    )
    made = terminal.table(
        *names, right=("rank", "slot", "epoch", "life", "size", "blocks", "age", "loss")
    )
    for p in proofs:
        row = p.row
        place = (
            str(row.rank),
            row.kind,
            str(row.slot),
            Text(terminal.holding(row), style=terminal.SLOT_COLOURS[row.state]),
        )
        size = (
            (human_bytes(row.payload_bytes), str(row.blocks)) if row.payload_bytes else ("-", "-")
        )
        facts = (
            _or_dash(row.epoch),
            _or_dash(row.incarnation),
            *size,
            terminal.human_age(row.age_ns),
            _or_dash(row.loss),
        )
        made.add_row(*place, *facts, Text(p.proof, style=PROOF_COLOURS[p.proof]))
    return made


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _print_tensors(console: Console, proofs: Sequence[Proof]) -> None:
    newest: dict[int, Proof] = {}
    for p in proofs:
        stamp = (p.row.epoch or 0, p.row.step or 0)
        if p.tensors and (
            p.row.rank not in newest
            or stamp > (newest[p.row.rank].row.epoch or 0, newest[p.row.rank].row.step or 0)
        ):
            newest[p.row.rank] = p
    for rank, proof in newest.items():
        console.print(
            f"rank {rank}, step {proof.row.step}, slot {proof.row.slot}",
            style="bold",
            highlight=False,
        )
        made = terminal.table(
            "tensor", "type", "shape", "bytes", "offset", "part of", right=("bytes", "offset")
        )
        for s in proof.tensors:
            part = (
                f"{list(s.spec.shard.global_shape)} at {list(s.spec.shard.offsets)}"
                if s.spec.shard
                else "-"
            )
            made.add_row(
                Text(s.spec.name),
                s.spec.dtype,
                Text(str(list(s.spec.shape))),
                str(s.spec.nbytes),
                str(s.offset),
                Text(part),
            )
        console.print(made)


# -- store


def _inspect_store(url: str, verify: bool, json: bool) -> int:
    proofs = prove_checkpoints(Store(url), verify)
    damaged = sum(p.proof == "damaged" for p in proofs)
    if json:
        print_json({"store": url, "checkpoints": proofs, "damaged": damaged})
        return damaged
    console = Console()
    console.print(
        Text(url, style="bold"), _checkpoint_table(proofs) if proofs else "No checkpoint is there."
    )
    for p in (p for p in proofs if p.why):
        console.print(Text(p.why, style="red" if p.proof == "damaged" else ""), soft_wrap=True)
    return damaged


def prove_checkpoints(store: Store, verify: bool) -> list[CheckpointProof]:
    """Every checkpoint, the newest first. Raises StoreError when the store cannot be read."""
    listing = store.list_checkpoints()
    proofs = [_broken(store, step, why) for step, why in listing.broken.items()]
    with progress_bar() as bar:
        task = bar.add_task("proving", total=sum(m.total_bytes for m in listing.checkpoints))
        before = 0
        for manifest in listing.checkpoints:
            proof, why = "unproven", ""
            if verify:
                bar.update(task, description=f"proving step {manifest.step}")
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
    """What has a manifest is damaged; what has none was never finished, is being written, or being
    removed."""
    try:
        manifest = store.read_manifest(step)
    except DamageError:
        return CheckpointProof(step, store.url(step), "damaged", why)
    except StoreError:
        return CheckpointProof(step, store.url(step), "unfinished", why)
    return _about(store, manifest, "damaged", why)


def _about(store: Store, manifest: Manifest, proof: str, why: str) -> CheckpointProof:
    size = (manifest.total_bytes, len(manifest.files))
    url, metrics = store.url(manifest.step), dict(manifest.metrics)
    return CheckpointProof(
        manifest.step,
        url,
        proof,
        why,
        manifest.job,
        manifest.world_size,
        *size,
        metrics,
        manifest.wall_ns,
    )


def _checkpoint_table(proofs: Sequence[CheckpointProof]) -> Any:
    made = terminal.table(
        "step",
        "written",
        "job",
        "ranks",
        "size",
        "files",
        "metrics",
        "proof",
        right=("step", "ranks", "size", "files"),
    )
    for p in proofs:
        written = terminal.clock(p.wall_ns) if p.wall_ns else "-"
        metrics = ", ".join(f"{k} {v:.6g}" for k, v in (p.metrics or {}).items()) or "-"
        size = (human_bytes(p.bytes) if p.bytes is not None else "-", _or_dash(p.files))
        proof = Text(p.proof, style=PROOF_COLOURS[p.proof])
        made.add_row(
            str(p.step), written, p.job or "-", _or_dash(p.world_size), *size, metrics, proof
        )
    return made
