"""Entrance: what is said in code and heard by nobody is an error, or told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from keepstep.config import Settings, from_mapping, resolve
from keepstep.config.option import Option
from keepstep.config.table import OPTIONS
from keepstep.errors import ConfigError
from keepstep.model.launch import AGENT_SOCKET
from keepstep.runtime.agent import process as agent_process
from keepstep.runtime.rank.entrance import check_encrypt_is_heard, unheard_options

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


def _told(code: dict[str, object], nodes: int = 1, **environ: str) -> str:
    below = {**BELOW_AN_AGENT, **environ}
    return unheard_options(resolve(code, below, "j"), below, nodes)


def test_what_only_agents_read_and_code_alone_says_is_named_with_the_places_for_it() -> None:
    told = _told({"hang_after_s": 90.0, "budget": "crash=3", "slots": 4})
    assert told.startswith("hang_after_s, budget: set in code")
    for way in ("--hang-after-s or KEEPSTEP_HANG_AFTER_S", "--budget or KEEPSTEP_BUDGET"):
        assert way in told
    assert "slots" not in told


def test_of_a_secret_neither_its_value_nor_a_flag_is_told() -> None:
    told = _told({"secret": "correct-horse-battery-staple"}, nodes=2)
    assert told.startswith("secret: ") and told.endswith("Set there: KEEPSTEP_SECRET")
    assert "horse" not in told


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.agents_from], ids=lambda o: o.name)
def test_each_option_that_agents_read_is_told_in_such_a_job_alone(option: Option) -> None:
    below = {**BELOW_AN_AGENT, "HOME": "/h"}
    code = {option.name: option.example}
    if option.name == "slow_ranks":
        code = {"slow_ranks": "swap"}
    settings = resolve(code, below, "j")
    for nodes in (1, 2):
        told = unheard_options(settings, below, nodes)
        assert told.startswith(f"{option.name}: ") == (nodes >= option.agents_from), told
    both = {**below, **from_mapping(code).to_env()}
    assert unheard_options(resolve(code, both, "j"), both, nodes=2) == "", "both agree"
    assert unheard_options(resolve({}, both, "j"), both, nodes=2) == "", "code says nothing"
    assert unheard_options(settings, {"HOME": "/h"}, nodes=2) == "", "there is no agent"


def test_ranks_that_measure_nothing_need_no_agent_for_that() -> None:
    assert _told({"slow_ranks": "off"}) == ""


def test_each_option_that_an_agent_keeps_is_one_of_which_code_is_not_heard() -> None:
    """What `AgentOptions` and the agent's process take of the settings, but for what ranks tell
    their keepers, what is compared, and what is an error."""
    read = set[str]()
    agent = Path(agent_process.__file__).parent
    for path in (*agent.glob("*.py"), agent.parents[1] / "dashboard" / "serving.py"):
        read |= set(re.findall(r"\bsettings\.(\w+)", path.read_text()))
    names = {option.name for option in OPTIONS}
    elsewhere = {"job", "store", "keep", "slots", "redundancy", "state_dir", "encrypt"}
    expected = {option.name for option in OPTIONS if option.agents_from}
    assert (read & names) - {"arena_dir"} - elsewhere == expected - {"prebuild"}
