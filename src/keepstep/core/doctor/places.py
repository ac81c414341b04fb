"""Places: the directories that a job writes to: its arena, journals, checkpoints, and /tmp.

Comes in: facts of the directories. Goes out: defects.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from keepstep.core.doctor.defect import Defect, DoctorCheck, broken, silence, warning
from keepstep.model.machine_facts import DirectoryFacts, MachineFacts
from keepstep.model.units import GIB, MIB, human_bytes

MEMORY_FILESYSTEMS = {"tmpfs", "ramfs", "hugetlbfs"}
SHARED_FILESYSTEMS = {
    *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "glusterfs", "afs"),
    *("9p", "virtiofs", "wekafs", "panfs", "orangefs", "daos", "fuse.juicefs", "fuse.glusterfs"),
    *("fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.sshfs", "fuse.daos", "fuse.dfuse"),
}
CONTAINER_DEFAULT_BYTES = 64 * MIB  # of /dev/shm in Docker and Kubernetes
MIN_ARENA_RATIO = 0.25  # of the machine's memory: a state of a GPU's size, twice
MIN_ARENA_FREE_BYTES = 64 * MIB
MIN_ARENA_FREE_RATIO = 0.10
FULL_BYTES = 16 * MIB
MIN_TEMPORARY_BYTES = GIB
MIN_STORE_BYTES = GIB
MIN_STORE_RATIO = 0.05
MIN_FREE_FILES = 1000
STICKY = 0o1000
OTHERS_WRITE = 0o022


def arena_writable(facts: MachineFacts) -> Iterator[Defect]:
    """Whether a job can make its directory in the arena."""
    arena = facts.arena
    why = "every job has its memory there, and does not start without it"
    if not arena.is_there:
        yield broken(
            f"{arena.path} is not there",
            why,
            f"mkdir -p {_quoted(arena)} && mount -t tmpfs tmpfs {_quoted(arena)}, or set "
            "KEEPSTEP_ARENA_DIR to a directory in memory",
        )
    elif arena.refusal:
        yield broken(
            f"{arena.path} cannot be written to: {arena.refusal}",
            why,
            f"mount -o remount,rw {_quoted(arena)} && chmod 1777 {_quoted(arena)}",
        )


def arena_in_memory(facts: MachineFacts) -> Iterator[Defect]:
    """Whether the arena is memory."""
    arena = facts.arena
    if arena.filesystem is None:
        yield silence(f"the file system of {arena.path}")
    elif arena.is_there and arena.filesystem not in MEMORY_FILESYSTEMS:
        yield warning(
            f"{arena.path} is {arena.filesystem}, not memory",
            "every step would be written to a disk, and wait for it",
            f"mount -t tmpfs tmpfs {_quoted(arena)}, or unset KEEPSTEP_ARENA_DIR",
        )


def arena_size(facts: MachineFacts) -> Iterator[Defect]:
    """Whether the arena is large enough for the state of a model."""
    arena, ram = facts.arena, facts.memory.total_bytes
    total = arena.total_bytes
    if total is None or ram is None:
        yield silence(f"the size of {arena.path} or of the memory")
    elif arena.is_there and 0 < total <= CONTAINER_DEFAULT_BYTES:
        yield broken(
            f"{arena.path} holds {human_bytes(total)}, a container's default",
            "two snapshots of every rank must fit into it, and DataLoader's workers use it too",
            f"{_enlarge(arena, ram)}, docker run --shm-size={ram // 2 // MIB}m, in Kubernetes an "
            f"emptyDir of medium Memory at {arena.path}",
        )
    elif arena.is_there and 0 < total < ram * MIN_ARENA_RATIO:
        yield warning(
            f"{arena.path} holds {human_bytes(total)} of {human_bytes(ram)} of memory",
            "two snapshots of every rank must fit into it, and others' copies",
            _enlarge(arena, ram),
        )


def arena_free(facts: MachineFacts) -> Iterator[Defect]:
    """Whether the arena has room now."""
    arena = facts.arena
    total, free = arena.total_bytes, arena.free_bytes
    if total is None or free is None:
        yield silence(f"what is free in {arena.path}")
        return
    why = "the slots of a job that starts now would not fit"
    fix = f"keepstep clean, then remove what else lies there (ls -la {_quoted(arena)})"
    found = f"{arena.path} has {human_bytes(free)} of {human_bytes(total)} free"
    if not arena.is_there or not total:  # ramfs has no size to tell
        return
    if free < FULL_BYTES:
        yield broken(found, why, fix)
    elif free < max(MIN_ARENA_FREE_BYTES, total * MIN_ARENA_FREE_RATIO):
        yield warning(found, why, fix)
    if arena.free_files is not None and arena.free_files < MIN_FREE_FILES:
        yield warning(
            f"{arena.path} has room for {arena.free_files} more files",
            "a job has some ten files a rank there",
            f"mount -o remount,nr_inodes=1m {_quoted(arena)}",
        )


def arena_owner(facts: MachineFacts) -> Iterator[Defect]:
    """Whether nobody else can put a directory in the place of a job's."""
    arena = facts.arena
    if arena.mode is None or arena.owner is None:
        yield silence(f"the owner of {arena.path}")
        return
    others_may_rename = arena.mode & OTHERS_WRITE and not arena.mode & STICKY
    if arena.is_there and (others_may_rename or arena.owner not in (0, facts.wanted.user)):
        yield broken(
            f"{arena.path} belongs to user {arena.owner} and has mode {arena.mode:o}",
            "others could put a directory in the place of the job's, so keepstep refuses it",
            f"chown root {_quoted(arena)} && chmod 1777 {_quoted(arena)}",
        )
    if facts.wanted.user_dir_refusal:
        yield broken(
            facts.wanted.user_dir_refusal,
            "no job of this user can have its memory there",
            "have its owner or root remove it",
        )


def state_directory(facts: MachineFacts) -> Iterator[Defect]:
    """Whether journals can be written."""
    state = facts.state
    if state.refusal:
        yield broken(
            f"{state.path} cannot be written to: {state.refusal}",
            "journals and the keeper's log are written there",
            "set KEEPSTEP_STATE_DIR to a directory that this user may write to",
        )
    elif state.free_bytes is not None and 0 <= state.free_bytes < FULL_BYTES:
        yield broken(
            f"{state.path} has {human_bytes(state.free_bytes)} free",
            "journals and the keeper's log are written there",
            f"free some space (df -h {_quoted(state)}), or set KEEPSTEP_STATE_DIR to another disk",
        )


def temporary_directory(facts: MachineFacts) -> Iterator[Defect]:
    """Whether torch can compile and exchange files where temporary ones go."""
    tmp = facts.temporary
    if tmp.refusal:
        yield broken(
            f"{tmp.path} cannot be written to: {tmp.refusal}",
            "torchrun's logs, torch.compile's results and sockets of workers go there",
            "set TMPDIR to a directory that this user may write to",
        )
        return
    if "noexec" in tmp.options:
        yield warning(
            f"{tmp.path} is mounted noexec",
            "torch.compile cannot load what it compiles there",
            f"mount -o remount,exec {_quoted(tmp)}, or set TMPDIR to another directory",
        )
    if tmp.free_bytes is None:
        yield silence(f"what is free in {tmp.path}")
    elif tmp.free_bytes < MIN_TEMPORARY_BYTES:
        grade = broken if tmp.free_bytes < FULL_BYTES else warning
        yield grade(
            f"{tmp.path} has {human_bytes(tmp.free_bytes)} free",
            "torchrun's logs, torch.compile's results and sockets of workers go there",
            f"free some space (df -h {_quoted(tmp)}), or set TMPDIR to a directory with more",
        )


def store_directory(facts: MachineFacts) -> Iterator[Defect]:
    """Whether checkpoints can be written, and are there when they are needed."""
    store = facts.store
    if store is None:
        return
    if store.refusal:
        yield broken(
            f"{store.path} cannot be written to: {store.refusal}",
            "a job with this store does not start",
            "make it writable for this user, or name another directory or URL (KEEPSTEP_STORE)",
        )
        return
    yield from _store_room(store)
    shared = store.filesystem in SHARED_FILESYSTEMS
    if store.filesystem in MEMORY_FILESYSTEMS:
        yield warning(
            f"{store.path} is {store.filesystem}",
            "checkpoints in memory are lost with the machine, as the snapshots are",
            "name a directory on a disk, or a URL such as s3://bucket/run (KEEPSTEP_STORE)",
        )
    elif store.filesystem == "overlay":
        yield warning(
            f"{store.path} lies in the container's own layer",
            "checkpoints are lost with the container",
            "mount a volume there (docker run -v, in Kubernetes a persistentVolumeClaim)",
        )
    elif facts.wanted.nodes > 1 and store.filesystem is not None and not shared:
        yield warning(
            f"{store.path} is {store.filesystem}, which other nodes do not see",
            "each node would write its part to a disk of its own, and none could restore",
            "name a directory that all nodes share, or a URL such as s3://bucket/run",
        )
    if shared and "soft" in store.options:
        yield warning(
            f"{store.path} is mounted soft",
            "a server that is away for a moment makes a checkpoint fail",
            f"mount -o remount,hard {_quoted(store)}, and hard in /etc/fstab",
        )


def _store_room(store: DirectoryFacts) -> Iterator[Defect]:
    free, total = store.free_bytes, store.total_bytes
    if free is None or total is None:
        yield silence(f"what is free in {store.path}")
    elif total and free < max(MIN_STORE_BYTES, total * MIN_STORE_RATIO):
        grade = broken if free < FULL_BYTES else warning
        yield grade(
            f"{store.path} has {human_bytes(free)} of {human_bytes(total)} free",
            "a checkpoint that does not fit is not written, and `keep` holds two at least",
            f"free some space (df -h {_quoted(store)}), or name another store",
        )
    if store.free_files is not None and total and 0 < store.free_files < MIN_FREE_FILES:
        yield warning(
            f"{store.path} has room for {store.free_files} more files",
            "a checkpoint has a file a rank and some more",
            f"remove small files (df -i {_quoted(store)}), or name another store",
        )


def _enlarge(arena: DirectoryFacts, ram: int) -> str:
    return f"mount -o remount,size={ram // 2 // MIB}m {_quoted(arena)}"


def _quoted(place: DirectoryFacts) -> str:
    return shlex.quote(place.path)


CHECKS = (
    DoctorCheck("arena-writable", arena_writable),
    DoctorCheck("arena-in-memory", arena_in_memory),
    DoctorCheck("arena-size", arena_size),
    DoctorCheck("arena-free", arena_free),
    DoctorCheck("arena-owner", arena_owner),
    DoctorCheck("state-directory", state_directory),
    DoctorCheck("temporary-directory", temporary_directory),
    DoctorCheck("store-directory", store_directory),
)
