"""Kill rate: how many small wrong changes of the product its tests notice.

    python -m tests.mutants --count 300 --seed 1

Works on a copy of the tree. All witnesses of a round see all mutants that are still alive, before a
dearer round begins (`witnesses.py`). What became of each goes into a file at once: the same command
goes on where it ended, in `--home`. `--again` has those that survived judged anew, by tests that
are new; `--confirm` has each of the others shown once more to the test that noticed it, and judged
anew where that does not. A part of the sample (`--first`, `--end`) is a sample, too; `--only WORDS`
are those whose name has these.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import pickle
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.mutants.reach import PRODUCT, Reach
from tests.mutants.sample import Mutant, draw
from tests.mutants.warm import Warm
from tests.mutants.witnesses import ROUNDS, Panel, Witnesses, panel_of

ROOT = Path(__file__).parents[2]
ROOMS = ("core", "runtime", "edge/shm", "edge/net", "edge/store")
HOME = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "keepstep-mutants"


@dataclass(frozen=True, slots=True)
class Verdict:
    mutant: str  # its lasting name
    rounds: int  # whose witnesses have seen it
    killed_by: str | None
    took_s: float


def modules() -> list[Path]:
    return [
        module.relative_to(ROOT)
        for room in ROOMS
        for module in sorted((ROOT / PRODUCT / room).rglob("*.py"))
    ]


def drawn(count: int, seed: int, home: Path) -> tuple[list[Mutant], Counter[str]]:
    """The sample; that of an unchanged product is kept, for drawing takes a while."""
    digest = hashlib.sha256(repr((count, seed)).encode())
    for module in (*modules(), Path(__file__).with_name("sample.py")):
        digest.update(module.read_bytes())
    kept = home / f"sample-{digest.hexdigest()[:16]}"
    if not kept.exists():
        kept.write_bytes(pickle.dumps(draw(modules(), count, seed)))
    found: tuple[list[Mutant], Counter[str]] = pickle.loads(kept.read_bytes())
    return found


def judge(mutant: Mutant, tree: Path, witnesses: Witnesses, panel: Panel, rounds: int) -> Verdict:
    path = tree / mutant.module
    original = path.read_text()
    began_s = time.monotonic()
    path.write_text(mutant.code(original))
    try:
        noticed = witnesses.notice(panel)
    finally:
        path.write_text(original)
    return Verdict(mutant.lasting_name, rounds, noticed, round(time.monotonic() - began_s, 1))


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


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="begin with this one of the sample")
    parser.add_argument("--end", type=int, help="and end before this one")
    parser.add_argument("--only", default="", help="those whose name has these words")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of witnesses")
    parser.add_argument("--again", action="store_true", help="judge those alive anew")
    parser.add_argument("--confirm", action="store_true", help="show the others again, too")
    parser.add_argument("--home", type=Path, default=HOME, help="what is known so far")
    return parser.parse_args()


def judge_all(sample: list[Mutant], found: dict[str, Verdict], args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="keepstep-mutants-") as home:
        tree = Path(home) / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "build")
        shutil.copytree(ROOT, tree, ignore=ignored)
        warm = Warm(tree)
        reach = Reach(tree, warm, args.home / "reach")
        witnesses = Witnesses(tree, warm, reach, args.home)
        if args.confirm:
            judged = []
            for mutant in sample:
                before = found.get(mutant.lasting_name)
                if before is not None and before.killed_by:
                    panel, rounds = panel_of(before.killed_by), before.rounds
                    verdict = judge(mutant, tree, witnesses, panel, rounds)
                    judged.append(verdict if verdict.killed_by else replace(verdict, rounds=0))
                    _note(judged[-1], args.home)
            _settle(judged, found, witnesses, args.home)
        for turn in range(args.rounds):
            judged = []
            for mutant in sample:
                before = found.get(mutant.lasting_name)
                if before is None or (before.killed_by is None and before.rounds <= turn):
                    panel = witnesses.panel(mutant, turn)
                    judged.append(judge(mutant, tree, witnesses, panel, turn + 1))
                    _note(judged[-1], args.home)
            _settle(judged, found, witnesses, args.home)


def _settle(
    judged: list[Verdict], found: dict[str, Verdict], witnesses: Witnesses, home: Path
) -> None:
    """What was found, but for what fails without a change, too."""
    wrong = witnesses.unsound({each.killed_by for each in judged if each.killed_by})
    for verdict in judged:
        found[verdict.mutant] = verdict
        if verdict.killed_by in wrong:
            print(f"fails without a change, too: {verdict.killed_by}", flush=True)
            found[verdict.mutant] = replace(verdict, killed_by=None, rounds=0)
            _note(found[verdict.mutant], home)


def _note(verdict: Verdict, home: Path) -> None:
    line = json.dumps(asdict(verdict))
    print(line, flush=True)
    with (home / "verdicts.jsonl").open("a") as file:
        file.write(f"{line}\n")


def main() -> None:
    args = arguments()
    os.chdir(ROOT)
    args.home.mkdir(parents=True, exist_ok=True)
    sample, excused = drawn(args.count, args.seed, args.home)
    sample = [each for each in sample[args.first : args.end] if args.only in each.lasting_name]
    found = known(args.home / "verdicts.jsonl")
    if args.again:
        found = {name: verdict for name, verdict in found.items() if verdict.killed_by}
    judge_all(sample, found, args)
    alive = [each for each in sample if found[each.lasting_name].killed_by is None]
    for mutant in alive:
        print("SURVIVED", change(mutant))
    for rule, count in sorted(excused.items()):
        print(f"left out: {count} by the rule: {rule}")
    rate = 1 - len(alive) / len(sample)
    print(f"{len(sample)} mutants, {len(alive)} survived: {100 * rate:.1f} % were noticed")


if __name__ == "__main__":
    main()
