"""`keepstep run` reads torchrun's command lines."""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Any

import pytest
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

import keepstep.runtime.agent.process
from keepstep.cli.main import app
from keepstep.config import Config
from keepstep.model.launch import Etcd, Launch
from keepstep.runtime.agent.supervisor import SUPERVISOR


def understood(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[Launch, Config]:
    """What the agent would be given for this command line."""
    found: list[Any] = []

    def supervise(launch: Launch, config: Config, environ: object, dashboard: object) -> int:
        found.append((launch, config))
        return 0

    monkeypatch.setattr(keepstep.runtime.agent.process, "supervise", supervise)
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    return found[0]


def invoke(*words: str) -> Any:
    """As the agent, which is the supervisor's child."""
    return CliRunner().invoke(app, ["run", *words], env={SUPERVISOR: "1"})


@pytest.mark.parametrize("option", ["--nproc-per-node", "--nproc_per_node"])
def test_both_spellings(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    launch, _ = understood(monkeypatch, option, "2", "train.py")
    assert launch == Launch((sys.executable, "-u", "train.py"), ("train.py",), ranks=2)
    launch, _ = understood(monkeypatch, f"{option}=3", "train.py")
    assert launch.ranks == 3


def test_the_scripts_own_arguments_are_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ("--nnodes", "7", "-m", "--", "--help", "--some_name=1", "-x")
    launch, _ = understood(monkeypatch, "--nproc-per-node", "2", "train.py", *own)
    assert launch.command == (sys.executable, "-u", "train.py", *own)
    assert launch.argv == ("train.py", *own)


def test_a_usual_torchrun_line(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = (
        "--standalone --nnodes=1 --nproc_per_node=2 --max_restarts 3 --rdzv_backend c10d "
        "--rdzv_id 7 --rdzv_endpoint localhost:0"
    )
    output = "-t 3 -r 0:1,1:2 --local_ranks_filter 0,1 --log_dir logs"
    launch, _ = understood(
        monkeypatch, *meeting.split(), *output.split(), "-m", "pkg.train", "--lr", "1"
    )
    assert launch.command == (sys.executable, "-u", "-m", "pkg.train", "--lr", "1")
    assert (launch.max_restarts, launch.master_addr, launch.master_port) == (3, "localhost", 0)
    assert (launch.nodes, launch.endpoint, launch.job) == (1, None, "7")
    assert (launch.tee, launch.redirects, launch.shown_ranks, launch.log_dir) == (
        "3",
        "0:1,1:2",
        {0, 1},
        "logs",
    )


@pytest.mark.parametrize(
    ("words", "endpoint", "node_rank", "ranks_port"),
    [
        ("--nnodes 2 --rdzv-endpoint h:7", ("h", 7), None, 0),
        ("--nnodes 2:2 --rdzv-endpoint h --master-port 5", ("h", 29400), None, 5),
        ("--nnodes=2 --node_rank=1 --master_addr=h --master_port=7", ("h", 7), 1, 0),
        ("--nnodes 2 --node-rank 0 --master-addr h", ("h", 29500), 0, 0),
    ],
)
def test_several_machines(
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    endpoint: tuple[str, int],
    node_rank: int | None,
    ranks_port: int,
) -> None:
    launch, _ = understood(monkeypatch, *words.split(), "train.py")
    assert (launch.nodes, launch.endpoint, launch.node_rank, launch.master_port) == (
        2,
        endpoint,
        node_rank,
        ranks_port,
    )
    assert launch.job is None


def test_meeting_over_etcd(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--nnodes 2 --rdzv-backend etcd --rdzv-endpoint h1:7,h2 --master-port 5"
    launch, _ = understood(monkeypatch, *words.split(), "train.py")
    assert launch.etcd == Etcd((("h1", 7), ("h2", 2379)))
    assert (launch.endpoint, launch.master_port) == (("h1", 7), 5)
    tls = "--rdzv-conf=protocol=https,cacert=/ca.pem,cert=/c.pem,key=/k.pem"
    launch, _ = understood(monkeypatch, *words.split(), tls, "train.py")
    assert launch.etcd == Etcd((("h1", 7), ("h2", 2379)), True, "/ca.pem", "/c.pem", "/k.pem")
    launch, _ = understood(
        monkeypatch, "--rdzv-backend", "etcd", "--rdzv-endpoint", "h1:7,h2", "train.py"
    )
    assert (launch.etcd, launch.endpoint, launch.master_addr) == (None, None, "127.0.0.1"), (
        "one machine has nobody to meet"
    )


def a_value(action: argparse.Action) -> list[str]:
    """Something that torchrun would accept there."""
    if action.nargs == 0:
        return []
    numbers = {"max_restarts": "1", "monitor_interval": "1", "node_rank": "0", "master_port": "1"}
    streams = {"redirects": "0", "tee": "0", "local_ranks_filter": "0", "nproc_per_node": "1"}
    places = {
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "h:1",
        "nnodes": "1",
        "shutdown_timeout": "3",
    }
    choice = str(next(iter(action.choices))) if action.choices else "x"
    return [(numbers | streams | places).get(action.dest, choice)]


OF_TORCHRUN = [
    [spelling, *a_value(action)]
    for action in get_args_parser()._actions
    for spelling in action.option_strings
    if action.dest != "help"
]


@pytest.mark.parametrize("words", OF_TORCHRUN, ids=lambda words: words[0])
def test_every_option_of_torchrun_is_taken(
    monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    launch, _ = understood(monkeypatch, *words, "train.py", "--own")
    assert launch.argv == ("train.py", "--own")


def test_a_local_address_is_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert understood(monkeypatch, "--local-addr", "h", "train.py")[1].host == "h"
    words = ("--local-addr", "h", "--host", "own", "train.py")
    assert understood(monkeypatch, *words)[1].host == "own"


def supervised(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    """As a person types it, but for the agent that would be started."""
    started: list[object] = []
    monkeypatch.setattr("keepstep.cli.run.keep_agent", lambda *found: started.append(found) or 0)
    result = CliRunner().invoke(app, ["run", *words])
    result.started = len(started)
    return result


def test_what_has_no_effect_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    result = supervised(
        monkeypatch,
        "--numa-binding=node",
        "--virtual-local-rank",
        "--start-method",
        "fork",
        __file__,
    )
    said = result.stderr.splitlines()
    assert [line.split()[1] for line in said] == [
        "--start-method",
        "--numa-binding",
        "--virtual-local-rank",
    ]
    assert result.started == 1 and all("has no effect here: " in line for line in said)
    assert supervised(monkeypatch, __file__).stderr == ""


@pytest.mark.parametrize(
    "words",
    [["/nonexistent.py"], ["-m", "no_such_module.train"], ["--no-python", "no-such-program"]],
    ids=" ".join,
)
def test_a_script_that_is_missing_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    result = supervised(monkeypatch, *words)
    assert (result.exit_code, result.started) == (2, 0)
    assert "SCRIPT: expected" in result.stderr and words[-1] in result.stderr


@pytest.mark.parametrize("words", [[__file__], ["-m", "keepstep.cli.main"], ["--no-python", "env"]])
def test_a_script_that_is_there_is_started(
    monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    assert supervised(monkeypatch, *words).started == 1


def test_torchruns_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "4")
    monkeypatch.setenv("PET_MASTER_PORT", "1234")
    launch, _ = understood(monkeypatch, "train.py")
    assert (launch.ranks, launch.master_port) == (4, 1234)


def test_our_own_options_become_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        "--job j --store s3://b/p --persist_every_steps 5 --keep latest:1 --slots 3 --grace-s "
        "1.5 --no-lazy --scrub-every-s 0"
    )
    _, config = understood(
        monkeypatch, *words.split(), "--arena-dir", "/a", "--state-dir", "/s", "train.py"
    )
    assert config == Config("j", "s3://b/p", 5, "latest:1", 3, "/a", 1.5, False, 0.0, "/s")
    _, config = understood(
        monkeypatch,
        *("--redundancy", "copies:2", "--host", "h", "--rack", "r", "--link-dead-s", "3"),
        "train.py",
    )
    assert config == Config(redundancy="copies:2", host="h", rack="r", link_dead_s=3.0)
    assert understood(monkeypatch, "--metrics-port", "9100", "train.py")[1] == Config(
        metrics_port=9100
    )
    assert understood(monkeypatch, "train.py")[1] == Config(), (
        "what nobody set is left to the environment"
    )


def test_a_program_that_is_no_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert understood(monkeypatch, "--no-python", "./train", "a")[0].command == ("./train", "a")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--nnodes", "2"],
            "--rdzv-endpoint: expected host:port at which the 2 nodes meet, the same for "
            "all, found none",
        ),
        (["--nnodes", "2", "--rdzv-endpoint", "h:0"], "the same for all, found port 0 of h"),
        (
            ["--rdzv-backend", "zeus"],
            "--rdzv-backend: expected one of c10d, static, etcd, found 'zeus'",
        ),
        (
            ["--nnodes", "2", "--rdzv-backend", "etcd"],
            "--rdzv-endpoint: expected etcd's members as host:port,host:port, found none",
        ),
        (["--nnodes", "4:2"], "--nnodes: expected a number of nodes, or MIN:MAX, found '4:2'"),
        (["--nnodes", "0"], "--nnodes: expected a number of nodes, or MIN:MAX, found '0'"),
        (["--nnodes", "two"], "--nnodes: expected a number of nodes, or MIN:MAX, found 'two'"),
        (["--node-rank", "1"], "--node-rank: expected 0 to 0 with --nnodes 1, found 1"),
        (["--rdzv-endpoint", ":1"], "--rdzv-endpoint: expected host:port, found ':1'"),
        (["--nproc-per-node", "0"], "--nproc-per-node: expected 1 to 4096, found 0"),
        (
            ["--nproc-per-node", "many"],
            "--nproc-per-node: expected a number, 'auto', 'cpu' or 'gpu', found 'many'",
        ),
        (["--max-restarts", "-1"], "--max-restarts: expected 0 or more, found -1"),
        (
            ["--rdzv-endpoint", "host:port"],
            "--rdzv-endpoint: expected host:port, found 'host:port'",
        ),
        (["--master-port", "70000"], "--master-port: expected 0 to 65535, found 70000"),
        (
            ["--local-ranks-filter", "0;1"],
            "--local-ranks-filter: expected numbers such as 0,1, found '0;1'",
        ),
        (
            ["--no-python", "-m"],
            "--no-python and --module: expected at most one of them, found both",
        ),
        (["--redirects", "9"], "--redirects, --tee: expected 0 to 3 or a map such as 0:1,1:2"),
        (["--slots", "9"], "slots: expected 0 (choose) or 1 to 8, found 9"),
        (["--slots", "1"], "slots: expected 2 or more, or redundancy copies:M"),
    ],
)
def test_what_cannot_be_is_said(words: list[str], sentence: str) -> None:
    result = invoke(*words, "train.py")
    assert result.exit_code == 2
    assert sentence in result.output


def test_reading_arguments_imports_no_torch() -> None:
    code = "import sys, keepstep.cli.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
