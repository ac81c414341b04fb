"""Sample of mutants: which small wrong changes of the product the tests have to notice.

Comes in: modules, a number and a seed. Goes out: mutants, each a place in a module and the code
with that one change. cosmic-ray makes the changes. A place is drawn first, then one of the changes
that are possible there, so that an operator with twelve wrong neighbours does not count twelve
times. What Python never looks at while it runs, annotations, is no place.

Some changes nothing can notice in a program that is right, and a rule says which (`EXCUSED`): their
places are left out, of the whole sample alike, counted, and others drawn in their stead.

Invariant: whether a place is in the sample depends on its own line alone, so that a change of the
product leaves the rest of the sample, and what was found of it, as they were.
"""

from __future__ import annotations

import ast
import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from parso.tree import Leaf, NodeOrLeaf

Position = tuple[int, int]  # line and column, as parso counts them
Span = tuple[Position, Position]

# What only forbids what no code does, or is read by mypy alone.
EXCUSED: dict[str, Callable[[ast.AST], Iterator[Span]]] = {
    "frozen or slots of a dataclass": lambda node: _keywords(node, "dataclass", "frozen", "slots"),
    "strict of zip": lambda node: _keywords(node, "zip", "strict"),
    "if TYPE_CHECKING": lambda node: _type_checking(node),
}


@dataclass(frozen=True, slots=True)
class Mutant:
    module: Path
    operator: str
    occurrence: int
    line: int
    place: str  # the same wherever its line moves to
    excused: str | None = None  # by which rule

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


def draw(modules: Sequence[Path], count: int, seed: int) -> tuple[list[Mutant], Counter[str]]:
    """`count` mutants at different places, the same for the same lines and seed; and how many
    places were drawn and left out by each rule."""
    places: list[list[Mutant]] = []
    for module in modules:
        places += _places(module)
    places.sort(key=lambda found: _lot(seed, found[0].place))
    sample: list[Mutant] = []
    excused: Counter[str] = Counter()
    for found in places:
        mutant = _chosen(found, seed)
        if mutant is None:
            continue
        if len(sample) == count:
            break
        if mutant.excused:
            excused[mutant.excused] += 1
        else:
            sample.append(mutant)
    return sample, excused


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
    names = names_of(module, lines)
    tree = ast.parse(text)
    ignored = list(_annotations(tree))
    excused = [
        (span, rule) for node in ast.walk(tree) for rule, of in EXCUSED.items() for span in of(node)
    ]
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
                rules = (rule for (begin, end), rule in excused if begin <= at < end)
                mutant = Mutant(module, name, occurrence, at[0], place, next(rules, None))
                found[at].append(mutant)
    return [found[at] for at in sorted(found)]


def names_of(module: Path, lines: Sequence[str]) -> list[str]:
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


def _annotations(tree: ast.Module) -> Iterator[Span]:
    for node in ast.walk(tree):
        for each in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(each, ast.expr):
                yield _span(each)


def _keywords(node: ast.AST, function: str, *names: str) -> Iterator[Span]:
    """What a call gives to these."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function:
        yield from (_span(each.value) for each in node.keywords if each.arg in names)


def _type_checking(node: ast.AST) -> Iterator[Span]:
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        (begin_line, begin), end = _span(node.test)
        yield (begin_line, begin - len("if ")), end


def _span(node: ast.expr) -> Span:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
