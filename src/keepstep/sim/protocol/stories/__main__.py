"""`python -m keepstep.sim.protocol.stories FILE`: tells a story, and prints how it went."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from keepstep.errors import ConfigError
from keepstep.sim.protocol.stories.reader import read_story
from keepstep.sim.protocol.stories.runner import tell


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m keepstep.sim.protocol.stories", description=__doc__
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--lines", type=int, default=400, help="of each trace, the last ones")
    given = parser.parse_args()
    try:
        cases = read_story(given.file.read_text())
    except (ConfigError, OSError) as error:
        print(f"{given.file}: {error}", file=sys.stderr)
        return 2
    is_bad = False
    for case in cases:
        outcome = tell(case)
        print("\n".join(outcome.trace[-given.lines :]))
        print(
            f"{given.file.name} {case.name}: {outcome.wrong or 'as expected'}; "
            f"{outcome.virtual_ns / 1e9:.1f} s, {outcome.lost_steps} lost steps, "
            f"{outcome.faults} faults"
        )
        is_bad |= outcome.wrong is not None
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
