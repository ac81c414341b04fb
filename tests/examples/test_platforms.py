"""What is to be copied for Kubernetes, Docker, SkyPilot and TorchX: its commands are keepstep's,
its memory is large enough to hold what it asks for, its manifests are what the schemas say.

The schemas are those of the projects' releases, which are not kept here: CRDS names a
directory with JobSet's and LeaderWorkerSet's CustomResourceDefinitions (`*.yaml`). `helm` renders
the chart where it is there.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from keepstep.cli.main import app
from keepstep.cli.run import understand
from keepstep.config import Config, from_environ
from keepstep.model.launch import Launch

yaml = pytest.importorskip("yaml")
EXAMPLES = Path(__file__).parents[2] / "examples"
KUBERNETES = EXAMPLES / "kubernetes"
MANIFESTS = {"JobSet": "jobset.yaml", "LeaderWorkerSet": "leaderworkerset.yaml"}
VARIABLE = re.compile(r"\$\(\w+\)|\$\{?\w+\}?")
RUN = typer.main.get_group(app).commands["run"]


def understood(words: list[str]) -> tuple[Launch, Config]:
    """What `keepstep run` makes of a command line; raises where it would refuse it."""
    context = RUN.make_context("run", list(words))
    return understand(context.params, sys.executable)


def manifest(name: str) -> dict[str, Any]:
    [found] = list(yaml.safe_load_all((KUBERNETES / name).read_text()))
    return dict(found)


def within(tree: Any, key: str) -> Iterator[Any]:
    """Every value under that key, at any depth."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            if name == key:
                yield value
            yield from within(value, key)
    elif isinstance(tree, list):
        for value in tree:
            yield from within(value, key)


def command_of(container: dict[str, Any]) -> list[str]:
    words = [*container.get("command", []), *container.get("args", [])]
    if words[:2] == ["sh", "-c"]:
        words = shlex.split(words[2].partition("&&")[0])
    return [VARIABLE.sub("host0", word) for word in words]


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_manifests_command_is_one_of_keepsteps(kind: str) -> None:
    found = manifest(MANIFESTS[kind])
    [containers] = within(found, "containers")
    words = command_of(containers[0])
    assert words[:2] == ["keepstep", "run"]
    launch, config = understood(words[2:])
    size = [*within(found, "parallelism"), *within(found, "size")][0]
    assert launch.nodes == size and config.redundancy == "copies:2"
    assert launch.ranks == containers[0]["resources"]["limits"]["nvidia.com/gpu"]


@pytest.mark.parametrize("kind", MANIFESTS)
def test_its_variables_are_keepsteps_and_its_secret_is_no_text(kind: str) -> None:
    [variables] = within(manifest(MANIFESTS[kind]), "env")
    names = {each["name"] for each in variables}
    assert {"KEEPSTEP_HOST", "KEEPSTEP_JOB", "KEEPSTEP_SECRET"} <= names
    assert from_environ(dict.fromkeys(sorted(names), "10.0.0.1")).host == "10.0.0.1"
    [secret] = [each for each in variables if each["name"] == "KEEPSTEP_SECRET"]
    assert "secretKeyRef" in secret["valueFrom"] and "value" not in secret


def gib(text: str) -> int:
    return int(text.removesuffix("Gi"))


@pytest.mark.parametrize("kind", MANIFESTS)
def test_shared_memory_is_mounted_and_counted(kind: str) -> None:
    found = manifest(MANIFESTS[kind])
    [volumes], [mounts], [limits] = (
        list(within(found, key)) for key in ("volumes", "volumeMounts", "limits")
    )
    shm = {"name": "shm", "mountPath": "/dev/shm"}
    assert shm in mounts
    [volume] = [each for each in volumes if each["name"] == "shm"]
    assert volume["emptyDir"]["medium"] == "Memory"
    assert gib(volume["emptyDir"]["sizeLimit"]) < gib(limits["memory"])


@pytest.mark.parametrize("kind", MANIFESTS)
def test_nodes_of_a_job_are_on_machines_of_their_own(kind: str) -> None:
    [rules] = within(manifest(MANIFESTS[kind]), "requiredDuringSchedulingIgnoredDuringExecution")
    assert rules[0]["topologyKey"] == "kubernetes.io/hostname"


def test_the_meeting_point_is_the_first_pods_name() -> None:
    found = manifest("jobset.yaml")
    name, network = found["metadata"]["name"], found["spec"]["network"]
    replicated = found["spec"]["replicatedJobs"][0]["name"]
    host = f"{name}-{replicated}-0-0.{network['subdomain']}"
    [args] = within(found, "args")
    assert f"--rdzv-endpoint={host}:29400" in args and network["publishNotReadyAddresses"]


def schema_of(kind: str) -> dict[str, Any]:
    """The newest version that the definition serves. Fields that it does not know are errors."""
    directory = os.environ.get("CRDS")
    if not directory:
        pytest.skip("CRDS names no directory of CustomResourceDefinitions")
    for path in sorted(Path(directory).glob("*.yaml")):
        for found in yaml.safe_load_all(path.read_text()):
            names = (found or {}).get("spec", {}).get("names", {})
            if names.get("kind") == kind:
                return closed(found["spec"]["versions"][-1]["schema"]["openAPIV3Schema"])
    pytest.fail(f"{directory} has no definition of {kind}")


def closed(schema: Any) -> Any:
    """A schema as an API server with strict validation reads it."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    if made.pop("x-kubernetes-int-or-string", False):
        made.pop("type", None)
    is_open = schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(schema.get("properties"), dict) and "type" in schema and not is_open:
        made.setdefault("additionalProperties", False)
    return made


def check(document: dict[str, Any], kind: str) -> None:
    validator = pytest.importorskip("jsonschema").Draft202012Validator(schema_of(kind))
    assert [f"{e.json_path}: {e.message[:200]}" for e in validator.iter_errors(document)] == []


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_manifest_is_what_its_schema_says(kind: str) -> None:
    check(manifest(MANIFESTS[kind]), kind)


def test_a_wrong_manifest_is_seen() -> None:
    wrong = manifest("jobset.yaml")
    wrong["spec"]["network"]["subdomian"] = "train"
    with pytest.raises(AssertionError, match="subdomian"):
        check(wrong, "JobSet")


def rendered(*settings: str) -> dict[str, Any]:
    """The JobSet."""
    [found] = [each for each in all_rendered(*settings) if each["kind"] == "JobSet"]
    return found


def all_rendered(*settings: str) -> list[dict[str, Any]]:
    helm = shutil.which("helm")
    if helm is None:
        pytest.skip("no helm on this machine")
    words = [word for setting in settings for word in ("--set", setting)]
    told = subprocess.run(
        [helm, "template", "train", str(KUBERNETES / "chart"), *words],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    return [dict(each) for each in yaml.safe_load_all(told.stdout) if each]


def test_the_chart_renders_what_the_manifest_says() -> None:
    made, written = rendered("store=s3://bucket/train"), manifest("jobset.yaml")
    [args], [by_hand] = within(made, "args"), within(written, "args")
    assert sorted(args) == sorted(by_hand)
    for tree in (made, written):
        next(within(tree, "containers"))[0]["args"] = []
    assert made == written
    check(made, "JobSet")


def rights() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((KUBERNETES / "rbac.yaml").read_text()))


@pytest.mark.parametrize("kind", MANIFESTS)
def test_agents_may_do_what_their_node_provider_does_and_no_more(kind: str) -> None:
    account, role, binding = rights()
    [used] = within(manifest(MANIFESTS[kind]), "serviceAccountName")
    assert used == account["metadata"]["name"] == binding["subjects"][0]["name"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "delete"]}
    ]
    [containers] = within(manifest(MANIFESTS[kind]), "containers")
    assert understood(command_of(containers[0])[2:])[1].node_provider == "kubernetes"
    [name] = [each for each in containers[0]["env"] if each["name"] == "POD_NAME"]
    assert name["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}


def test_the_charts_rights_are_those_of_the_manifest() -> None:
    made = [each for each in all_rendered() if each["kind"] != "JobSet"]
    assert sorted(made, key=str) == sorted(rights(), key=str)
    assert [each["kind"] for each in all_rendered("nodeProvider=")] == ["JobSet"]


def test_the_chart_without_gpus_store_and_metrics() -> None:
    made = rendered("gpusPerNode=0", "metricsPort=0", "ranksPerNode=2", "nodes=2", "env[0].name=A",
                    "env[0].value=b", "nodeSelector.pool=cpu")  # fmt: skip
    [containers] = within(made, "containers")
    launch, config = understood(command_of(containers[0])[2:])
    assert (launch.nodes, launch.ranks, config.store, config.metrics_port) == (2, 2, None, None)
    assert "ports" not in containers[0] and list(containers[0]["resources"]["limits"]) == ["memory"]
    check(made, "JobSet")


def test_skypilots_command_is_one_of_keepsteps() -> None:
    found = yaml.safe_load((EXAMPLES / "skypilot" / "train.yaml").read_text())
    script = re.sub(r"\$\(.*\)", "host0", found["run"].replace("\\\n", " "))
    script = script.replace("$SKYPILOT_NUM_NODES", "2").replace("$SKYPILOT_NUM_GPUS_PER_NODE", "8")
    words = shlex.split(script)
    launch, config = understood(words[2:])
    assert (launch.nodes, launch.ranks) == (found["num_nodes"], 8)
    assert config.store == "/checkpoints" and "/checkpoints" in found["file_mounts"]
    names = {name: "x" for name in found["envs"] if name.startswith("KEEPSTEP_")}
    assert from_environ(names).job == "x"


def torchx_words(**given: Any) -> list[str]:
    """The command line that the component makes, without TorchX."""
    source = (EXAMPLES / "torchx" / "component.py").read_text()
    made: dict[str, Any] = {}

    class Specs:
        """Keeps what it is given."""

        class macros:
            rank0_env = "RANK0"

        class RetryPolicy:
            REPLICA = "REPLICA"

        def __getattr__(self, name: str) -> Any:
            return lambda **words: made.setdefault(name, words)

    tree = ast.parse(source)
    tree.body = [node for node in tree.body if not isinstance(node, ast.Import)]
    room: dict[str, Any] = {"specs": Specs()}
    exec(compile(tree, "component.py", "exec"), room)
    room["protected"]("train.py", "--steps", "10", image="i", **given)
    return list(shlex.split(made["Role"]["args"][1]))


def test_torchxs_command_is_one_of_keepsteps() -> None:
    words = [VARIABLE.sub("host0", re.sub(r"\$+\{.*?\}", "host0", word))
             for word in torchx_words(store="s3://b/run")]  # fmt: skip
    launch, config = understood(words[2:])
    assert (launch.nodes, launch.ranks, config.store) == (2, 8, "s3://b/run")
    assert launch.command[-2:] == ("--steps", "10")
    alone, config = understood(torchx_words(nodes=1, store="s3://b/run")[2:])
    assert alone.nodes == 1 and config.store == "s3://b/run" and config.redundancy is None


def test_the_image_starts_keepstep_as_nobody_special() -> None:
    lines = (EXAMPLES / "docker" / "Dockerfile").read_text().splitlines()
    words = {line.split(" ", 1)[0]: line.split(" ", 1)[1] for line in lines if " " in line}
    assert words["USER"] != "root"
    entry, command = ast.literal_eval(words["ENTRYPOINT"]), ast.literal_eval(words["CMD"])
    assert [*entry] == ["keepstep", "run"]
    assert understood(command)[0].ranks == 2
    assert any("--shm-size" in line for line in lines)
