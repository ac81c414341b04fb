"""Needs: what an option asks of the machine is missed before anything starts, and named with the
command that brings it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from keepstep.config import Settings, resolve
from keepstep.edge.os.needs import NIXL_MODULES, check_needs, unsigned_blocks
from keepstep.errors import ConfigError


def settings(**options: object) -> Settings:
    return resolve({"job": "j", **options}, {}, "j")


@pytest.mark.parametrize(
    ("package", "options", "extra"),
    [
        ("prometheus_client", {"metrics_port": 9100}, "metrics"),
        ("cryptography", {"block_mac": "on"}, "secure"),
        ("cryptography", {"encrypt": True, "secret": "s" * 32}, "secure"),
        ("numpy", {"redundancy": "parity:2"}, "rs"),
        ("numpy", {"redundancy": "rs:2+1"}, "rs"),
        ("s3fs", {"store": "s3://bucket/run"}, "s3"),
    ],
)
def test_a_package_that_is_not_installed_is_named(
    package: str, options: dict[str, object], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_needs(settings(**options))
    monkeypatch.setitem(sys.modules, package, None)
    fsspec_registry = importlib.import_module("fsspec.registry")
    monkeypatch.delitem(fsspec_registry._registry, "s3", raising=False)  # imported before
    with pytest.raises(ConfigError, match=rf"pip install 'keepstep\[{extra}\]'") as found:
        check_needs(settings(**options))
    assert str(found.value).startswith(f"{next(iter(options))}: expected ")


def test_nixl_is_there_in_either_build_or_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NIXL_MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    check_needs(settings())
    with pytest.raises(ConfigError, match=r"^transport: expected .*'keepstep\[nixl\]'"):
        check_needs(settings(transport="nixl"))
    for name in NIXL_MODULES:
        there = ModuleType(name)
        there.__spec__ = ModuleSpec(name, None)
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, name, there)
            check_needs(settings(transport="nixl"))


def test_blocks_that_nobody_signs_are_told_where_nobody_has_decided_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert unsigned_blocks(settings()) == ""
    monkeypatch.setitem(sys.modules, "cryptography", None)
    why = unsigned_blocks(settings())
    assert "not signed" in why and "pip install 'keepstep[secure]'" in why and "\n" not in why
    assert unsigned_blocks(settings(block_mac="off")) == ""


def test_what_is_encrypted_under_a_secret_that_all_can_read_is_not() -> None:
    with pytest.raises(ConfigError, match="^encrypt: expected a `secret` .* KEEPSTEP_SECRET"):
        check_needs(settings(encrypt=True))


@pytest.mark.parametrize("redundancy", ["none", "auto", "copies:2"])
def test_copies_need_no_package(redundancy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    check_needs(settings(redundancy=redundancy))


def test_a_store_is_made_and_left_empty(tmp_path: Path) -> None:
    store = tmp_path / "a" / "b"
    check_needs(settings(store=store))
    assert list(store.iterdir()) == []
    check_needs(settings(store=f"file://{store}"))


def test_a_full_disk_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    check_needs(settings(store=tmp_path))


@pytest.mark.parametrize(
    ("given", "environ", "told"),
    [
        ({}, {}, "expected to run in a pod, or KUBECONFIG, for 'kubernetes', found neither"),
        ({"replace_command": "x"}, {}, "expected no replace_command with 'kubernetes', found 'x'"),
        ({}, {"KUBECONFIG": "/etc/kube"}, None),
        ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
    ],
)
def test_kubernetes_takes_a_cluster_and_no_other_command(
    given: dict[str, str],
    environ: dict[str, str],
    told: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    wanted = settings(node_provider="kubernetes", **given)
    if told is None:
        check_needs(wanted)
        monkeypatch.setitem(sys.modules, "kubernetes", None)
        told = "pip install 'keepstep.kubernetes.'"
    with pytest.raises(ConfigError, match=told):
        check_needs(wanted)


@pytest.mark.parametrize(
    "command",
    [
        ["-c", "import keepstep; keepstep.protect()"],
        ["-c", "from keepstep import init_process_group"],
        ["-m", "keepstep.cli.main", "run", __file__],
        ["-m", "keepstep.cli.main", "lab", "run", __file__],
        ["-m", "keepstep.cli.main", "drill"],
    ],
    ids=lambda command: command[-2] if command[0] == "-m" else command[1],
)
def test_without_torch_one_sentence_says_what_to_install(
    command: list[str], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text('import sys; sys.modules["torch"] = None\n')
    run = subprocess.run(
        [sys.executable, *command],
        env={"PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert run.returncode != 0
    assert "pip install 'keepstep[torch]'" in run.stderr.splitlines()[-1]
    assert "ModuleNotFoundError" not in run.stderr
