"""Store: checkpoints as directories on any fsspec filesystem, each described by a manifest written
last.

    <store>/step-000000001000-000002-17/__0_17.distcp ...  the state, in PyTorch's Distributed
                                                           Checkpoint format
    <store>/step-000000001000-000002-17/.metadata          what lies where, in the same format
    <store>/step-000000001000-000002-17/keepstep.json      the manifest: a checksum of every 4 MiB
                                                           block above, and of itself

    <store>/step-000000001000-000002-17/doubted.json       there when it counts no more: its numbers
                                                           may be wrong

The directory is an attempt's own: of step 1000, computed in epoch 2, the attempt 17. Of two of one
step the higher one counts, and of those that a job has gone back behind none
(`model/timeline.py`). Without epoch and attempt it is of an earlier version.

A fresh start writes into a directory of its own beside them: `runs.py`.

Comes in: bytes under file names, and what is said about them. Goes out: checkpoints that exist, and
bytes that were verified before they were handed out. Never knows what the bytes mean, never touches
the directory of a newer attempt.

Several processes, on several machines, may write files of one checkpoint; one of them leads: it
begins, and it publishes.

Where the job has a secret, all that it says in the store is signed, and what it takes must be so
(`signer.py`): an unsigned checkpoint is a damaged one.

Invariant: a checkpoint exists exactly when its manifest does. The manifest appears whole, in place
of nothing, after everything it names is on stable storage, and is the first to go. Nothing is
removed of an attempt that could still be published (`tombstone.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from copy import copy
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from keepstep.edge.store.checked_file import (
    BLOCK_BYTES,
    FilePlace,
    VerifiedFile,
    check_is_a_directory,
    check_is_not_behind_a_link,
    check_size,
    clear_on_disk,
    is_closed,
    is_there,
    put_whole,
    read_whole,
    rename_new,
    store_errors,
)
from keepstep.edge.store.contents import Contents, Listing
from keepstep.edge.store.draft import MANIFEST, Draft
from keepstep.edge.store.manifest import Manifest, manifest_from_bytes
from keepstep.edge.store.owner import OWNER, OwnerRecord, StoreUser, owner_record, read_owner
from keepstep.edge.store.removal_records import forget_removals, newest_removal, put_removal
from keepstep.edge.store.runs import begin_run, newest_run, run_path, runs_in, sign_run
from keepstep.edge.store.signer import Signer
from keepstep.edge.store.tombstone import (
    MOST_BYTES,
    is_tombstone,
    remove_unpublished,
    tombstone,
)
from keepstep.errors import ConfigError, DamageError, StoreError
from keepstep.model.checkpoint import CheckpointName, StoreListing, Unfinished, checkpoint_named
from keepstep.model.removal import RemovalRecord
from keepstep.model.snapshot import Stamp
from keepstep.model.timeline import history, left_at, timelines_of

Which = int | CheckpointName  # a step: of its checkpoints the one that counts
Progress = Callable[[int, int], None]  # bytes done, bytes in all

MOST_UNPROVEN_EPOCH = 10**9
DOUBTED = "doubted.json"


class Store:
    """A directory of checkpoints, read by any number of processes."""

    def __init__(
        self,
        url: str | os.PathLike[str],
        fs: AbstractFileSystem | None = None,
        block_bytes: int = BLOCK_BYTES,
        user: StoreUser | None = None,
        signer: Signer | None = None,
        **storage_options: Any,
    ) -> None:
        """fs: where the URL's path lies; the URL's own filesystem unless given. block_bytes: of a
        file written here, how many share a checksum. user: the job that it is for; None: a
        person only looks. signer: signs what is written, and must have signed what is read; None:
        nobody asks for a signature. storage_options: of the URL's filesystem.

        Raises StoreError when no filesystem answers to the URL. Touches nothing yet.
        """
        if fs is None:
            try:
                fs, root = url_to_fs(os.fspath(url), **storage_options)
            except (ValueError, ImportError, OSError) as error:
                raise StoreError(
                    f"store {url}: expected a directory or an fsspec URL, found {error}"
                ) from error
        else:
            root = str(fs._strip_protocol(os.fspath(url)))
        self._fs = fs
        self._base = self._root = root.rstrip("/")
        self._local = isinstance(self._fs, LocalFileSystem)
        self.disk = self._root if self._local else ""  # whose room a full store tells
        self._user = user
        self.signer = signer
        self.block_bytes = block_bytes

    def is_nowhere(self) -> bool:
        """Whether it is a directory of this machine, and there is none. What is not of this machine
        has directories only where something lies in them."""
        return self._local and not os.path.isdir(self._base)

    def claim(self) -> None:
        """Before the job writes its first checkpoint: the store is its own. Raises IdentityError,
        StoreError."""
        if self._user is None:
            return
        user, record = self._user, read_owner(self._fs, self._base, self.signer)
        others = set[str]()
        if user.adopts:
            others = self._jobs() - {user.job}
            if self.signer is not None:
                sign_run(self._fs, self._base, self.signer)
        if record.job == user.job and others <= record.adopted:
            return
        self._check_user(record)
        path = f"{self._base}/{OWNER}"
        raw = owner_record(user.job, others | record.adopted, self.signer)
        with store_errors(f"claiming {self._base}", self.disk):
            self._fs.makedirs(self._base, exist_ok=True)
            with suppress(FileExistsError):  # somebody has just claimed it, perhaps another node
                put_whole(self._fs, path, raw, replaces=record.is_there)
        self._check_user(read_owner(self._fs, self._base))

    def _check_user(self, record: OwnerRecord) -> None:
        if self._user is not None and record.job != self._user.job:
            self._user.check(self._base, self._jobs() if record.job is None else [record.job])

    def _jobs_that_count(self) -> Set[str] | None:
        """Whose checkpoints this user may take; None: all. Raises IdentityError, StoreError."""
        if self._user is None:
            return None
        record = read_owner(self._fs, self._base, self.signer)
        self._check_user(record)
        return None if self._user.adopts else {self._user.job, *record.adopted}

    def _jobs(self) -> set[str]:
        """Whose checkpoints are there, of any run; who they say, since that keeps others out.
        Raises StoreError when there are some, and of none it can be told. What is closed to this
        user alone keeps it from nothing: whoever writes here says first whose the store is."""
        jobs: set[str] = set()
        unread: list[str] = []
        for number in runs_in(self._fs, self._base):
            run = self._unsigned()
            run._root = run_path(self._base, number)
            found = run._read_all()
            jobs |= {manifest.job for manifest in found.intact}
            unread += [found.broken[name] for name in sorted(found.unreadable - found.closed)]
        if unread and not jobs:
            raise StoreError(f"store {self._base} does not say whose it is: {unread[-1]}")
        return jobs

    def follow(self) -> Store:
        """What follows is about the newest run in the store (`runs.py`), until this is said again.
        Without it, about the first. Returns itself. Raises StoreError, and DamageError when
        somebody else has begun that run."""
        signer = None if self._adopts else self.signer
        self._root = run_path(self._base, newest_run(self._fs, self._base, signer))
        return self

    def as_taken(self) -> Store:
        """The newest run, as its user goes on from it: who adopts takes what nobody signed. Raises
        StoreError, DamageError."""
        self.follow()
        return self._unsigned() if self._adopts else self

    @property
    def _adopts(self) -> bool:
        return self._user is not None and self._user.adopts

    def _unsigned(self) -> Store:
        """The same, for who asks for no signature."""
        store = copy(self)
        store.signer = None
        return store

    @property
    def root(self) -> str:
        """The directory of the run that it is about."""
        root: str = self._root
        return root

    @property
    def run_directory(self) -> str:
        """Of the run that it is about, below the store; empty for the first, which has none."""
        directory: str = self._root[len(self._base) :]
        return directory

    def other_runs(self) -> list[str]:
        """The directories, below the store, of the runs that it is not about. Raises StoreError."""
        paths = (run_path(self._base, number) for number in runs_in(self._fs, self._base))
        return [path[len(self._base) :] for path in paths if path != self._root]

    def begin_run(self) -> str | None:
        """Begin another run, unless the newest one has nothing yet, and follow it: where that is.
        Raises StoreError, IdentityError, DamageError."""
        self.claim()
        number = newest_run(self._fs, self._base, self.signer)
        self._root = run_path(self._base, number)
        if not self._names():
            return None
        begun = self._root = begin_run(self._fs, self._base, number + 1, self.signer)
        with store_errors(f"beginning {begun}", self.disk):
            for path in (begun, self._base):
                self.sync_directory(path)
        return begun

    def url(self, which: Which) -> str:
        """The checkpoint's directory, as `torch.distributed.checkpoint` takes it for
        `checkpoint_id`."""
        path = self.path(self.named(which))
        return path if self._local else str(self._fs.unstrip_protocol(path))

    def place(self, which: Which, file: str) -> FilePlace:
        name = self.named(which)
        return FilePlace(self._fs, self.path(name, file), f"{self.url(name)}/{file}", self.disk)

    def named(self, which: Which) -> CheckpointName:
        """Of a step: the highest that is published, else the highest that was begun, else what an
        earlier version would have written. Raises StoreError."""
        if isinstance(which, CheckpointName):
            return which
        begun = sorted((name for name in self._names() if name.step == which), reverse=True)
        published = (name for name in begun if len(begun) == 1 or self._is_published(name))
        return next(published, begun[0] if begun else CheckpointName(which))

    # -- reading

    def published(self) -> tuple[Manifest, ...]:
        """All checkpoints that exist, newest first, those among them that count no more. What is
        removed is decided over these: unsigned ones are never among them. Raises StoreError."""
        return tuple(self._read_all().intact)

    def list_checkpoints(self, jobs: Set[str] | None = None) -> Listing:
        """Reads every manifest, no data. `jobs`: whose checkpoints count; None: all do. Raises
        StoreError when the store cannot be read."""
        found = self._read_all(jobs)
        timelines = timelines_of(found.intact)
        counts = history(found.intact, found.doubted)[0]
        counting = {manifest.step: manifest for manifest in counts}
        broken: dict[int, CheckpointName] = {}
        # what was never published says nothing of a step that was
        for name in sorted(found.broken, key=lambda name: (name not in found.unfinished, name)):
            there = counting.get(name.step)
            if left_at(name, timelines) is not None or (there and name in found.unfinished):
                continue
            if there is None or there.name < name:
                counting.pop(name.step, None)
                broken[name.step] = name
        # What proves nothing may be anybody's, and pushes no epoch out of what names can hold.
        unproven = (name.epoch for name in found.broken if name.epoch <= MOST_UNPROVEN_EPOCH)
        epochs = [*unproven, *(each.epoch for each in found.intact)]
        removal = self.removal_record()
        if removal is not None and removal.epoch <= MOST_UNPROVEN_EPOCH:
            epochs.append(removal.epoch)  # else whoever leads next could remove nothing
        return Listing(
            checkpoints=tuple(sorted(counting.values(), key=lambda m: m.step, reverse=True)),
            broken={step: found.broken[broken[step]] for step in sorted(broken, reverse=True)},
            unreadable=frozenset(s for s, name in broken.items() if name in found.unreadable),
            damaged=frozenset(s for s, name in broken.items() if name in found.damaged),
            epoch=max([*epochs, *(line.epoch for line in timelines)], default=0),
        )

    def _read_all(self, jobs: Set[str] | None = None) -> Contents:
        found = Contents()
        for name in sorted(self._names(), reverse=True):
            try:
                raw = self.read_small(name, MANIFEST)
                sizes = self._sizes(name)
            except (DamageError, StoreError) as error:
                found.broken[name] = str(error)
                (found.damaged if isinstance(error, DamageError) else found.unreadable).add(name)
                if is_closed(error):
                    found.closed.add(name)
                continue
            if raw is not None and is_tombstone(raw, name, self.signer):
                continue
            try:
                manifest = self._manifest(name, raw)
                if jobs is not None and manifest.job not in jobs:
                    found.broken[name] = f"{self.url(name)} is of job {manifest.job!r}"
                    found.unfinished.add(name)
                    continue
                self._check_sizes(manifest, sizes)
                found.intact.append(manifest)
                if DOUBTED in sizes:
                    found.broken[name] = f"{self.url(name)}: its numbers were found to be in doubt"
                    found.doubted.add(name)
                    found.damaged.add(name)
            except (DamageError, StoreError) as error:
                found.broken[name] = str(error)
                (found.unfinished if raw is None else found.damaged).add(name)
        return found

    def look(self) -> StoreListing:
        """See `ports.Checkpoints`."""
        jobs = self._jobs_that_count()  # of another job's store that is what is to be heard first
        listing = self.as_taken().list_checkpoints(jobs)
        known = listing.unreadable | listing.damaged
        return StoreListing(
            usable=[manifest.step for manifest in listing.checkpoints],
            damaged={step: listing.broken[step] for step in listing.damaged},
            unfinished={step: why for step, why in listing.broken.items() if step not in known},
            unreachable={step: listing.broken[step] for step in listing.unreadable},
            epoch=listing.epoch,
            epochs={manifest.step: manifest.name.epoch for manifest in listing.checkpoints},
        )

    def read_manifest(self, which: Which) -> Manifest:
        """Raises StoreError when there is none, DamageError when it is not as written, or of a job
        whose checkpoints this user may not take."""
        name = self.named(which)
        manifest = self._manifest(name, self.read_small(name, MANIFEST))
        jobs = self._jobs_that_count()
        if jobs is not None and manifest.job not in jobs:
            raise DamageError(
                f"{self.url(name)}: expected a checkpoint of job {' or '.join(sorted(jobs))}, "
                f"found one of {manifest.job!r}"
            )
        return manifest

    def _manifest(self, name: CheckpointName, raw: bytes | None) -> Manifest:
        """What these bytes of a manifest's file say."""
        where = f"{self.url(name)}/{MANIFEST}"
        if raw is None or is_tombstone(raw, name, self.signer):
            raise StoreError(
                f"{self.url(name)}: expected a manifest, found none: never finished, or "
                "being removed"
            )
        manifest = manifest_from_bytes(raw, where, self.signer)
        if manifest.name != name:
            raise DamageError(
                f"{where}: expected the manifest of {name.directory}, found that of "
                f"{manifest.name.directory}"
            )
        return manifest

    def read_small(self, which: Which, file: str) -> bytes | None:
        """A file's bytes as they are, for who can tell whether they are right; None when it is not
        there. Raises StoreError, and DamageError when what is there is no file, or lies in no
        directory."""
        name = self.named(which)
        where = f"{self.url(name)}/{file}"
        with self._in_a_directory(name), store_errors(f"reading {where}"):
            return read_whole(self._fs, self.path(name, file), where)

    def verify(self, which: Which, progress: Progress | None = None) -> Manifest:
        """Read every byte back. Raises DamageError naming the file, the block, expected and
        found."""
        manifest = self.read_manifest(which)
        done = 0
        for name in manifest.files:
            for block in self.open(manifest, name).blocks():
                done += len(block)
                if progress is not None:
                    progress(done, manifest.total_bytes)
        return manifest

    def intact(self, which: Which) -> Manifest | None:
        """The manifest of a checkpoint whose every byte is as written, else None. Raises StoreError
        when it cannot be read."""
        name = self.named(which)
        try:
            raw = self.read_small(name, MANIFEST)
            if raw is None or is_tombstone(raw, name, self.signer):
                return None
            return self.verify(name)
        except DamageError:
            return None

    def intact_of(self, stamp: Stamp, job: str) -> Manifest | None:
        """The manifest of that job's checkpoint of just this state, whichever of its leaders wrote
        it; None when none is seen whose every byte is as written. Raises StoreError."""
        for name in sorted(self._names(), reverse=True):
            if (name.step, name.epoch) != stamp:
                continue
            with suppress(StoreError):  # one that cannot be looked at says nothing of the others
                found = self.intact(name)
                if found is not None and found.job == job:
                    return found
        return None

    def open(self, manifest: Manifest, name: str) -> VerifiedFile:
        """One file of a checkpoint. Raises DamageError when it is missing or has another size."""
        place = self.place(manifest.name, name)
        if name not in manifest.files:
            raise DamageError(
                f"{place.where}: expected one of the manifest's files "
                f"({', '.join(manifest.files)}), found another"
            )
        return VerifiedFile(place, manifest.files[name], self.signer)

    def exists(self, which: Which) -> bool:
        name = self.named(which)
        with store_errors(f"looking for {self.url(name)}/{MANIFEST}"):
            return self._is_there(self.path(name, MANIFEST))

    def check_sizes(self, manifest: Manifest) -> None:
        """Raises DamageError when a file of the manifest is missing or has another size."""
        self._check_sizes(manifest, self._sizes(manifest.name))

    def _sizes(self, name: CheckpointName) -> dict[str, int | None]:
        """By name, what is in a checkpoint's directory; nothing when it is not there."""
        with store_errors(f"listing {self.url(name)}"):
            try:
                entries = self._fs.ls(self.path(name), detail=True)
            except FileNotFoundError:
                return {}
        return {entry["name"].rsplit("/", 1)[-1]: entry["size"] for entry in entries}

    def _check_sizes(self, manifest: Manifest, found: Mapping[str, int | None]) -> None:
        for file, sums in manifest.files.items():
            check_size(f"{self.url(manifest.name)}/{file}", sums.bytes, found.get(file))

    # -- writing

    def draft(self, name: CheckpointName, progress: Callable[[int], None] | None = None) -> Draft:
        """Begin a checkpoint, or write files of one that another process begins and publishes.
        Raises StoreError when it exists."""
        assert 0 <= name.step < 10**12, f"step {name.step} does not fit into 12 digits"
        if self.exists(name):
            raise StoreError(f"{self.url(name)}: expected no checkpoint, found one")
        with store_errors(f"creating {self.url(name)}", self.disk):
            self._fs.makedirs(self.path(name), exist_ok=True)
        return Draft(self, name, progress)

    def doubt(self, first: int, before_epoch: int) -> list[str]:
        """See `ports.Checkpoints`. The mark needs no signature: who can put it there could as well
        remove the checkpoint. What was taken over from another job is not marked: it was
        computed elsewhere, and may be gone on from there."""
        jobs = self._jobs_that_count()
        store = self.as_taken()
        found = store._read_all(jobs)
        job = None if self._user is None else self._user.job
        names = [
            manifest.name
            for manifest in found.intact
            if manifest.step >= first
            and manifest.name.epoch < before_epoch
            and job in (None, manifest.job)
        ]
        marked = []
        for name in sorted(set(names) - found.doubted):
            raw = json.dumps({"doubted_from": first, "by_epoch": before_epoch}).encode()
            with store_errors(f"marking {store.url(name)}", store.disk):
                put_whole(store._fs, store.path(name, DOUBTED), raw, replaces=True)
                store.sync_directory(store.path(name))
            marked.append(name.directory)
        return marked

    def remove(self, which: Which) -> None:
        """Remove a checkpoint, manifest first: from then on it does not exist, however far the rest
        comes. Nothing there is fine. Of what was not published see `remove_unpublished`."""
        name = self.named(which)
        with store_errors(f"removing {self.url(name)}"):
            if self._is_there(self.path(name, MANIFEST)):
                self._fs.rm_file(self.path(name, MANIFEST))
                self.sync_directory(self.path(name))
            if self._is_there(self.path(name)):
                self._fs.rm(self.path(name), recursive=True)

    def clear(self, name: CheckpointName, keep: Callable[[str], bool]) -> None:
        """Remove the files of a checkpoint that does not exist, but for those to keep."""
        with store_errors(f"clearing {self.url(name)}"):
            self._fs.invalidate_cache()
            with suppress(FileNotFoundError):  # nothing there, or another process clears as well
                if self._local:
                    clear_on_disk(self.path(name), keep)
                    return
                for entry in self._fs.ls(self.path(name), detail=True):
                    if entry["type"] == "file" and not keep(entry["name"].rsplit("/", 1)[-1]):
                        self._fs.rm_file(entry["name"])

    def incomplete(self, before: CheckpointName) -> Unfinished:
        """What was not published, of which files are left, and was begun before that one. Raises
        StoreError when the store cannot be listed."""
        found, unseen = list[CheckpointName](), list[str]()
        for name in sorted(name for name in self._names() if name.is_older(before)):
            try:
                if self._is_published(name):
                    continue
                if self._local or self._sizes(name).keys() - {MANIFEST}:
                    found.append(name)  # where a tombstone has to stay it is all that is left
            except StoreError as error:  # it may be published; and concerns no other
                unseen.append(str(error))
        return Unfinished(found, unseen)

    def _is_published(self, name: CheckpointName) -> bool:
        with suppress(DamageError):  # else what stands there is no file, so no tombstone
            with self._in_a_directory(name):
                size = self.place(name, MANIFEST).size()
            if size is None or size > MOST_BYTES:
                return size is not None
            raw = self.read_small(name, MANIFEST)
            return raw is not None and not is_tombstone(raw, name, self.signer)
        return True

    @contextmanager
    def _in_a_directory(self, name: CheckpointName) -> Iterator[None]:
        """Raises DamageError where a look fails because what stands in the checkpoint's place is no
        directory: no later look finds one that was written there."""
        try:
            yield
        except StoreError:
            check_is_a_directory(self._fs, self.path(name))
            raise

    def remove_unpublished(self, name: CheckpointName) -> None:
        """Remove the files of an attempt that was not published, and now never is. What was
        published stays; nothing there is fine. Raises StoreError."""
        with store_errors(f"removing {self.url(name)}", self.disk):
            remove_unpublished(self._fs, self.path(name), tombstone(name, self.signer))

    def is_newest_run(self) -> bool:
        """Whether nobody has begun another one since `follow`. Raises StoreError."""
        return bool(self._root == run_path(self._base, newest_run(self._fs, self._base)))

    def removal_record(self) -> RemovalRecord | None:
        """Who may remove in this run (`removal_records.py`). Raises StoreError."""
        return newest_removal(self._fs, self._root, self.signer)

    def put_removal_record(self, record: RemovalRecord) -> bool:
        """False where somebody else has put that one. Raises StoreError."""
        is_put = put_removal(self._fs, self._root, record, self.signer)
        if is_put and not record.is_held:
            forget_removals(self._fs, self._root, record.number)
        return is_put

    def path(self, name: CheckpointName, file: str = "") -> str:
        """On the filesystem, of the checkpoint's directory or of a file in it."""
        return f"{self._root}/{name.directory}" + (f"/{file}" if file else "")

    def _names(self) -> list[CheckpointName]:
        """Of all that was begun. Raises StoreError, ConfigError."""
        with store_errors(f"listing {self._root}"):
            self._fs.invalidate_cache()  # another process writes what this one lists
            try:
                paths = self._fs.ls(self._root or "/", detail=False)
            except FileNotFoundError:
                check_is_not_behind_a_link(self._fs, self._root)
                return []
            is_file = bool(paths) and self._fs.isfile(self._root)  # `ls` of it is the file itself
        if is_file:
            raise ConfigError(f"store {self._root}: expected a directory, found a file")
        names = (checkpoint_named(path.rstrip("/").rsplit("/", 1)[-1]) for path in paths)
        return [name for name in names if name is not None]

    def _is_there(self, path: str) -> bool:
        """Raises OSError when that cannot be seen: fsspec's own `exists` says no then, and what is
        not there may be removed with all its files."""
        self._fs.invalidate_cache()
        return is_there(self._fs, path)

    def rename(self, name: CheckpointName, file: str, new_file: str) -> None:
        """Raises OSError."""
        self._fs.mv(self.path(name, file), self.path(name, new_file))

    def put_new(self, name: CheckpointName, source: str, file: str, raw: bytes) -> None:
        """`source`, which has these bytes, becomes `file`, whole and in place of nothing. Raises
        FileExistsError."""
        if self._local:
            rename_new(self.path(name, source), self.path(name, file))
            return
        put_whole(self._fs, self.path(name, file), raw)
        self._fs.rm_file(self.path(name, source))

    def sync_directory(self, path: str) -> None:
        """What it has is on stable storage; where that can be had. Raises OSError."""
        if self._local:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
