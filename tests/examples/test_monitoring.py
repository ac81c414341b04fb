"""The board and the alerts ask for metrics and labels that agents serve, and for no others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from keepstep.edge.net.metrics_server import Exposition, Reading
from keepstep.model.parts import PartHealth, PartsReport
from keepstep.model.rhythm import Interleaved
from keepstep.model.snapshot import Phase, RankStatus

MONITORING = Path(__file__).parents[2] / "examples" / "monitoring"
BOARD = json.loads((MONITORING / "grafana.json").read_text())
RULES = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
# of the scrape, not of the agent
SCRAPED = {"instance", "job"}
ASKED = re.compile(r"(keepstep_\w+)(?:\{([^}]*)\})?")
BY = re.compile(r"\bby \(([^)]*)\)")


@pytest.fixture(scope="module")
def served() -> dict[str, set[str]]:
    """The labels of every metric, by its name as a query says it."""
    facts: dict[str, Any] = {**dict.fromkeys(RankStatus._fields, 0), "phase": Phase.FORWARD}
    page = RankStatus(**{**facts, "slots": ()})
    reading = Reading(
        job="j",
        ranks={0: (True, page)},
        committed_step=1,
        keeper_alive=True,
        held_bytes={"own": 1},
        spent_ns={"productive": 1},
        recoveries=(("crash", 1, 0),),
        interleaved=Interleaved(*[0] * len(Interleaved.__dataclass_fields__)),
        stored_step=1,
        redundancy_is_off=False,
        slow_ratios={0: 0.5},
        slow_links=(("link", (0, 1), 3.0),),
        damaged_counts={1: 12},
        parts=PartsReport(1, "", (PartHealth("clock", "ok"),)),
    )
    exposition = Exposition(lambda: reading, 0, "127.0.0.1")
    families = list(exposition.collect())
    exposition.close()
    found: dict[str, set[str]] = {}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def board_queries() -> Iterator[str]:
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]


QUERIES = [*board_queries(), *(rule["expr"] for rule in RULES)]


@pytest.mark.parametrize("query", QUERIES)
def test_what_is_asked_for_is_served(query: str, served: dict[str, set[str]]) -> None:
    asked = ASKED.findall(query)
    assert asked
    labels: set[str] = set()
    for name, chosen in asked:
        assert name in served, f"no agent serves {name}"
        wanted = {part.split("=")[0].rstrip("!~").strip() for part in chosen.split(",") if part}
        assert wanted <= served[name] | SCRAPED, f"{name} has {served[name]}"
        labels |= served[name]
    for by in BY.findall(query):
        assert {label.strip() for label in by.split(",")} <= labels | SCRAPED


def test_every_metric_is_on_the_board(served: dict[str, set[str]]) -> None:
    text = json.dumps(BOARD)
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in served}
    beside = {"keepstep_epoch", "keepstep_keeper_up"}  # an alert, and nothing to draw
    beside |= {"keepstep_interleave_plans_total", "keepstep_interleave_step_seconds"}
    assert {name for name in families if name not in text} <= beside


def test_panels_are_apart_and_have_a_unit() -> None:
    places: list[tuple[int, int]] = []
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        places += [
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        ]
        if panel["type"] != "row":
            assert panel["fieldConfig"]["defaults"]["unit"] and panel["description"]
    assert len(places) == len(set(places)), "two panels lie on each other"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_says_what_to_do(rule: Any) -> None:
    assert rule["annotations"]["summary"] and rule["annotations"]["do"]
    assert rule["labels"]["severity"] in ("page", "warn")
