"""What does probing a node's parts cost, as it is on by default?

    python benchmarks/parts.py                 # two minutes
    python benchmarks/parts.py --seconds 600

Runs the prober as an agent does, and prints the processor time that it and the children of all its
probes have taken (which other load hardly changes), how long a look took, what answered, and what
is blind here.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness  # beside this file: it is started as a script

from keepstep.edge.os.own_modules import module_words
from keepstep.edge.parts.probe import Targets
from keepstep.edge.parts.prober import cursors_to_text, targets_to_text
from keepstep.edge.parts.prober_process import MODULE
from keepstep.model.parts import BEAT, answer_from_line
from keepstep.model.units import MS_NS

STARTED_S = 3.0
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def computed_s(pid: int) -> float:
    """By the process and its children that have ended."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, words[11:15])) * TICK_S


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    options = parser.parse_args()
    watch = harness.watch()
    with tempfile.TemporaryDirectory() as disk:
        targets = Targets(Path("/dev/shm"), Path(disk), os.getpid())
        given = targets_to_text(targets), cursors_to_text({})
        command = [sys.executable, *module_words(MODULE, *given)]
        prober = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert prober.stdin is not None and prober.stdout is not None
        time.sleep(STARTED_S)
        start_s, began_s = computed_s(prober.pid), time.monotonic()
        time.sleep(options.seconds)
        took_s, over_s = computed_s(prober.pid) - start_s, time.monotonic() - began_s
        status = Path(f"/proc/{prober.pid}/status").read_text()
        resident = next(line.split()[1] for line in status.splitlines() if "VmRSS" in line)
        prober.stdin.close()
        took_ms: dict[str, list[float]] = {}
        blind: dict[str, str] = {}
        for line in prober.stdout:
            answer = answer_from_line(line)
            took_ms.setdefault(answer.probe, []).append(answer.took_ns / MS_NS)
            if answer.blind:
                blind[answer.probe] = answer.blind
        prober.wait()
    took_ms.pop(BEAT, None)
    print(
        f"{took_s:.2f} s of processor in {over_s:.0f} s: {took_s / over_s:.2%} of a core; to start "
        f"{start_s:.2f} s; {int(resident) / 1024:.0f} MiB; load {os.getloadavg()[0]:.1f}"
    )
    for probe, each in sorted(took_ms.items()):
        said = blind.get(probe, "sees")
        print(f"{probe:9} {len(each):4} looks, {statistics.median(each):5.1f} ms each: {said}")
    harness.tell(watch.end())


if __name__ == "__main__":
    main()
