"""Settings: the strongest source wins, unknown names are errors, and every error says what was
expected and what was found."""

from __future__ import annotations

import os
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.config import (
    Config,
    Settings,
    from_environ,
    from_mapping,
    resolve,
    settings_from_text,
)
from keepstep.config.settings import MAX_SOCKET_PATH_BYTES
from keepstep.errors import ConfigError
from keepstep.model.hosts import first_host, parse_hosts

HOME = {"HOME": "/home/someone"}


def resolved(config: Config | dict[str, Any] | None = None, **environ: str) -> Settings:
    return resolve(config, {**HOME, **environ}, "train-0000")


def test_the_defaults() -> None:
    assert resolved() == Settings(
        job="train-0000",
        store=None,
        persist_every_steps=1000,
        keep="latest:2",
        slots=0,
        arena_dir=Path("/dev/shm"),
        grace_s=300.0,
        lazy=True,
        share_replicas="off",
        scrub_every_s=30.0,
        state_dir=Path("/home/someone/.local/state/keepstep"),
        redundancy="auto",
        host=None,
        rack=None,
        secret=None,
        link_dead_s=10.0,
        interleave="auto",
        copy_dscp=0,
        block_mac="auto",
        transport="tcp",
        encrypt=False,
        metrics_port=None,
        metrics_host="127.0.0.1",
        dashboard=False,
        dashboard_address=None,
        dashboard_token=None,
        hang_after_s=None,
        wrong_numbers="undo",
        skip_spikes=False,
        check_products=False,
        look_every_steps=8,
        calibrate_runs=0,
        replay_update_bytes=0,
        replace_command=None,
        node_provider="command",
        budget="crash=10,hang=5,oom=5,device=3,state=20,node=unlimited,killed=unlimited,refill=100",
        digest_every_steps=1,
        on_difference="tell",
        slow_ranks="tell",
        sick_parts="warn",
        canary_every_s=300.0,
        shrink_after_s=300.0,
        trusted_types="",
        prebuild="",
        log="info",
        fresh=False,
        adopt=False,
    )


def test_a_secret_is_never_shown() -> None:
    with pytest.raises(
        ConfigError, match="secret: expected at least 16 bytes, found 5 bytes"
    ) as caught:
        resolved({"secret": "hush!"})
    assert "hush" not in str(caught.value)
    settings = resolved({"secret": "something nobody knows"})
    # it becomes a command line, which everybody on the machine can read
    assert "nobody" not in settings.to_text() + repr(settings)
    assert settings_from_text(settings.to_text()) == replace(settings, secret=None)
    handed_down = settings.secret_env()
    assert settings_from_text(settings.to_text(), handed_down) == settings
    assert resolved({}).secret_env() == {}


def test_paths_that_follow() -> None:
    settings = resolved({"job": "x"})
    assert settings.job_dir == Path(f"/dev/shm/keepstep-{os.getuid()}/x")
    assert settings.journal_path == Path("/home/someone/.local/state/keepstep/x/journal.jsonl")
    assert resolved(XDG_STATE_HOME="/state").state_dir == Path("/state/keepstep")


def test_code_wins_over_environment_over_default() -> None:
    assert resolved(KEEPSTEP_SLOTS="3").slots == 3
    assert resolved(Config(slots=4), KEEPSTEP_SLOTS="3").slots == 4
    assert resolved({"lazy": False}, KEEPSTEP_LAZY="1").lazy is False


def test_the_grace_is_the_same_under_an_agent() -> None:
    assert resolved().grace_s == resolved(KEEPSTEP_AGENT="/somewhere.sock").grace_s == 300.0
    assert resolved(KEEPSTEP_AGENT="/somewhere.sock", KEEPSTEP_GRACE_S="5").grace_s == 5.0


configs = st.builds(
    Config,
    job=st.none() | st.from_regex(r"[a-z][a-z0-9._-]{0,20}", fullmatch=True),
    store=st.none() | st.sampled_from(["/mnt/store", "s3://bucket/prefix"]),
    persist_every_steps=st.none() | st.integers(0, 10**6),
    keep=st.none() | st.just("latest:3,every:100"),
    slots=st.none() | st.integers(2, 8),
    arena_dir=st.none() | st.just("/dev/shm/below"),
    grace_s=st.none() | st.floats(0, 1e6),
    lazy=st.none() | st.booleans(),
    scrub_every_s=st.none() | st.floats(0, 1e6),
    state_dir=st.none() | st.just("/var/state"),
    metrics_port=st.none() | st.integers(1, 65535),
    hang_after_s=st.none() | st.floats(4, 1e6),
)


@given(configs)
def test_a_config_survives_the_environment(config: Config) -> None:
    assert from_environ(config.to_env()) == config
    assert resolve(None, {**HOME, **config.to_env()}, "j") == resolve(config, HOME, "j")


@given(configs)
def test_a_mapping_says_the_same_as_a_config(config: Config) -> None:
    values = {f.name: getattr(config, f.name) for f in fields(Config)}
    assert from_mapping(values) == config


def test_an_unknown_key_names_the_nearest_and_the_known() -> None:
    with pytest.raises(
        ConfigError,
        match=r"unknown configuration key 'slot'; did you mean 'slots'\? "
        r"\(known: adopt, arena_dir, block_mac, budget, calibrate_runs, canary_every_s, "
        r"check_products, "
        r"copy_dscp, "
        r"dashboard, "
        r"dashboard_address, dashboard_token, digest_every_steps, encrypt, ",
    ):
        resolved({"slot": 3})


def test_an_unknown_variable_too() -> None:
    with pytest.raises(
        ConfigError,
        match=r"unknown environment variable 'KEEPSTEP_STOR'; did you mean 'KEEPSTEP_STORE'\?",
    ):
        resolved(KEEPSTEP_STOR="/mnt")


def test_variables_between_our_own_processes_are_no_configuration() -> None:
    assert resolved(KEEPSTEP_ATTEMPT="2", KEEPSTEP_FAULTS="[]", KEEPSTEP_DRILL="/d") == resolved()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"KEEPSTEP_SLOTS": "two"}, "KEEPSTEP_SLOTS: expected int, found 'two'"),
        ({"KEEPSTEP_GRACE_S": "soon"}, "KEEPSTEP_GRACE_S: expected float, found 'soon'"),
        ({"KEEPSTEP_LAZY": "maybe"}, "KEEPSTEP_LAZY: expected on or off, found 'maybe'"),
    ],
)
def test_a_variable_that_does_not_parse(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(**environ)
    assert str(caught.value) == f"{message} [KS1000]"


@pytest.mark.parametrize(
    ("text", "value"),
    [("on", True), ("True", True), ("1", True), ("off", False), ("no", False), ("0", False)],
)
def test_a_variable_says_on_or_off_as_the_documentation_does(text: str, value: bool) -> None:
    assert resolved(KEEPSTEP_LAZY=text).lazy is value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("job", bad) for bad in ("", "a/b", "a b", "x" * 65, "..", 7)],
        *[("slots", bad) for bad in (-1, 9, True, 2.0, "3")],
        *[("persist_every_steps", bad) for bad in (-1, True, 1.5)],
        *[("grace_s", bad) for bad in (-1, float("nan"), float("inf"), "30")],
        *[("scrub_every_s", bad) for bad in (-0.1, float("inf"))],
        *[("link_dead_s", bad) for bad in (1.9, 1e308, 10**400)],
        *[("shrink_after_s", bad) for bad in (1e300, 31536001)],
        *[("metrics_port", bad) for bad in (0, 65536, True, "9100", 1.5)],
        *[("hang_after_s", bad) for bad in (0, 3.9, float("inf"), float("nan"), True, "60")],
        *[("lazy", bad) for bad in (1, "yes")],
        *[("arena_dir", bad) for bad in ("", 5)],
        *[("store", bad) for bad in (5, "memory://x", "", " ")],
        ("keep", ""),
        ("state_dir", ""),
    ],
)
def test_a_value_that_cannot_be(name: str, value: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=f"^{name}: expected .*, found "
        + re.escape("" if value == "memory://x" else repr(value)[:20]),
    ):
        resolved({name: value})


def test_relative_places_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper and the persister do not work in the trainer's directory."""
    monkeypatch.chdir(tmp_path)
    settings = resolved({"store": "checkpoints", "arena_dir": "arena", "state_dir": Path("state")})
    assert settings.store == str(tmp_path / "checkpoints")
    assert (settings.arena_dir, settings.state_dir) == (tmp_path / "arena", tmp_path / "state")
    assert resolved({"store": "s3://bucket/prefix"}).store == "s3://bucket/prefix"


def test_a_socket_path_that_is_too_long_is_said_before_it_fails() -> None:
    longest = "/" + "a" * (MAX_SOCKET_PATH_BYTES - len(f"//keepstep-{os.getuid()}/j/keeper.sock"))
    assert resolved({"arena_dir": longest, "job": "j"}).arena_dir == Path(longest)
    with pytest.raises(
        ConfigError,
        match=f"expected a socket path of at most {MAX_SOCKET_PATH_BYTES} bytes, found "
        f"{MAX_SOCKET_PATH_BYTES + 1}",
    ):
        resolved({"arena_dir": longest + "a", "job": "j"})


@pytest.mark.parametrize("policy", [None, "none", "auto", "parity:3", "rs:2+2"])
def test_one_slot_needs_copies_on_other_nodes(policy: str | None) -> None:
    with pytest.raises(ConfigError, match=r"^slots: expected 2 or more, or redundancy copies:M"):
        resolved(Config(slots=1, redundancy=policy))
    assert resolved(Config(slots=2, redundancy=policy)).slots == 2


def test_one_slot_with_copies(tmp_path: Path) -> None:
    assert resolved(Config(slots=1, redundancy="copies:2")).slots == 1


@pytest.mark.parametrize(
    "hosts", ["", ",", "10.0.0.1,", "10.0.0.1,10.0.0.1", ",".join(f"h{n}" for n in range(17))]
)
def test_addresses_that_cannot_be(hosts: str) -> None:
    with pytest.raises(ConfigError, match="^host: expected "):
        resolved(Config(host=hosts))


def test_several_addresses() -> None:
    text = resolved(Config(host="10.0.0.1, node-7.rail-1")).host
    assert text is not None and parse_hosts(text) == ("10.0.0.1", "node-7.rail-1")
    assert first_host(text) == "10.0.0.1" and first_host(None) is None
