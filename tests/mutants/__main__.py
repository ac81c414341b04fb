"""Kill rate: how many small wrong changes of the product its tests notice.

    python -m tests.mutants --count 300 --seed 1 --verdicts build/mutants.jsonl

Works on a copy of the tree. Every witness of a round sees all mutants that are still alive before
a dearer one sees any; the first test that fails kills a mutant, if it passes without the change.
What became of each goes into the file at once: the same command goes on where it ended. A part of
the sample (`--first`, `--end`) is a sample, too.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutants.sample import Mutant, draw
from tests.mutants.witnesses import PRODUCT, ROUNDS, Witnesses

ROOT = Path(__file__).parents[2]
ROOMS = ("core", "runtime", "edge/shm", "edge/net", "edge/store")


@dataclass(frozen=True, slots=True)
class Verdict:
    mutant: str  # its lasting name
    rounds: int  # whose witnesses have seen it
    killed_by: str | None
    no_witness: str | None  # fails without the change, too
    took_s: float


def modules() -> list[Path]:
    return [
        module.relative_to(ROOT)
        for room in ROOMS
        for module in sorted((ROOT / PRODUCT / room).rglob("*.py"))
    ]


def judge(mutant: Mutant, tree: Path, witnesses: Witnesses, turn: int) -> Verdict:
    """By the witnesses of one round."""
    path = tree / mutant.module
    original = path.read_text()
    changed = mutant.code(original)
    began_s = time.monotonic()
    killed_by = no_witness = None
    for command in witnesses.of(mutant.module, turn):
        path.write_text(changed)
        try:
            noticed = witnesses.noticed(command, turn)
        finally:
            path.write_text(original)
        if noticed is not None and witnesses.sound(noticed, command, turn):
            killed_by = noticed
            break
        no_witness = noticed or no_witness
    took_s = round(time.monotonic() - began_s, 1)
    return Verdict(mutant.lasting_name, turn + 1, killed_by, no_witness, took_s)


def change(mutant: Mutant) -> str:
    original = (ROOT / mutant.module).read_text()
    lines = difflib.unified_diff(
        original.splitlines(), mutant.code(original).splitlines(), lineterm="", n=1
    )
    return "\n    ".join([mutant.name, *list(lines)[2:]])


def known(verdicts: Path) -> dict[str, Verdict]:
    """What the file says of each so far."""
    lines = verdicts.read_text().splitlines() if verdicts.exists() else []
    found = (Verdict(**json.loads(line)) for line in lines)
    return {verdict.mutant: verdict for verdict in found}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="begin with this one of the sample")
    parser.add_argument("--end", type=int, help="and end before this one")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of witnesses")
    parser.add_argument("--verdicts", type=Path, default=Path("build/mutants.jsonl"))
    args = parser.parse_args()
    os.chdir(ROOT)
    sample = draw(modules(), args.count, args.seed)[args.first : args.end]
    found = known(args.verdicts)
    args.verdicts.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="keepstep-mutants-") as home:
        tree = Path(home) / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "build")
        shutil.copytree(ROOT, tree, ignore=ignored)
        witnesses = Witnesses(tree)
        for turn in range(args.rounds):
            for mutant in sample:
                before = found.get(mutant.lasting_name)
                if before is not None and (before.killed_by or before.rounds > turn):
                    continue
                verdict = found[mutant.lasting_name] = judge(mutant, tree, witnesses, turn)
                line = json.dumps(asdict(verdict))
                with args.verdicts.open("a") as file:
                    file.write(line + "\n")
                print(line, flush=True)
    alive = [each for each in sample if found[each.lasting_name].killed_by is None]
    for mutant in alive:
        print("SURVIVED", change(mutant))
    rate = 1 - len(alive) / len(sample)
    print(f"{len(sample)} mutants, {len(alive)} survived: {100 * rate:.1f} % were noticed")


if __name__ == "__main__":
    main()
