"""Entrance: what is said in code and heard by nobody is an error."""

from __future__ import annotations

import pytest

from keepstep.config import Settings, resolve
from keepstep.errors import ConfigError
from keepstep.model.launch import AGENT_SOCKET
from keepstep.runtime.rank.entrance import check_encrypt_is_heard

SAID = {"encrypt": True, "secret": "correct-horse-battery-staple", "state_dir": "/s"}
BELOW_AN_AGENT = {AGENT_SOCKET: "/dev/shm/x/agent.sock", "HOME": "/h"}


def _settings() -> Settings:
    return resolve(SAID, {}, "j")


def test_encryption_that_the_agents_were_not_told_is_refused() -> None:
    """The program believed that what nodes send each other was encrypted, and it was not."""
    with pytest.raises(ConfigError, match="nothing would be encrypted"):
        check_encrypt_is_heard(_settings(), BELOW_AN_AGENT)


@pytest.mark.parametrize("environ", [{**BELOW_AN_AGENT, "KEEPSTEP_ENCRYPT": "1"}, {"HOME": "/h"}])
def test_encryption_that_the_agents_know_of_or_where_none_are_is_fine(
    environ: dict[str, str],
) -> None:
    check_encrypt_is_heard(_settings(), environ)
