"""Real processes take long: `make test` walks each road once, by the tests that are marked
`everyday`; `make soak` has all others. A job fills the machine: where tests run side by side, these
run one after the other, and begin first.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
LAST_LINES = 12


@pytest.hookimpl(tryfirst=True)  # before what is not asked for is left out by its marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.xdist_group("processes"))
        if item.get_closest_marker("everyday") is None:
            item.add_marker(pytest.mark.soak)
    items.sort(key=lambda item: HERE not in item.path.parents)


class FailuresAtOnce:
    """Tells each failure when it happens. They take minutes, and a run that is cut short would
    never tell."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.ensure_newline()
            last = "\n".join(report.longreprtext.splitlines()[-LAST_LINES:])
            terminal.write_line(f"{report.nodeid} failed after {report.duration:.0f} s:\n{last}")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(config))
