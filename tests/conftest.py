"""What every test stands on: seeded examples, and an environment that holds nothing of the
user's."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from hypothesis import settings

# Derandomized: a red run is red again. Time limits are pytest-timeout's: a busy machine is not a
# failure.
settings.register_profile("keepstep", derandomize=True, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "keepstep"))

# as in a shell's background jobs; a program that is started so cannot be interrupted
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Like pytest's own, with a shorter name: a keeper's socket stands below it, and its path has
    107 bytes at most."""
    return tmp_path_factory.mktemp(re.sub(r"\W", "_", request.node.name)[:16])


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No KEEPSTEP_* setting and no launcher's rank leaks in; journals go below the test's own
    directory."""
    for name in list(os.environ):
        if name.startswith(("KEEPSTEP_", "TORCHELASTIC_", "SLURM_")) or name in {
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
        }:
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
