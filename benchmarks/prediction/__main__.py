"""Does the simulation tell the truth about a cluster?

    python -m benchmarks.prediction --nodes 2 --nproc 2 --policy copies:2 --soak 90 --seed 8
    python -m benchmarks.prediction --fault kill:rank=1,step=8,phase=capture --nproc 2 --steps 30
    python -m benchmarks.prediction --record record.json --seeds 20     # no drill, only the rest

Comes in: a drill, as `keepstep drill` takes it, or the record of one. Goes out: what was seen and
what the simulation predicts, side by side (docs/simulation.md, "Predicted and seen"). Exit code 0:
they agree; 1: they do not; 2: a wrong command line, or a drill that did not come to its end.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.prediction.record import Record, record_of
from keepstep.cli import drill_soak
from keepstep.cli.drill_arguments import DrillArguments, build_drill, checked_faults
from keepstep.errors import ConfigError
from keepstep.testing.conductor import conduct

RECORD_FILE = "record.json"  # beside the journals: what the prediction was made of


def drilled(arguments: DrillArguments, work: Path) -> Record:
    """What a drill of a job tells, while all its ranks are measured. Raises ConfigError."""
    faults: Sequence[Any] = checked_faults(arguments)
    order = replace(build_drill(arguments, tuple(faults), work), measures=True)
    if arguments.soak:
        soak = drill_soak.make(order, arguments.soak, arguments.kinds)
        facts, _ = drill_soak.run(order, soak, lambda step, done: None)
        faults = soak.faults
    else:
        facts = conduct(order)
    if facts.exit_code != 0:
        raise ConfigError(
            f"expected a drill that ends well, found exit code {facts.exit_code}; its output is "
            f"in {work / facts.job}"
        )
    record = record_of(order, faults, facts)
    path = work / facts.job / RECORD_FILE
    path.write_text(json.dumps(record.to_json(), separators=(",", ":")))
    print(f"the record of this drill is {path}", file=sys.stderr)
    return record


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prediction", description="Predicted and seen, side by side."
    )
    parser.add_argument("--record", type=Path, help="of a drill that was done before")
    parser.add_argument("--seeds", type=int, default=20, help="how often it is simulated")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--work", type=Path, help="directory for the drill's journals and record")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", action="append", help="as of `keepstep drill`")
    parser.add_argument("--random", type=int, default=0, help="so many faults, drawn by --seed")
    parser.add_argument("--soak", type=float, default=0.0, help="seconds")
    parser.add_argument("--kinds", default="", help="of faults that are drawn")
    return parser.parse_args(argv)


def read(options: argparse.Namespace) -> Record:
    """The record that is asked for, of a drill that is done now or was before."""
    if options.record is not None:
        return Record.from_json(json.loads(options.record.read_text("utf-8")))
    work = options.work or Path(tempfile.mkdtemp(prefix="keepstep-prediction-"))
    work.mkdir(parents=True, exist_ok=True)
    names = ("nodes", "nproc", "policy", "steps", "seed", "fault", "random", "soak", "kinds")
    given = {name: getattr(options, name) for name in names}
    return drilled(DrillArguments(**given, launcher="run", work=work), work.absolute())


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    from benchmarks.prediction import report  # the simulation

    try:
        record = read(options)
        prediction = report.predict(record, options.seeds)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(report.as_data(prediction)))
    else:
        report.show(Console(highlight=False), prediction)
    return 0 if prediction.comparison.agrees else 1


if __name__ == "__main__":
    raise SystemExit(main())
