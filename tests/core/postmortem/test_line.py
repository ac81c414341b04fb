"""What stands at the head of a line."""

from __future__ import annotations

import pytest

from keepstep.core.postmortem.line import parse_line
from keepstep.core.postmortem.places import places_of

BODY = "RuntimeError: boom"


@pytest.mark.parametrize(
    ("head", "rank"),
    [
        ("", None),
        ("[rank3]: ", 3),
        ("[rank3]:[rank3]: ", 3),
        ("3: ", 3),
        ("3 | ", 3),
        (" 3: [rank3]: ", 3),
        ("[1,3]<stderr>:", 3),
        ("[Rank 3] ", 3),
        ("[rank: 3] ", 3),
        ("2026-03-14 09:26:53,589 ERROR train: ", None),
        ("2026-03-14T09:26:53.589Z [rank3]: ", 3),
        ("[rank3]:[E314 09:26:53.589793238 ProcessGroupNCCL.cpp:607] ", 3),
        ("[E ProcessGroupNCCL.cpp:563] [Rank 3] ", 3),
        ("E0314 09:26:53.589000 400 torch/api.py:874] ", None),
        ("[PG ID 0 PG GUID 0(default_pg) Rank 3]  ", 3),
        ("\x1b[31m[rank3]:\x1b[0m ", 3),
        ("(TrainWorker pid=77, ip=10.0.0.1) [rank3]: ", 3),
        ("worker-1: [rank3]: ", 3),
        ("gpu07: ", None),
        ('ts=2026-03-14T09:26:53.589Z level=error rank=3 msg="', 3),
        ('time="2026-03-14T09:26:53Z" level=error rank=3 msg="', 3),
        ("2026-03-14 09:26:53,589 ERROR rank=3 ", 3),
    ],
)
def test_the_head_is_taken_off(head: str, rank: int | None) -> None:
    line = parse_line(head + BODY + "\r\n")
    assert (line.body, line.rank) == (BODY, rank)
    assert line.is_exception


@pytest.mark.parametrize(
    "text",
    [
        "Mar 14 09:26:53 node7 kernel: [99.123456] NVRM: Xid (PCI:0000:18:00): 79, pid=1",
        "2026-03-14T09:26:53+00:00 node7 kernel: NVRM: Xid (PCI:0000:18:00): 79, pid=1",
        "[Sat Mar 14 09:26:53 2026] NVRM: Xid (PCI:0000:18:00): 79, pid=1",
        "[ 8123.442211] NVRM: Xid (PCI:0000:18:00): 79, pid=1",
    ],
)
def test_the_kernel_is_known_by_its_head(text: str) -> None:
    line = parse_line(text)
    assert line.by == "kernel"
    assert line.body.startswith("NVRM")
    assert line.host in ("node7", None)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("gpu-07: [99.123456] NVRM: Xid (PCI:0000:18:00): 79, pid=1", "gpu-07"),
        ("n1: [rank3]: ValueError: boom", "n1"),
        ("n1: Traceback (most recent call last):", "n1"),
        ("train2.py: ERROR", None),
        ("python3: can't open file", None),
        ("step3: 4.2", None),
        ("ValueError2: [x]", None),
    ],
)
def test_who_runs_a_command_on_many_hosts_names_them(text: str, host: str | None) -> None:
    assert parse_line(text).host == host


def test_nccl_names_host_process_and_device() -> None:
    line = parse_line("node7:41:99 [3] transport/net_ib.cc:1298 NCCL WARN NET/IB : Got completion")
    assert (line.by, line.host, line.pid, line.device) == ("nccl", "node7", 41, 3)


def test_times_of_all_kinds_are_in_one_order() -> None:
    heads = [
        "2026-03-14 09:26:53,100 ",
        "[E314 09:26:53.200000000 a.cpp:1] ",
        "Mar 14 09:26:54 node7 kernel: ",
        "E0314 09:26:55.000000 4 a.py:1] ",
        "[2026/04/01 00:00:00] ",
    ]
    times = [parse_line(head + BODY).seconds for head in heads]
    assert None not in times and times == sorted(times)


@pytest.mark.parametrize(
    ("path", "host"),
    [
        ("logs/gpu-02.dmesg", "gpu-02"),
        ("kern-node7.log", "node7"),
        ("dmesg.txt", None),
        ("node-dmesg.txt", None),
        ("8841-dmesg.txt", None),
    ],
)
def test_a_kernels_log_is_named_after_its_host(path: str, host: str | None) -> None:
    assert places_of([path])[path].host == host


@pytest.mark.parametrize(
    "text", ["", "[", "[[[[", "[rank", "\x00\xff", "[" * 4000, "a:" * 2000, "1: " * 999]
)
def test_junk_is_a_line_too(text: str) -> None:
    assert len(parse_line(text).body) <= len(text)


@pytest.mark.parametrize(
    ("paths", "ranks"),
    [
        (["none_ab/attempt_0/3/stderr.log"], [3]),
        (["rank3.log", "rank12.log"], [3, 12]),
        (["run/global_rank-00007.err"], [7]),
        (["train-4711-0.out", "train-4711-1.out", "train-4711-2.out"], [0, 1, 2]),
        (["slurm-4711.out"], [None]),
        (["slurm-4711.out", "slurm-4712.out"], [None, None]),  # two jobs
        (["frank3.log"], [None]),
    ],
)
def test_paths_tell_ranks(paths: list[str], ranks: list[int | None]) -> None:
    found = places_of(paths)
    assert [found[path].rank for path in paths] == ranks


def test_on_several_nodes_a_directory_tells_only_the_local_rank() -> None:
    paths = [f"node{n}/none_ab/attempt_1/{r}/stderr.log" for n in (0, 1) for r in (0, 1)]
    found = places_of(paths)
    assert {found[path].rank for path in paths} == {None}
    assert [(p.host, p.local, p.attempt) for p in found.values()] == [
        *(("node0", 0, 1), ("node0", 1, 1), ("node1", 0, 1), ("node1", 1, 1)),
    ]
