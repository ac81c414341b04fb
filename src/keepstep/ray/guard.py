"""Guard: ends what a Ray actor has started when the actor is gone, however it went.

`python -m keepstep.ray.guard NAME VALUE`: waits for the end of its input, which the actor holds,
and then ends every process that was started with this variable in its environment. Ranks outlive
their agent on purpose; without the actor nobody would watch or replace them.
"""

from __future__ import annotations

import sys

from keepstep.edge.os.orphans import end_orphans


def main() -> None:
    name, value = sys.argv[1:]
    sys.stdin.buffer.read()
    end_orphans({name: value})


if __name__ == "__main__":
    main()
