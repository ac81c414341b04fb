"""keepstep and its peers by turns: what saving every step costs, and what a kill costs.

    make bench-peers                                        # all, three kinds of state: hours
    make bench-peers PEERS="keepstep dlrover" QUICK=1       # two, the small state, one round
    .venv/bin/python -m benchmarks.peers --json --rounds 5  # one JSON document

Every round gives each contender one turn (`turn.py`), in an order that changes from round to round,
all of them on the same cores, one compute thread, their files in memory. Figures are medians over
rounds. Beside them stand the load averages and how many cores other processes took meanwhile; when
that was too much there are figures, and no verdict.

slowdown   a step with its save against one without, blocks by turns in one process
call       how long the trainer waits in the call
first      the first save: the call, and until it is whole
extra CPU  of all its processes, a step
copy       into a peer's memory, two ranks at once over loopback (`pair.py`)
kill       SIGKILL between two saves, to the end of the next step, the import of torch included;
           steps lost
mid-save   the same within a save
restore    set up and loaded, after a planned end
memory     over the state's bytes: processes, shared memory and files in memory
skipped    of the steps that were to be saved
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.peers import environments
from benchmarks.peers.contestant import Contestant
from benchmarks.peers.environments import Unavailable
from benchmarks.peers.pair import copy_bytes_per_s
from benchmarks.peers.saver import COMPANIONS, NAMES, NO_PEER_COPY, PAIRS
from benchmarks.peers.turn import Length, Turn, measure

FULL = Length(steps=6, pairs=3, kills=3)
QUICK = Length(steps=4, pairs=1, kills=1)
KINDS = ("small", "large", "many")
COMPARED = {  # where less is better
    "slowdown": "slowdown",
    "call_s": "blocking time",
    "first_call_s": "first save",
    "extra_cpu_s": "extra CPU",
    "kill_to_next_step_s": "kill to next step",
    "mid_save_to_next_step_s": "killed in mid-save",
    "restore_s": "restore",
    "memory_ratio": "memory",
}


MOST = {"copy_bytes_per_s": "copy to a peer"}  # where more is better


def run(
    names: list[str], kinds: list[str], rounds: int, length: Length, directory: Path, cores: int
) -> dict[str, Any]:
    """Figures of all turns, and what they were measured in."""
    absent: dict[str, str] = {}
    pythons: dict[str, Path] = {}
    for name in names:
        try:
            pythons[name] = environments.python_of(name)
        except Unavailable as error:
            absent[name] = str(error)
    turns: dict[str, dict[str, list[Turn]]] = {kind: {} for kind in kinds}
    noises: dict[str, list[harness.Noise]] = {kind: [] for kind in kinds}
    on = harness.cores(cores)
    room = Path(tempfile.mkdtemp(prefix="bench-peers-", dir=directory))
    try:
        for kind in kinds:
            for order in harness.turns(list(pythons), rounds):
                for name in order:
                    turn, noise = one_turn(name, pythons[name], kind, length, room, on)
                    turns[kind].setdefault(name, []).append(turn)
                    noises[kind].append(noise)
                    told = turn.why or "done"
                    print(f"{kind} {name}: {told}", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(room, ignore_errors=True)
    return {
        "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": harness.machine(),
        "cores": on,
        "rounds": rounds,
        "absent": absent,
        "no_peer_copy": {n: NO_PEER_COPY[n] for n in names if n in NO_PEER_COPY},
        "kinds": {
            kind: {
                "figures": {name: figures(found) for name, found in turns[kind].items()},
                "noise": [asdict(noise) for noise in noises[kind]],
            }
            for kind in kinds
        },
        "no_verdict": harness.why_no_verdict([noise for kind in kinds for noise in noises[kind]]),
    }


def one_turn(
    name: str, python: Path, kind: str, length: Length, room: Path, cores: list[int]
) -> tuple[Turn, harness.Noise]:
    place = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=room))
    contestant = Contestant(name, python, place, cores)
    watch = harness.Watch(lambda: harness.cpu_s([os.getpid()]) + contestant.orphans_s)
    turn = measure(contestant, kind, length, name in COMPANIONS)
    if name in PAIRS and turn.state_bytes:
        both = Path(tempfile.mkdtemp(prefix=f"{name}-pair-", dir=room))
        turn.copy_bytes_per_s, why = copy_bytes_per_s(
            name, python, both, kind, turn.state_bytes, cores
        )
        turn.why = turn.why or why
        shutil.rmtree(both, ignore_errors=True)
    noise = watch.end()
    shutil.rmtree(place, ignore_errors=True)
    return turn, noise


def figures(turns: list[Turn]) -> dict[str, Any]:
    """Medians over rounds; of lost steps the most, and every reason."""
    rows = [asdict(turn) for turn in turns]
    found: dict[str, Any] = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if name == "why":
            found[name] = sorted({value for value in values if value})
        elif name == "torn":
            found[name] = sum(values)
        elif name == "mid_save_lost_steps":
            found[name] = [lost for value in values if value for lost in value]
        elif name == "kill_lost_steps":
            found[name] = max((value for value in values if value is not None), default=None)
        else:
            found[name] = harness.median(values)
    return found


# -- telling


def verdicts(report: dict[str, Any]) -> list[str]:
    """Who had the least of what, unless the machine was not quiet."""
    if report["no_verdict"]:
        return [report["no_verdict"]]
    lines = []
    for kind, seen in report["kinds"].items():
        for key, word in {**COMPARED, **MOST}.items():
            had = {name: row[key] for name, row in seen["figures"].items() if row[key] is not None}
            if len(had) > 1:
                order = sorted(had, key=had.__getitem__, reverse=key in MOST)
                what = "most" if key in MOST else "least"
                lines.append(f"{kind}, {word}: {what} {order[0]}, then {order[1]}")
    return lines


def _cell(form: str, scale: float = 1.0) -> Callable[[Any], str]:
    return lambda value: "-" if value is None else form.format(value * scale)


def row(name: str, found: dict[str, Any]) -> list[str]:
    ms, s = _cell("{:.0f}", 1e3), _cell("{:.1f}")
    lost = found["mid_save_lost_steps"]
    mid = "-" if not lost else f"{s(found['mid_save_to_next_step_s'])}, lost {max(lost)}"
    between = found["kill_lost_steps"]
    return [
        name,
        _cell("{:+.0%}")(found["slowdown"]),
        _cell("{:.1f}", 1e3)(found["call_s"]),
        f"{ms(found['first_call_s'])} / {ms(found['first_whole_s'])}",
        ms(found["extra_cpu_s"]),
        _cell("{:.2f}", 1e-9)(found["copy_bytes_per_s"]),
        "-" if between is None else f"{s(found['kill_to_next_step_s'])}, lost {between}",
        mid + (f", torn {found['torn']}" if found["torn"] else ""),
        _cell("{:.2f}")(found["restore_s"]),
        _cell("{:.1f}")(found["memory_ratio"]),
        _cell("{:.0%}")(found["skipped"]),
    ]


HEAD = (
    "contender",
    "slowdown",
    "call ms",
    "first ms, call / whole",
    "extra CPU ms",
    "copy GB/s",
    "kill s",
    "mid-save s",
    "restore s",
    "memory",
    "skipped",
)


def table(report: dict[str, Any]) -> str:
    """Markdown, as it goes into docs/performance.md."""
    lines = [f"{report['at']}, {report['machine']}, cores {report['cores']}"]
    for kind, seen in report["kinds"].items():
        noise = seen["noise"]
        loads = [load for one in noise for load in (one["load_before"], one["load_after"])]
        some = [found for found in seen["figures"].values() if found["state_bytes"]]
        size = f"{some[0]['state_bytes'] / 2**20:.0f} MiB" if some else "no state"
        step = harness.median(found["step_s"] for found in some)
        if loads:
            lines += [
                "",
                f"{kind}: {size}, {some[0]['tensors'] if some else 0:.0f} tensors, step "
                f"{_cell('{:.0f}', 1e3)(step)} ms, {report['rounds']} rounds; load "
                f"{min(loads):.1f} to {max(loads):.1f}, others took up to "
                f"{max(one['others_cores'] for one in noise):.2f} cores",
            ]
        lines += ["", f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
        lines += [f"| {' | '.join(row(n, found))} |" for n, found in seen["figures"].items()]
        for name, found in seen["figures"].items():
            lines += [f"* {name}: {why}" for why in found["why"]]
    lines += ["", *(f"* {name}: not there: {why}" for name, why in report["absent"].items())]
    lines += [f"* {name}, copy: none: {why}" for name, why in report["no_peer_copy"].items()]
    return "\n".join([*lines, "", *verdicts(report)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", nargs="*", choices=NAMES, help="all of them")
    parser.add_argument("--kinds", nargs="*", choices=[*KINDS, "tiny"])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--quick", action="store_true", help="the small state, one short round")
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"), help="of all files")
    parser.add_argument("--cores", type=int, default=2, help="that each contender may use")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    report = run(
        args.peers or list(NAMES),
        args.kinds or (["small"] if args.quick else list(KINDS)),
        args.rounds or (1 if args.quick else 5),
        QUICK if args.quick else FULL,
        args.directory,
        args.cores,
    )
    print(json.dumps(report | {"verdicts": verdicts(report)}) if args.json else table(report))


if __name__ == "__main__":
    main()
