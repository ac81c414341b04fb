"""The rules of docs/architecture.md that can be read off the source: layers, sizes, names, what is
caught, no sleeping."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"

# Who may import whom, beside itself: the table of docs/architecture.md. `keepstep` alone is the
# public face.
FOUNDATION = {"codes", "errors", "model"}
INNER = FOUNDATION | {"config", "ports", "core", "coding"}
LAYERS = {
    "codes": set(),
    "errors": {"codes"},
    "model": {"errors"},
    "config": FOUNDATION,
    "core": FOUNDATION,
    "coding": FOUNDATION,
    "ports": FOUNDATION,
    "edge": FOUNDATION | {"config", "ports", "coding"},
    "edge.torch": FOUNDATION | {"config", "ports", "coding", "edge"},
    # Its protocol half runs the keepers themselves, on memory laid out by the formats of edge;
    # runtime never imports it.
    "sim": INNER | {"edge", "runtime"},
    "runtime": INNER | {"edge", "edge.torch"},
    "integrations": INNER | {"edge", "edge.torch", "runtime", "keepstep"},
    "ray": FOUNDATION | {"config", "ports", "edge", "edge.torch"},
    "dashboard": FOUNDATION | {"config", "core", "ports", "edge"},
    "testing": INNER | {"edge", "edge.torch", "runtime", "dashboard", "keepstep"},
    "cli": INNER | {"edge", "edge.torch", "sim", "runtime", "dashboard", "testing", "keepstep"},
    "keepstep": INNER | {"edge", "edge.torch", "runtime"},
    "__main__": {"cli"},
}

# the rooms in which JSON is parsed, for all others
DECODERS = {"keepstep.model.decoding", "keepstep.core.wire.codec"}

# Layers that only compute: the world reaches them as arguments.
PURE = {"codes", "errors", "model", "core"}
WORLD = {
    *(
        "asyncio",
        "ctypes",
        "datetime",
        "fcntl",
        "glob",
        "io",
        "logging",
        "mmap",
        "multiprocessing",
        "os",
        "pathlib",
        "random",
    ),
    *(
        "secrets",
        "select",
        "shutil",
        "signal",
        "socket",
        "subprocess",
        "sys",
        "tempfile",
        "threading",
        "time",
    ),
}
NATIVE = {"numpy", "torch", "xxhash", "fsspec", "rich", "typer", "psutil"}

# What is shown to a person may be somebody else's words.
SCREEN = "keepstep.dashboard.screen"

# The keeper's runtime, which runs in a simulated world too: it asks ports, and knows of `edge` only
# the formats over a Memory.
FORMATS = {
    f"keepstep.edge.shm.{name}"
    for name in (
        "slot",
        "slot_header",
        "horizon_page",
        "slot_store",
        "node_safety_file",
        "status_page",
        "double_buffered_page",
        "collective_profile_page",
        "step_work_page",
        "text_file",
        "whole",
    )
}
ON_PORTS = {
    *(
        f"keepstep.runtime.keeper.{name}"
        for name in (
            "resume",
            "keeper",
            "run",
            "checkpointing",
            "checkpoint_desk",
            "persister_client",
            "scrubber",
        )
    ),
    *(f"keepstep.runtime.{name}" for name in ("rank.commit_view", "slot_locks", "keeper_world")),
    *(f"keepstep.runtime.persister.{name}" for name in ("conversation", "persister", "server")),
    *(
        f"keepstep.runtime.replication.{name}"
        for name in (
            "encode",
            "fetch",
            "holder",
            "leader",
            "link_watch",
            "peer_inbox",
            "node",
            "owner",
            "receive",
        )
    ),
    *(f"keepstep.runtime.replication.{name}" for name in ("recovery", "serve", "dedup", "pacing")),
    # whose owner waits for a predecessor that is just dying
    *(FORMATS - {"keepstep.edge.shm.status_page"}),
}
SEES_NO_WORLD = {"pathlib", "threading"}  # of a path only the name; and locks
FILE_ACTS = {
    *(
        "chmod",
        "exists",
        "glob",
        "is_dir",
        "is_file",
        "iterdir",
        "mkdir",
        "read_bytes",
        "read_text",
        "rglob",
        "rmdir",
        "stat",
        "touch",
    ),
    *("unlink", "write_bytes", "write_text"),
}

TORCH_LAYERS = {"edge.torch", "integrations", "testing"}
TORCH_MODULES = {
    "keepstep.runtime.rank.session",
    "keepstep.runtime.persister.process",
    "keepstep.runtime.agent.agent",
}

MODULE_LINES = 600
FUNCTION_LINES = 60
NAMES_THAT_SAY_NOTHING = {"base", "common", "helper", "helpers", "manager", "misc", "util", "utils"}


@dataclass(frozen=True)
class Source:
    """One module of the package: `keepstep.edge.shm.slot` and what it says."""

    name: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def layer(self) -> str:
        return layer_of(self.name)


def read_package() -> list[Source]:
    sources = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        parts = path.relative_to(ROOT / "src").with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources.append(Source(name, path.read_text(encoding="utf-8")))
    return sources


PACKAGE = read_package()
MODULES = {source.name for source in PACKAGE}


def layer_of(module: str) -> str:
    """`edge.torch` for keepstep.edge.torch.capture, `edge` for keepstep.edge.shm.slot, `keepstep`
    for the package itself."""
    parts = module.split(".")[1:]
    if parts[:2] == ["edge", "torch"]:
        return "edge.torch"
    return parts[0] if parts else "keepstep"


def imports(tree: ast.AST) -> Iterator[str]:
    """Modules imported at run time, at any depth. What stands under `if TYPE_CHECKING` is for
    readers only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and node.level == 0, (
                f"a relative import: {ast.unparse(node)}"
            )
            for alias in node.names:
                longer = f"{node.module}.{alias.name}"
                yield longer if longer in MODULES else node.module
        yield from imports(node)


def layer_offences(source: Source) -> list[str]:
    offences = []
    for module in imports(source.tree):
        top = module.split(".")[0]
        if top == "keepstep":
            if layer_of(module) not in LAYERS[source.layer] | {source.layer}:
                offences.append(
                    f"{source.name} ({source.layer}) imports {module}: imports point down only"
                )
        elif source.layer in PURE and top in WORLD | NATIVE:
            offences.append(
                f"{source.name} imports {module}: {source.layer} does no IO and reads no clock"
            )
        if top == "torch" and source.layer not in TORCH_LAYERS and source.name not in TORCH_MODULES:
            offences.append(f"{source.name} imports {module}: torch lives in edge/torch")
    return offences


def port_offences(source: Source) -> list[str]:
    """How a module that is to run in any world reaches into the real one."""
    found = [
        name
        for name in imports(source.tree)
        if name.split(".")[0] in WORLD - SEES_NO_WORLD or is_real(name)
    ]
    acts = [
        node.attr
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and node.attr in FILE_ACTS
    ]
    return [f"{source.name} imports {name}" for name in found] + [
        f"{source.name} calls .{act}" for act in acts
    ]


def is_real(module: str) -> bool:
    return layer_of(module) in ("edge", "edge.torch") and module not in FORMATS


def size_offences(source: Source) -> list[str]:
    lines = len(source.text.splitlines())
    offences = (
        [f"{source.name} has {lines} lines, {MODULE_LINES} allowed"] if lines > MODULE_LINES else []
    )
    for node in ast.walk(source.tree):
        if (
            isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and (length := body_lines(node)) > FUNCTION_LINES
        ):
            offences.append(
                f"{source.name}.{node.name} has {length} lines, {FUNCTION_LINES} allowed"
            )
    return offences


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Of its statements: a signature and a docstring explain, and explaining is free."""
    body = function.body
    if ast.get_docstring(function) is not None:
        body = body[1:]
    if not body:
        return 0
    assert body[-1].end_lineno is not None
    return body[-1].end_lineno - body[0].lineno + 1


def catch_alls(source: Source) -> list[str]:
    """Handlers that swallow everything. One that ends by raising again only tidies up."""
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler):
            caught = (
                {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)}
                if node.type
                else {"BaseException"}
            )
            last = node.body[-1]
            raises_again = isinstance(last, ast.Raise) and last.exc is None
            if caught & {"Exception", "BaseException"} and not raises_again:
                found.append(f"{source.name}:{node.lineno}")
    return found


def parses_json(source: Source) -> list[str]:
    """Where JSON is read without `from_json`, whose one error is all that any text brings about.
    `testing` reads what the tests themselves have written."""
    layer = source.name.split(".")[1:2]
    if source.name in DECODERS or layer == ["testing"]:
        return []
    found = []
    for node in ast.walk(source.tree):
        match node:
            case ast.Attribute(value=ast.Name("json"), attr=name):
                names = [name]
            case ast.ImportFrom(module="json"):
                names = [alias.name for alias in node.names]
            case _:
                continue
        if {"load", "loads", "JSONDecoder"} & set(names):
            found.append(f"{source.name}:{node.lineno}")
    return found


def own_consoles(source: Source) -> list[str]:
    """Where a rich console is made that is no `Screen`: a name in what it prints could end the
    command, or act on the terminal."""
    return [
        f"{source.name}:{node.lineno}"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).split(".")[-1] == "Console"
        and source.name != SCREEN
    ]


# Where `-m` is a word of the user's.
USERS_MODULES = {
    "keepstep.cli.lab",
    "keepstep.cli.launch_arguments",
    "keepstep.core.recovery.standby",
    "keepstep.runtime.rank.standby",
    "keepstep.testing.crew",
}


def looks_in_the_working_directory(source: Source) -> list[str]:
    """Where a Python is started by `-m`, which finds anybody's modules before keepstep's
    (`edge/os/own_modules.py`)."""
    return [
        f"{source.name}:{node.lineno}"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant) and node.value == "-m"
        if source.name not in USERS_MODULES
    ]


def sleeps(text: str) -> list[int]:
    """Lines that use time.sleep, under whatever name `time` was imported."""
    nodes = list(ast.walk(ast.parse(text)))
    aliases = [alias for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    clocks = {alias.asname or alias.name for alias in aliases if alias.name == "time"}
    return [
        node.lineno
        for node in nodes
        if isinstance(node, (ast.ImportFrom, ast.Attribute)) and is_sleep(node, clocks)
    ]


def is_sleep(node: ast.ImportFrom | ast.Attribute, clocks: set[str]) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "time" and any(alias.name == "sleep" for alias in node.names)
    return node.attr == "sleep" and isinstance(node.value, ast.Name) and node.value.id in clocks


@pytest.mark.parametrize("source", PACKAGE, ids=lambda source: source.name)
def test_module_keeps_to_its_layer_and_size(source: Source) -> None:
    assert layer_offences(source) == []
    assert size_offences(source) == []


@pytest.mark.parametrize(
    "source", [s for s in PACKAGE if s.name in ON_PORTS], ids=lambda source: source.name
)
def test_a_keeper_touches_the_world_through_ports_alone(source: Source) -> None:
    assert port_offences(source) == []


def test_the_keepers_modules_are_all_there() -> None:
    assert ON_PORTS <= MODULES


def test_every_layer_is_in_the_table() -> None:
    assert {source.layer for source in PACKAGE} <= set(LAYERS)


def test_module_names_say_what_is_inside() -> None:
    assert [
        name for name in sorted(MODULES) if name.rpartition(".")[2] in NAMES_THAT_SAY_NOTHING
    ] == []


def test_at_most_one_handler_swallows_everything() -> None:
    found = [place for source in PACKAGE for place in catch_alls(source)]
    assert len(found) <= 1, found


def test_json_is_parsed_where_it_is_decoded() -> None:
    assert [place for source in PACKAGE for place in parses_json(source)] == []


def test_only_tests_of_real_processes_sleep() -> None:
    found = {
        str(path.relative_to(TESTS)): lines
        for path in sorted(TESTS.rglob("*.py"))
        if "processes" not in path.relative_to(TESTS).parts
        and (lines := sleeps(path.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("keepstep.model.layout", "import keepstep.core"),
        ("keepstep.model.layout", "from keepstep import core"),
        ("keepstep.core.resume.slots", "def f():\n    import time"),
        ("keepstep.core.resume.slots", "from keepstep.edge.os.journal import FileJournal"),
        ("keepstep.edge.shm.slot", "import torch"),
        ("keepstep.edge.shm.slot", "from keepstep.edge.torch import capture"),
        ("keepstep.runtime.keeper.keeper", "from torch import distributed"),
        ("keepstep.runtime.rank.session", "import keepstep.cli"),
        ("keepstep.dashboard.view", "from keepstep.runtime import keeper"),
    ],
)
def test_the_layer_rule_sees(module: str, line: str) -> None:
    assert len(layer_offences(Source(module, line))) == 1


def test_the_layer_rule_lets_pass() -> None:
    for_readers = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"
    assert layer_offences(Source("keepstep.edge.shm.slot", for_readers)) == []
    assert (
        layer_offences(
            Source("keepstep.runtime.rank.session", "import torch\nimport keepstep.edge.torch")
        )
        == []
    )


@pytest.mark.parametrize(
    "line",
    [
        "import os",
        "def f():\n    import time",
        "from keepstep.edge.shm.memory import MEMORY",
        "from keepstep.edge import tcp",
        "path.unlink()",
    ],
)
def test_the_rule_of_ports_sees(line: str) -> None:
    assert len(port_offences(Source("keepstep.runtime.keeper.keeper", line))) == 1


def test_the_rule_of_ports_lets_pass() -> None:
    assert (
        port_offences(
            Source(
                "keepstep.runtime.keeper.keeper",
                "from pathlib import Path\nfrom keepstep.edge.shm.slot import Slot\nm.open(p)",
            )
        )
        == []
    )


def test_the_size_rule_sees() -> None:
    body = "    x = 1\n" * (FUNCTION_LINES + 1)
    assert size_offences(Source("keepstep.core.resume.slots", f"def f():\n{body}")) != []
    assert (
        size_offences(
            Source(
                "keepstep.core.resume.slots",
                f'def f():\n    """One.\n\n    Two.\n    """\n{body[20:]}',
            )
        )
        == []
    )
    assert size_offences(Source("keepstep.core.resume.slots", "\n" * (MODULE_LINES + 1))) != []


@pytest.mark.parametrize(
    "what", ["", " Exception", " (OSError, Exception)", " BaseException as error"]
)
def test_the_handler_rule_sees(what: str) -> None:
    assert catch_alls(Source("keepstep.cli.main", f"try:\n    f()\nexcept{what}:\n    pass")) == [
        "keepstep.cli.main:3"
    ]
    assert (
        catch_alls(Source("keepstep.cli.main", f"try:\n    f()\nexcept{what}:\n    g()\n    raise"))
        == []
    )


@pytest.mark.parametrize(
    "text", ["json.loads(x)", "json.load(file)", "from json import loads", "json.JSONDecoder()"]
)
def test_the_rule_of_decoding_sees(text: str) -> None:
    assert parses_json(Source("keepstep.edge.os.journal", text)) == ["keepstep.edge.os.journal:1"]
    assert parses_json(Source("keepstep.testing.lines", text)) == []
    assert parses_json(Source("keepstep.edge.os.journal", "json.dumps(x)")) == []


def test_the_rule_of_modules_sees() -> None:
    text = "[sys.executable, '-m', 'keepstep.cli.main']"
    assert looks_in_the_working_directory(Source("keepstep.a", text)) == ["keepstep.a:1"]


@pytest.mark.parametrize("source", PACKAGE, ids=lambda source: source.name)
def test_no_process_of_keepsteps_takes_modules_from_the_working_directory(source: Source) -> None:
    assert looks_in_the_working_directory(source) == []


@pytest.mark.parametrize("text", ["Console()", "rich.console.Console(stderr=True)"])
def test_the_rule_of_consoles_sees(text: str) -> None:
    assert own_consoles(Source("keepstep.cli.inspect", text)) == ["keepstep.cli.inspect:1"]
    assert own_consoles(Source("keepstep.cli.inspect", "Screen()")) == []


@pytest.mark.parametrize("source", PACKAGE, ids=lambda source: source.name)
def test_what_is_printed_goes_through_the_screen(source: Source) -> None:
    assert own_consoles(source) == []


@pytest.mark.parametrize(
    "text",
    ["import time\ntime.sleep(1)", "import time as t\nt.sleep(1)", "\nfrom time import sleep"],
)
def test_the_sleep_rule_sees(text: str) -> None:
    assert sleeps(text) == [2]


@pytest.mark.parametrize("source", PACKAGE, ids=lambda source: source.name)
def test_the_oldest_python_can_read_the_annotations(source: Source) -> None:
    """The codec reads them, and Python 3.10 refuses a ClassVar that does not say of what."""
    bare = [
        node.lineno
        for node in ast.walk(source.tree)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "ClassVar"
    ]
    assert bare == []
