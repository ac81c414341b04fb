"""A simulated cluster touches nothing of the machine that it is computed on."""

from __future__ import annotations

import subprocess
import sys

WATCHED = """
import sys
from keepstep.sim.protocol.swarm import run

run(1)  # whatever is imported late is imported now
touched = set()
watching = True
WORLD = ("open", "os.", "socket.", "subprocess.", "mmap.", "shutil.", "fcntl.", "time.sleep")
def watch(event, args):
    is_anonymous = event == "mmap.__new__" and args[0] == -1  # memory of its own, like any other
    if watching and event.startswith(WORLD) and not is_anonymous:
        touched.add(f"{event} {args!r:.200}")

sys.addaudithook(watch)
outcome = run(2)
watching = False
print("\\n".join(sorted(touched)))
sys.exit(outcome.faults == 0)
"""


def test_no_file_no_socket_no_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WATCHED], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
