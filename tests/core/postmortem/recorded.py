"""Dumps of torch's flight recorder, composed: the fields are those of torch 2.13."""

from __future__ import annotations

from typing import Any

from keepstep.core.postmortem.recorder import RecorderDump, parse_dump


def a_call(
    group: int | str,
    seq: int,
    name: str,
    *,
    is_over: bool = False,
    is_p2p: bool = False,
    line: int = 7,
) -> dict[str, Any]:
    """An entry. `group` 0: the default one."""
    desc = "default_pg" if group == 0 else "undefined"
    torchs = {"name": "all_reduce", "filename": "/opt/torch/distributed/c10d.py", "line": 3245}
    return {
        "frames": [torchs, {"name": "<module>", "filename": "/work/train.py", "line": line}],
        "record_id": seq,
        "pg_id": 0,
        "process_group": (str(group), desc),
        "collective_seq_id": 0 if is_p2p else seq,
        "p2p_seq_id": seq if is_p2p else 0,
        "op_id": seq,
        "profiling_name": name,
        "input_sizes": [[4]],
        "state": "completed" if is_over else "started",
        "retired": is_over,
        "is_p2p": is_p2p,
    }


def a_dump(
    rank: int, *calls: dict[str, Any], members: dict[int | str, list[int]] | None = None
) -> RecorderDump:
    """Of one rank, the oldest call first. `members`: of its groups."""
    config = {
        str(name): {"name": str(name), "desc": "", "ranks": str(ranks)}
        for name, ranks in (members or {}).items()
    }
    return parse_dump(rank, {"version": "2.10", "pg_config": config, "entries": list(calls)})
