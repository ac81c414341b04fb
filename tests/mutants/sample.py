"""Sample of mutants: which small wrong changes of the product the tests have to notice.

Comes in: modules, a number and a seed. Goes out: mutants, each a place in a module and the code
with that one change. cosmic-ray makes the changes. A place is drawn first, then one of the changes
that are possible there, so that an operator with twelve wrong neighbours does not count twelve
times. What Python never looks at while it runs, annotations, is no place.

Invariant: whether a place is in the sample depends on its own line alone, so that a change of the
product leaves the rest of the sample, and what was found of it, as they were.
"""

from __future__ import annotations

import ast
import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from parso.tree import Leaf, NodeOrLeaf

Position = tuple[int, int]  # line and column, as parso counts them


@dataclass(frozen=True, slots=True)
class Mutant:
    module: Path
    operator: str
    occurrence: int
    line: int
    place: str  # the same wherever its line moves to

    @property
    def name(self) -> str:
        return f"{self.module}:{self.line} {self._operator}"

    @property
    def lasting_name(self) -> str:
        return f"{self.place} {self._operator}"

    def code(self, original: str) -> str:
        """The module with this one change."""
        changed = mutate_code(original, get_operator(self.operator)(), self.occurrence)
        assert isinstance(changed, str), self.name
        return changed

    @property
    def _operator(self) -> str:
        return self.operator.removeprefix("core/")


def draw(modules: Sequence[Path], count: int, seed: int) -> list[Mutant]:
    """`count` mutants at different places, the same for the same lines and seed."""
    places: list[list[Mutant]] = []
    for module in modules:
        places += _places(module)
    places.sort(key=lambda found: _lot(seed, found[0].place))
    sample = (_chosen(found, seed) for found in places)
    return list(islice((mutant for mutant in sample if mutant is not None), count))


def _lot(seed: int, place: str) -> bytes:
    return hashlib.sha256(f"{seed} {place}".encode()).digest()


def _chosen(found: list[Mutant], seed: int) -> Mutant | None:
    """One of the changes at a place that Python can read, if there is one."""
    rng = random.Random(_lot(seed, found[0].place))
    left = list(found)
    while left:
        mutant = rng.choice(left)
        try:
            ast.parse(mutant.code(mutant.module.read_text()))
        except SyntaxError:
            left.remove(mutant)
        else:
            return mutant
    return None


def _places(module: Path) -> list[list[Mutant]]:
    """The changes possible at each place of it."""
    text = module.read_text()
    lines = text.splitlines()
    names = _names(module, lines)
    ignored = list(_annotations(text))
    # hundreds of operators look at every node
    nodes = [node for node in ast_nodes(get_ast(text)) if not _is_left_alone(node)]
    found: dict[Position, list[Mutant]] = defaultdict(list)
    for name in operator_names():
        kind = get_operator(name)
        if kind.arguments():
            continue  # needs to be told names of variables
        operator = kind()
        positions = (at for node in nodes for at, _ in operator.mutation_positions(node))
        for occurrence, at in enumerate(positions):
            if not any(begin <= at < end for begin, end in ignored):
                line = lines[at[0] - 1]
                into = at[1] - (len(line) - len(line.lstrip()))
                place = f"{names[at[0] - 1]} at {into}"
                found[at].append(Mutant(module, name, occurrence, at[0], place))
    return [found[at] for at in sorted(found)]


def _names(module: Path, lines: Sequence[str]) -> list[str]:
    """A name for each line that it keeps when others come and go."""
    seen: Counter[str] = Counter()
    names = []
    for line in lines:
        words = line.strip()
        seen[words] += 1
        again = f" ({seen[words]})" if seen[words] > 1 else ""
        names.append(f"{module} `{words}`{again}")
    return names


def _is_left_alone(node: NodeOrLeaf) -> bool:
    """Whether no operator changes it by itself."""
    if node.type == "operator":
        return isinstance(node, Leaf) and node.value in "()[]{},.:="
    return node.type in ("name", "string", "newline", "endmarker")


def _annotations(text: str) -> Iterator[tuple[Position, Position]]:
    for node in ast.walk(ast.parse(text)):
        for each in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(each, ast.expr):
                assert each.end_lineno is not None and each.end_col_offset is not None
                yield (each.lineno, each.col_offset), (each.end_lineno, each.end_col_offset)
