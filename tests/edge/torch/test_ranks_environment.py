"""What ranks are given in their environment: what staying in a process needs on a device, and only
where somebody wants to try that."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.edge.os.loop import Loop
from keepstep.edge.torch.ranks import TorchRankProcesses, line_prefix
from keepstep.model.device import STAYING, UNTESTED_NCCL
from keepstep.model.launch import AGENT_SOCKET, Launch, RankAssignment
from tests.runtime.fakes import FakeExecutor

PLACE = RankAssignment(0, 0, 1, 0, 1, "h", 1)


def environ(tmp_path: Path) -> dict[str, str]:
    loop = Loop()
    ranks = TorchRankProcesses(
        loop,
        FakeExecutor(),
        Launch(command=("true",), argv=(), ranks=1),
        "j",
        {AGENT_SOCKET: str(tmp_path / "agent.sock")},
    )
    found = ranks.environ_of(0, PLACE)
    ranks.close(keep_errors=False)
    loop.close()
    return found


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (UNTESTED_NCCL, *(variable.name for variable in STAYING)):
        monkeypatch.delenv(name, raising=False)


def test_groups_of_torch_s_own_are_left_as_they_are(tmp_path: Path) -> None:
    found = environ(tmp_path)
    given = {v.name: found[v.name] for v in STAYING if v.name in found}
    assert given == {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


def test_who_would_try_groups_over_nccl_gets_what_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(UNTESTED_NCCL, "1")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    found = environ(tmp_path)
    assert {v.name: found[v.name] for v in STAYING} == {
        **{v.name: v.value for v in STAYING},
        "NCCL_NVLS_ENABLE": "1",
    }


def test_what_is_shown_of_a_rank_begins_with_its_number_in_the_job() -> None:
    assert line_prefix("default", 1, {"RANK": "9"}) == "rank9"
    assert line_prefix("trainer", 1, {"RANK": "9"}) == "trainer1"
