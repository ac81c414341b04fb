"""Does a preflight of real nodes name every planted defect and pass a sound fleet, and how soon?

Four nodes of a lab, each in a network namespace, run `keepstep preflight` together, as in a job's
first lines: sound, or with a defect of each kind planted below the product (`tests/processes/
plants`, a shell's limits, a small tmpfs, an older package, a shaped link), two to a node, all at
once. The whole road is run: child processes, meeting, links over TCP, an all-reduce. Needs root.

    python benchmarks/preflight.py --sound 50 --planted 20     # an hour and more on two cores
    python benchmarks/preflight.py --sound 1 --planted 0

A line for each run, with what it was wrong about; then how often a sound fleet passed, how often
each kind was named and on the right node, who else was named, and how long the runs took. Emulated:
the four nodes share the machine's cores, memory and disk.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keepstep.testing.lab import Lab
from keepstep.testing.network import PREFIX

ROOT = Path(__file__).parents[1]
PLANTS = ROOT / "tests" / "processes" / "plants"
PREFLIGHT = [sys.executable, "-m", "keepstep.cli.main", "preflight"]
IN_NAMESPACE = ["unshare", "--mount", "--propagation", "private"]
SHAPE = ["tbf", "rate", "200mbit", "burst", "128kb", "latency", "20ms"]
NODES = 4
PATIENCE_S = 400.0
WANTED = frozenset(
    {
        ("training", 0),
        ("static", 0),
        ("memory", 1),
        ("memory-speed", 1),
        ("same-software", 1),
        ("products", 2),
        ("static", 2),
        ("clocks", 2),
        ("disk", 3),
        ("network", 3),
    }
)
KINDS = tuple(sorted({check for check, _ in WANTED}))
Named = frozenset[tuple[str, int]]


def begin(
    lab: Lab,
    plants: Mapping[int, str] | None = None,
    shells: Mapping[int, str] | None = None,
    versions: Mapping[int, Path] | None = None,
    options: tuple[str, ...] = (),
) -> list[subprocess.Popen[bytes]]:
    """A preflight on every node. plants: what `plants/sitecustomize.py` does there. shells: what a
    shell does before. versions: a directory of packages that a node finds first."""
    endpoint = lab.endpoint()
    started = []
    for node in lab.seats:
        environ = {**os.environ, "PLANT": (plants or {}).get(node, "")}
        first = [PLANTS, *([versions[node]] if versions and node in versions else [])]
        before = os.environ.get("PYTHONPATH")
        environ["PYTHONPATH"] = os.pathsep.join([*map(str, first), *([before] if before else [])])
        words = [*PREFLIGHT, "--nnodes", str(NODES), "--node-rank", str(node), "--json", *options]
        words += ["--rdzv-endpoint", endpoint]
        if shells and node in shells:
            words = [*IN_NAMESPACE, "sh", "-c", f'{shells[node]}; exec "$@"', "sh", *words]
        started.append(lab.start(node, words, environ, stdout=subprocess.PIPE))
    return started


def begin_planted(lab: Lab, room: Path) -> list[subprocess.Popen[bytes]]:
    """With a defect of each kind (`WANTED`)."""
    (room / "old" / "numpy-1.0.dist-info").mkdir(parents=True)
    (room / "old" / "numpy-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: numpy\nVersion: 1.0\n"
    )
    shape = ["tc", "-n", f"{PREFIX}{lab.number}-3", "qdisc", "add", "dev", "eth0", "root", *SHAPE]
    subprocess.run(shape, check=True)
    return begin(
        lab,
        plants={0: "loss", 1: "memory,memory-speed", 2: "products,clock", 3: "disk"},
        shells={
            0: "ulimit -n 200",
            2: 'mount -t tmpfs -o size=16m,mode=1777 tmpfs "$KEEPSTEP_ARENA_DIR"',
        },
        versions={1: room / "old"},
    )


def outcome(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """What a node has printed. Raises ValueError where that is no document."""
    output, _ = process.communicate(timeout=PATIENCE_S)
    document: dict[str, Any] = json.loads(output)
    assert process.returncode == document["exit_code"]
    return document


def named(document: Mapping[str, Any], outcome: str = "bad") -> Named:
    """Check and node of each finding; -1 where it blames several at once."""
    return frozenset(
        (finding["check"], finding["nodes"][0] if len(finding["nodes"]) == 1 else -1)
        for finding in document["findings"]
        if finding["outcome"] == outcome
    )


def run(is_planted: bool) -> tuple[float, dict[str, Any]]:
    """Seconds from the first process to the end of the last, and node 0's document, which all
    nodes must agree with."""
    with tempfile.TemporaryDirectory() as room, Lab(NODES, Path(room), namespaces=True) as lab:
        lab.endpoint()
        begun_s = time.monotonic()
        processes = begin_planted(lab, Path(room)) if is_planted else begin(lab)
        documents = [outcome(process) for process in processes]
        took_s = time.monotonic() - begun_s
    same = {json.dumps(each["findings"], sort_keys=True) for each in documents}
    assert len(same) == 1, "every node comes to the same verdict"
    return took_s, documents[0]


def why(document: Mapping[str, Any], of: Named) -> list[str]:
    """What stands in the findings that nobody wanted."""
    return [
        f"{finding['check']} {finding['nodes']} {finding['outcome']}: {finding['found']}"
        for finding in document["findings"]
        if finding["outcome"] != "bad" or named({"findings": [finding]}) - of
    ]


def main() -> None:
    import harness  # beside this file: it is started as a script

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sound", type=int, default=5)
    parser.add_argument("--planted", type=int, default=5)
    args = parser.parse_args()
    watch = harness.watch()
    kinds, others = Counter[str](), Counter[str]()
    passed, took = 0, {False: [], True: []}
    # mixed, so that a load that comes and goes meets both
    order = sorted(
        [((n + 0.5) / args.sound, False) for n in range(args.sound)]
        + [((n + 0.5) / args.planted, True) for n in range(args.planted)]
    )
    for number, (_, is_planted) in enumerate(order):
        load = os.getloadavg()[0]
        took_s, document = run(is_planted)
        wanted = WANTED if is_planted else frozenset()
        found = named(document)
        took[is_planted].append(took_s)
        if is_planted:
            missed = {check for check, _ in wanted - found}
            kinds.update(kind for kind in KINDS if kind not in missed)
        else:
            passed += document["exit_code"] == 0
        others.update(check for check, _ in found - wanted)
        lacks = [f"{check} on {node} is missed" for check, node in sorted(wanted - found)]
        said = "; ".join([*lacks, *why(document, wanted)]) or "right"
        what = "planted" if is_planted else "sound"
        print(f"{number:3} {what:8} {took_s:5.1f} s  load {load:4.1f}  {said}", flush=True)
    if args.sound:
        print(f"sound: {passed} of {args.sound} passed")
    for kind in KINDS if args.planted else ():
        print(f"{kind:14} named {kinds[kind]} of {args.planted}")
    print(f"named and not there: {dict(others) or 'nothing'}")
    for is_planted, each in took.items():
        if each:
            what = "planted" if is_planted else "sound"
            print(f"{what}: median {statistics.median(each):.1f} s, longest {max(each):.1f} s")
    harness.tell(watch.end())


if __name__ == "__main__":
    main()
