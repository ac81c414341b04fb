"""What torchrun's arguments mean, one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.cli.launch_arguments import (
    ETCD_PORT,
    LOOPBACK,
    MASTER_PORT,
    RDZV_PORT,
    LaunchArguments,
    MeetingPoint,
    NodeCount,
    build_launch,
    check_prebuild,
    count_nodes,
    count_ranks,
    meeting_point,
    parse_endpoint,
    parse_etcd,
    parse_ranks,
    rank_command,
)
from keepstep.errors import ConfigError
from keepstep.model.launch import Etcd, Launch

ONE = LaunchArguments("train.py")
ports = st.integers(0, 65535)
names = st.from_regex(r"[a-z][a-z0-9.-]{0,20}", fullmatch=True)


def test_nothing_but_a_script_is_one_rank_on_one_node() -> None:
    assert build_launch(ONE, "py") == Launch(("py", "-u", "train.py"), ("train.py",), ranks=1)


@given(st.integers(1, 10**5), st.integers(0, 10**5))
def test_nodes_are_a_number_or_a_range(least: int, more: int) -> None:
    assert count_nodes(str(least), None) == NodeCount(least, least)
    assert count_nodes(f"{least}:{least + more}", least - 1) == NodeCount(least, least + more)
    with pytest.raises(ConfigError, match=f"--node-rank: expected 0 to {least - 1} "):
        count_nodes(str(least), least)


@pytest.mark.parametrize(
    "text",
    ["0", "two", "4:2", "0:2", "1:2:3", "-1", "", ":"],
)
def test_nodes_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match="--nnodes: expected a number of nodes, or MIN:MAX"):
        count_nodes(text, None)


@pytest.mark.parametrize("text", ["1048577", "1:" + "9" * 20, "9" * 5000])
def test_more_nodes_than_messages_can_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--nnodes: expected at most 1048576, found ") as caught:
        count_nodes(text, None)
    assert len(str(caught.value)) < 120


@given(names, ports)
def test_an_endpoint_is_a_host_and_perhaps_a_port(host: str, port: int) -> None:
    assert parse_endpoint(f"{host}:{port}") == (host, port)
    assert parse_endpoint(host) == (host, None)


@pytest.mark.parametrize("text", [":1", "", "h:", "h:x", "h:65536", "h:" + "9" * 5000])
def test_endpoints_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match="--rdzv-endpoint: expected host:port"):
        parse_endpoint(text)


@pytest.mark.parametrize(
    ("nodes", "endpoint", "address", "port", "expected"),
    [
        (1, "", "", 0, MeetingPoint(None, LOOPBACK, 0)),
        (1, "", "h", 5, MeetingPoint(None, "h", 5)),
        (1, "h:7", "other", 5, MeetingPoint(None, "h", 7)),
        (1, "h", "", 5, MeetingPoint(None, "h", 0)),
        (2, "h:7", "", 0, MeetingPoint(("h", 7), LOOPBACK, 0)),
        (2, "h", "", 5, MeetingPoint(("h", RDZV_PORT), LOOPBACK, 5)),
        (2, "", "h", 7, MeetingPoint(("h", 7), LOOPBACK, 0)),
        (2, "", "h", 0, MeetingPoint(("h", MASTER_PORT), LOOPBACK, 0)),
    ],
)
def test_where_they_meet(
    nodes: int, endpoint: str, address: str, port: int, expected: MeetingPoint
) -> None:
    assert meeting_point(nodes, endpoint, address, port) == expected


@pytest.mark.parametrize("endpoint", ["", "h:0"])
def test_several_nodes_need_one_place(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--rdzv-endpoint: expected host:port at which the 3"):
        meeting_point(3, endpoint, "", 0)


def test_etcd_is_where_it_is_asked_for() -> None:
    assert parse_etcd("c10d", "h1:7", "") is None and parse_etcd("static", "", "") is None
    assert parse_etcd("etcd", "h1:7, h2", "") == Etcd((("h1", 7), ("h2", ETCD_PORT)))
    tls = "protocol=https, cacert=/ca.pem,cert=/c.pem,key=/k.pem"
    assert parse_etcd("etcd", "h1:7", tls) == Etcd(
        endpoints=(("h1", 7),), tls=True, ca="/ca.pem", cert="/c.pem", key="/k.pem"
    )
    with pytest.raises(ConfigError, match="--rdzv-backend: expected one of c10d, static, etcd"):
        parse_etcd("zeus", "", "")
    with pytest.raises(ConfigError, match="expected etcd's members"):
        parse_etcd("etcd", " , ", "")


def test_one_node_needs_no_etcd() -> None:
    arguments = replace(ONE, rdzv_backend="etcd", rdzv_endpoint="h:7", master_port=5)
    launch = build_launch(arguments, "py")
    assert (launch.etcd, launch.endpoint) == (None, None)
    assert (launch.master_addr, launch.master_port) == (LOOPBACK, 5)
    several = build_launch(replace(arguments, nnodes="2"), "py")
    assert several.etcd == Etcd((("h", 7),)) and several.endpoint == ("h", 7)


def test_the_command_of_a_rank() -> None:
    arguments = LaunchArguments("train", ("--lr", "1"))
    own = ("train", "--lr", "1")
    assert rank_command(arguments, "py") == ("py", "-u", *own)
    assert rank_command(replace(arguments, module=True), "py") == ("py", "-u", "-m", *own)
    assert rank_command(replace(arguments, no_python=True), "py") == own
    with pytest.raises(ConfigError, match="found both"):
        rank_command(replace(arguments, no_python=True, module=True), "py")


@given(st.sets(st.integers(0, 10**4), min_size=1))
def test_ranks_are_numbers(ranks: set[int]) -> None:
    assert parse_ranks(", ".join(map(str, ranks))) == ranks
    assert parse_ranks("") is None
    with pytest.raises(ConfigError, match="--local-ranks-filter: expected numbers such as 0,1"):
        parse_ranks("0;1")


def test_ranks_are_counted() -> None:
    assert count_ranks("3") == 3 and count_ranks("cpu") >= 1 and count_ranks("auto") >= 1
    for text in ("0", "-1", "many", "4097", "9" * 11, "9" * 5000):
        with pytest.raises(ConfigError, match="--nproc-per-node: expected ") as caught:
            count_ranks(text)
        assert len(str(caught.value)) < 120


def test_a_job_has_no_more_ranks_than_messages_can_name() -> None:
    big = LaunchArguments("x.py", nnodes="1024", nproc_per_node="1024", rdzv_endpoint="h")
    assert build_launch(big, "py").ranks == 1024
    with pytest.raises(ConfigError, match="expected at most 1048576 ranks, found 1024 x 1025"):
        build_launch(replace(big, nproc_per_node="1025"), "py")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_restarts": -1}, "--max-restarts: expected 0 or more, found -1"),
        ({"standby": 2}, "--standby: expected 0 or 1, found 2"),
        ({"master_port": 65536}, "--master-port: expected 0 to 65535, found 65536"),
        ({"master_port": -1}, "--master-port: expected 0 to 65535, found -1"),
    ],
)
def test_numbers_that_cannot_be(change: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_launch(replace(ONE, **change), "py")


def test_what_is_to_be_built_ahead_is_beside_the_program_or_installed(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text("raise AssertionError('nobody imports it here')")
    (tmp_path / "train.py").touch()
    beside = replace(ONE, script=str(tmp_path / "train.py"))
    check_prebuild("models:make, json:loads collections.abc:Mapping", beside)
    with pytest.raises(ConfigError, match=r"prebuild: expected a module .* found no 'modles'"):
        check_prebuild("models:make,modles.deep:make", beside)
