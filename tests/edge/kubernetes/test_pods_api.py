"""PodsApi: what the official client reads of a pod, what it deletes, and who may not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from ipaddress import ip_address
from pathlib import Path

import pytest
from kubernetes.config import incluster_config

from keepstep.edge.kubernetes import pods_api
from keepstep.edge.kubernetes.pods_api import NotAllowedError, PodsApi
from keepstep.edge.kubernetes.provider import KubernetesProvider
from keepstep.model.lost import LostNode
from tests.edge.kubernetes.cluster import BEGAN_S, NO_ROOM, TOKEN, Cluster, kubeconfig, served


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def api(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PodsApi]:
    with served(cluster) as url:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "config", url)))
        yield PodsApi.found()


def test_a_pod_is_read_as_it_is(cluster: Cluster, api: PodsApi) -> None:
    cluster.runs("train-nodes-0-1-first", BEGAN_S - 60)
    cluster.runs("train-nodes-0-2-first", None)
    cluster.add("train-nodes-0-3-other", 3)
    cluster.pods["train-nodes-0-3-first"]["status"]["phase"] = "Failed"
    pods = {pod.name: pod for pod in api.pods()}
    whole = pods["train-nodes-0-1-first"]
    assert whole.uid == cluster.pods[whole.name]["metadata"]["uid"]
    assert (whole.addresses, whole.machine) == (("10.0.1.7",), "gpu-1")
    assert whole.controller == "8a6d2126-e95b-4b71-8c7e-d31028581536"
    assert whole.labels["jobset.sigs.k8s.io/jobset-name"] == "train"
    assert whole.labels["batch.kubernetes.io/job-completion-index"] == "1"
    assert whole.started_s == BEGAN_S - 60 and whole.is_ready and not whole.is_leaving
    ended, waiting = pods["train-nodes-0-2-first"], pods["train-nodes-0-3-other"]
    assert ended.started_s is None and not ended.is_ready
    assert ended.waits_for == "back-off 10s restarting"
    assert waiting.addresses == () and waiting.machine == "" and waiting.waits_for == NO_ROOM
    assert pods["train-nodes-0-3-first"].is_leaving


def test_a_pod_is_deleted_by_its_uid_alone(cluster: Cluster, api: PodsApi) -> None:
    [first, *_] = api.pods()
    api.delete(first.name, "of-another-one", by_force=False)
    api.delete("nobody", first.uid, by_force=False)
    assert not cluster.pods[first.name]["metadata"].get("deletionTimestamp")
    api.delete(first.name, first.uid, by_force=False)
    assert {pod.name: pod.is_leaving for pod in api.pods()}[first.name]
    assert [pod.grace_s for pod in api.pods() if pod.name == first.name] == [120]
    api.delete(first.name, first.uid, by_force=True)
    assert first.name not in {pod.name for pod in api.pods()}
    assert [told.get("gracePeriodSeconds") for told in cluster.deletions] == [None] * 3 + [0]


@pytest.mark.parametrize("verb", ["list", "delete"])
def test_who_may_not_hears_what_is_missing(cluster: Cluster, api: PodsApi, verb: str) -> None:
    [first, *_] = api.pods()
    cluster.refuses = {verb: 403}
    with pytest.raises(NotAllowedError, match=f"refuses to {verb} pods in ml .403.*rbac.yaml"):
        if verb == "list":
            api.pods()
        else:
            api.delete(first.name, first.uid, by_force=False)


def test_a_server_that_fails_or_is_away_is_told_as_such(cluster: Cluster, api: PodsApi) -> None:
    cluster.refuses = {"list": 500, "delete": 503}
    with pytest.raises(OSError, match="answered 500"):
        api.pods()
    with pytest.raises(OSError, match="answered 503"):
        api.delete("a", "b", by_force=False)


def test_without_a_cluster_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ValueError, match="Service host/port is not set"):
        PodsApi.found()


def certificate(path: Path) -> Path:
    """Of 127.0.0.1, signed by itself, with its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kube-apiserver")])
    now = datetime.now(timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        .sign(key, hashes.SHA256())
    )
    path.write_bytes(
        made.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return path


def test_within_a_pod_its_service_account_is_used(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its token, its namespace, and the cluster's own certificate: another server is not spoken
    to."""
    made = certificate(tmp_path / "server.pem")
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "namespace").write_text("ml")
    (tmp_path / "ca.crt").write_text(made.read_text().partition("-----BEGIN PRIVATE")[0])
    (tmp_path / "other.crt").write_text(
        certificate(tmp_path / "other.pem").read_text().partition("-----BEGIN PRIVATE")[0]
    )
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(pods_api, "NAMESPACE_FILE", tmp_path / "namespace")
    with served(cluster, made) as url:
        host, _, port = url.removeprefix("https://").partition(":")
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
        monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
        assert len(PodsApi.found().pods()) == 4
        monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "other.crt"))
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            PodsApi.found().pods()


def answer_of(lost: LostNode, **environ: str) -> str:
    heard: list[str] = []
    before = dict(os.environ)
    os.environ.update(environ)
    try:
        provider = KubernetesProvider()
        provider._run(lost, heard.append)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return heard[0]


def test_a_child_asks_and_its_answer_is_told(cluster: Cluster, tmp_path: Path) -> None:
    """Its pod is gone and another one runs already: the first look says it all."""
    del cluster.pods["train-nodes-0-2-first"]
    cluster.now_s = datetime.now(timezone.utc).timestamp()
    cluster.add("train-nodes-0-2-other", 2)
    cluster._place("train-nodes-0-2-other")
    cluster.pass_s(5)
    lost = LostNode("train", 2, "10.0.2.7", "silent for 10 s")
    with served(cluster) as url:
        at = str(kubeconfig(tmp_path / "config", url))
        told = answer_of(lost, KUBECONFIG=at, POD_NAME="train-nodes-0-0-first")
        assert "pod train-nodes-0-2-other runs on gpu-9 after" in told
        assert "no pod of this training had that address any more" in told
        told = answer_of(lost, KUBECONFIG=at, POD_NAME="host-of-nobody")
        assert "no pod 'host-of-nobody' among the 4 of this namespace: nothing was deleted" in told
    told = answer_of(lost, KUBECONFIG=str(tmp_path / "none"))
    assert told.startswith("Kubernetes could not be asked: ")
    assert cluster.deletions == []


def test_an_agent_never_imports_the_client() -> None:
    code = (
        "import sys, keepstep.edge.kubernetes.provider; "
        "assert not any(name.startswith('kubernetes') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
