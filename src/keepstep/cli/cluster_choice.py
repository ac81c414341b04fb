"""Which cluster `keepstep simulate` and `keepstep plan` are asked about, and numbers by commas."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from keepstep.errors import ConfigError
from keepstep.model.cluster import Cluster
from keepstep.sim.economics.clusters import cluster_from
from keepstep.sim.economics.presets import PRESETS, preset

FileArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="CLUSTER.toml",
        help="File that describes the cluster (docs/operations.md). Or give --preset.",
        show_default=False,
    ),
]
PresetOption = Annotated[
    str | None,
    typer.Option(
        "--preset",
        metavar="NAME",
        help=f"A known cluster: {', '.join(PRESETS)}.",
        show_default=False,
    ),
]


def chosen_cluster(file: Path | None, name: str | None) -> Cluster:
    """The cluster of that file, or the known one of that name. Raises ConfigError unless there is
    exactly one of them, and when it cannot be read."""
    if file is not None and name is None:
        return cluster_from(_document(file), file.stem)
    if name is not None and file is None:
        return preset(name)
    found = "both" if file else "neither"
    raise ConfigError(
        f"cluster: expected a file or --preset NAME ({', '.join(PRESETS)}), found {found}"
    )


def _document(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cluster: expected a file that can be read, found {str(path)!r}: {error.strerror}"
        ) from error
    except ValueError as error:  # no TOML, or no text at all
        raise ConfigError(f"cluster: expected TOML in {str(path)!r}, found {error}") from error


def resized(cluster: Cluster, nodes: int | None, failures_per_day: float | None) -> Cluster:
    """The cluster with another number of nodes, which fail as often each; or with another number of
    failures a day, of the same kinds. Raises ConfigError."""
    if nodes is not None:
        cluster = replace(cluster, nodes=nodes)
    if failures_per_day is None:
        return cluster
    if cluster.failures_per_day == 0:
        raise ConfigError("--failures-per-day: expected a cluster that has failures, found none")
    factor = failures_per_day / cluster.failures_per_day
    return replace(
        cluster,
        failures=tuple(
            replace(kind, per_node_day=kind.per_node_day * factor) for kind in cluster.failures
        ),
    )


def numbers(text: str | None, option: str) -> list[float]:
    """`3,5`; none for None. Raises ConfigError when one is no number, or negative."""
    found: list[float] = []
    for part in [] if text is None else text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise ConfigError(
                f"{option}: expected numbers of 0 or more, such as 3,5, found {part.strip()!r}"
            )
        found.append(value)
    return found


def whole_numbers(text: str | None, option: str) -> list[int]:
    """The same; raises ConfigError when one is no whole number above 0, too."""
    found = numbers(text, option)
    if any(value != int(value) or value < 1 for value in found):
        raise ConfigError(f"{option}: expected whole numbers of 1 or more, found {text!r}")
    return [int(value) for value in found]
