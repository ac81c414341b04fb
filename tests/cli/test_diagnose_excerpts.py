"""`keepstep diagnose` and the formats of many launchers and libraries: excerpts, and the same words
where they mean nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.cli.log_reading import read_verdict
from keepstep.core.postmortem.verdict import LogVerdict
from tests.core.postmortem.excerpt_cases import LogsOfCase, cases

FILES = (
    *("first.txt", "second.txt", "third.txt", "fourth.txt", "fifth.txt", "sixth.txt"),
    "seventh.txt",
)
CASES = [case for name in FILES for case in cases(name)]
SAID = [case for case in CASES if case.kind not in ("unknown", "hang")]  # by a line of the logs


def verdict_of(files: dict[str, bytes], at: Path) -> LogVerdict:
    for name, data in files.items():
        (at / name).parent.mkdir(parents=True, exist_ok=True)
        (at / name).write_bytes(data)
    verdict, *_ = read_verdict(at)
    assert verdict is not None
    return verdict


def test_there_are_as_many_as_are_told() -> None:
    assert [len(cases(name)) for name in FILES] == [53, 25, 31, 21, 20, 30, 30]
    assert len({case.kind for case in SAID}) >= 25


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_cause_and_the_culprit(case: LogsOfCase, tmp_path: Path) -> None:
    found = verdict_of(case.files, tmp_path)
    assert (found.cause.name, found.rank) == (case.kind, case.rank), found.why


@pytest.mark.parametrize("case", SAID, ids=lambda case: case.name)
def test_the_same_words_as_a_mention_are_no_cause(case: LogsOfCase, tmp_path: Path) -> None:
    """The line by which the cause was found, in a configuration and in a warning."""
    first = verdict_of(case.files, tmp_path / "failed").first
    assert first is not None and first.pattern.role == "root"
    words = first.text.strip()
    lines = [
        "step 1 loss 2.0",
        f"2026-03-14 10:00:00,123 INFO trainer: config: {{'retry_on': ['{words}']}}",
        f'  fatal_patterns: "{words}"',
        f"2026-03-14 10:00:01,123 WARNING trainer: caught {words}; trying again (1 of 3)",
        "step 2 loss 2.0",
    ]
    found = verdict_of({"rank0.log": "\n".join(lines).encode()}, tmp_path / "well")
    assert not found.is_known, found.first


def in_utf_16(text: bytes) -> bytes:
    return text.decode().encode("utf-16")


def in_utf_16_of_the_other_order(text: bytes) -> bytes:
    return b"\xfe\xff" + text.decode().encode("utf-16-be")


def in_utf_32(text: bytes) -> bytes:
    return text.decode().encode("utf-32")


def with_a_mark(text: bytes) -> bytes:
    return b"\xef\xbb\xbf" + text


def from_another_system(text: bytes) -> bytes:
    return text.replace(b"\n", b"\r\n")


def after_a_truncation(text: bytes) -> bytes:
    """As `copytruncate` leaves a log that is written on: zeros up to where the writer was."""
    return b"\x00" * 100_000 + text


def with_garbage(text: bytes) -> bytes:
    """Binary output before each line."""
    return b"".join(b"\x00\x01\x02" + line for line in text.splitlines(keepends=True))


@pytest.mark.parametrize("kind", ["default-prefix-keyerror", "tee-cuda-oom", "structured-json"])
@pytest.mark.parametrize(
    "kept",
    [
        *(in_utf_16, in_utf_16_of_the_other_order, in_utf_32, with_a_mark),
        *(from_another_system, after_a_truncation, with_garbage),
    ],
)
def test_however_a_log_is_kept(kind: str, kept: object, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == kind)
    assert callable(kept)
    found = verdict_of({name: kept(data) for name, data in case.files.items()}, tmp_path)
    assert (found.cause.name, found.rank) == (case.kind, case.rank)


def test_a_traceback_of_another_rank_between_is_not_its_own(tmp_path: Path) -> None:
    """DCP tells on rank 0 what rank 3 raised, while rank 1 raises an error of its own."""
    lines = [
        "[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "/w/train.py", line 7, in main',
        "[rank0]: Traceback (most recent call last): (RANK 3)",
        "[rank1]: KeyError: 'lr'",
        "[rank2]: loss 2.0",
    ]
    found = verdict_of({"out.log": "\n".join(lines).encode()}, tmp_path)
    assert (found.cause.name, found.rank) == ("code", 1)


def test_a_number_that_counts_nodes_is_no_rank(tmp_path: Path) -> None:
    """The ranks that speak in a file say whether its number is one."""
    words = b"RuntimeError: CUDA error: uncorrectable ECC error encountered"
    files = {
        "worker-0.log": b"[rank2]: loss 2.0\n[rank3]: loss 2.0\n" + words,
        "worker-1.log": b"[rank9]: loss 2.0\n[rank10]: loss 2.0\n",
    }
    assert verdict_of(files, tmp_path / "nodes").rank is None
    files = {f"worker-{number}.log": words * (number == 1) for number in range(3)}
    assert verdict_of(files, tmp_path / "ranks").rank == 1


@pytest.mark.parametrize(
    ("kind", "event"),
    [
        ("host-memory", "  Warning  Evicted  3m  kubelet  The node was low on resource: memory."),
        ("preempted", "  Normal   Preempted  12s (x2 over 1m)  kueue-admission  Preempted for x"),
        ("preempted", "3m   Warning   DeadlineExceeded   job/train   Job was active too long"),
        ("preempted", "9s   Normal   Preempted   workload/job-a-17   Preempted for another"),
        ("preempted", "9s   Warning   Evict   pod/w-3   Pod is evicted, because of reclaim"),
    ],
)
def test_events_as_kubectl_lists_and_describes_them(kind: str, event: str, tmp_path: Path) -> None:
    assert verdict_of({"events.txt": event.encode()}, tmp_path).cause.name == kind


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("node-lost", "srun: error: Task launch for StepId=5.0 failed on node n3: Unspecified"),
        ("node-lost", "slurmstepd: error: Prolog hung on node n3"),
        ("node-lost", "srun: Prolog failure on node n3"),
        (
            "rendezvous",
            "slurmstepd: error:  mpi/pmix_v5: pmixp_p2p_send: n4 [4]: pmixp_utils.c:469: "
            "send failed, rc=1001, exceeded the retry limit",
        ),
        ("gpu-lost", "RuntimeError: level_zero backend failed with error: 20 (ERROR_DEVICE_LOST)"),
    ],
)
def test_other_words_of_the_same(kind: str, line: str, tmp_path: Path) -> None:
    killed = "srun: error: n1: tasks 0-7: Killed" if line.startswith(("srun", "slurm")) else ""
    found = verdict_of({"job.err": f"{line}\n{killed}".encode()}, tmp_path)
    assert (found.cause.name, found.rank) == (kind, None), found.why
