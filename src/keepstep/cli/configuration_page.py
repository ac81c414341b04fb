"""`docs/configuration.md`, made from the table of options.

`python -m keepstep.cli.configuration_page` prints it; `make docs` writes it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from keepstep.config.option import Option, Topic, in_words
from keepstep.config.table import OPTIONS

HEAD = """\
# Configuration

<!-- Made by `make docs` from src/keepstep/config/table.py: edit that. -->

| in code | on the command line of `keepstep run` | in the environment |
|---|---|---|
| `keepstep.protect(keepstep.Config(slots=3), model=model)` | `--slots 3` | `KEEPSTEP_SLOTS=3` |

Every option can be set in each of these ways, under the same name. Secrets have no flag
({secrets}): everybody on a machine can read a command line. Code wins over a
flag, a flag over a variable, a variable over the default. An unknown name or an impossible value is
an error, which says what was expected and what was found. With several nodes, set the same values
on each; only `host` and `rack` may differ.
"""

AGENTS = (
    "The agents of `keepstep run` begin before the program does, and hear nothing of what it says "
    "in code. What they read is given on the command line or in the environment: {agents}; with "
    "several nodes {meeting}, too. A start whose code says otherwise tells so (`option-unheard`)."
)


def page(options: Iterable[Option]) -> str:
    """The whole page, as Markdown."""
    options = list(options)
    secrets = ", ".join(f"`{option.name}`" for option in options if option.is_secret)
    sections = [
        _section(topic, [option for option in options if option.topic is topic]) for topic in Topic
    ]
    agents, meeting = (
        ", ".join(f"`{option.name}`" for option in options if option.agents_from == nodes)
        for nodes in (1, 2)
    )
    about = textwrap.fill(AGENTS.format(agents=agents, meeting=meeting), 100)
    head = HEAD.format(secrets=secrets)
    return "\n".join([head, about, "", *filter(None, sections)])


def _section(topic: Topic, options: list[Option]) -> str:
    if not options:
        return ""
    rows = [_row(option) for option in options]
    return "\n".join(
        [
            f"## {topic.value}",
            "",
            "| option | value | for example | default | what it does |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _row(option: Option) -> str:
    cells = (
        f"`{option.name}`",
        option.check.expected,
        f"`{in_words(option.example)}`",
        option.default_words,
        option.help,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    print(page(OPTIONS), end="")
