"""Pods API: the pods of a namespace, read and deleted by the official client.

Comes in: the service account of the pod in which this runs, or a kubeconfig. Goes out: `Pod`s, and
deletions by uid. Decides nothing; whoever may not do it hears which rule is missing.
"""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from keepstep.model.pods import PLACE, Pod

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
REQUEST_WITHIN_S = 10.0
OVER = ("Succeeded", "Failed")
GONE = (404, 409)  # no pod of that name, or another one by now


class NotAllowedError(Exception):
    """The API server knows who asks, or does not, and refuses."""


class PodsApi:
    """Of one namespace."""

    def __init__(self, core: Any, namespace: str) -> None:
        self._core, self._namespace = core, namespace

    @staticmethod
    def found() -> PodsApi:
        """The cluster in which this pod runs, or the one that KUBECONFIG says. Raises OSError or
        ValueError where there is none."""
        known: Any = config  # its functions have no types
        try:
            given = os.environ.get("KUBECONFIG")
            if given:
                known.load_kube_config(given)
                context = known.list_kube_config_contexts(given)[1]["context"]
                return PodsApi(client.CoreV1Api(), context.get("namespace", "default"))
            known.load_incluster_config()
            return PodsApi(client.CoreV1Api(), NAMESPACE_FILE.read_text().strip())
        except config.ConfigException as error:
            raise ValueError(str(error)) from error

    def pods(self) -> list[Pod]:
        """Raises OSError where there is no answer, NotAllowedError."""
        try:
            found = self._core.list_namespaced_pod(
                self._namespace, _request_timeout=REQUEST_WITHIN_S
            )
        except ApiException as error:
            raise self._told(error, "list") from error
        except HTTPError as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
        # Plain JSON: how the client's own classes name a field differs between its releases.
        plain = self._core.api_client.sanitize_for_serialization(found)
        return [pod_of(item) for item in plain["items"]]

    def delete(self, name: str, uid: str, by_force: bool) -> None:
        """Nothing where it is gone, or another one has its name. Raises as `pods`."""
        options = client.V1DeleteOptions(preconditions=client.V1Preconditions(uid=uid))
        if by_force:
            options.grace_period_seconds = 0
        try:
            self._core.delete_namespaced_pod(
                name, self._namespace, body=options, _request_timeout=REQUEST_WITHIN_S
            )
        except ApiException as error:
            if error.status not in GONE:
                raise self._told(error, "delete") from error
        except HTTPError as error:
            raise OSError(f"{type(error).__name__}: {error}") from error

    def _told(self, error: ApiException, verb: str) -> Exception:
        if error.status in (401, 403):
            return NotAllowedError(
                f"the API server refuses to {verb} pods in {self._namespace} ({error.status}): the "
                "pod's service account needs get, list and delete of pods "
                "(examples/kubernetes/rbac.yaml)"
            )
        return OSError(f"the API server answered {error.status} {error.reason}")


def pod_of(item: dict[str, Any]) -> Pod:
    """item: a Pod as the API server writes it."""
    about, spec, status = item["metadata"], item["spec"], item["status"]
    owners = [o["uid"] for o in about.get("ownerReferences", ()) if o.get("controller")]
    conditions = {one["type"]: one for one in status.get("conditions", ())}
    notes = about.get("annotations", {})
    listed = tuple(one["ip"] for one in status.get("podIPs", ()))
    return Pod(
        name=about["name"],
        uid=about["uid"],
        addresses=listed or ((status["podIP"],) if "podIP" in status else ()),
        machine=spec.get("nodeName", ""),
        controller=owners[0] if owners else None,
        labels={**{n: notes[n] for n in PLACE if n in notes}, **about.get("labels", {})},
        started_s=_started_s(status),
        is_ready=conditions.get("Ready", {}).get("status") == "True",
        is_leaving="deletionTimestamp" in about or status.get("phase") in OVER,
        grace_s=about.get("deletionGracePeriodSeconds"),
        waits_for=_waits_for(status, conditions),
    )


def _started_s(status: dict[str, Any]) -> float | None:
    """The newest start of those containers, when all run."""
    states = [one.get("state", {}) for one in status.get("containerStatuses", ())]
    if not states or not all("running" in state for state in states):
        return None
    return max(_seconds(state["running"]["startedAt"]) for state in states)


def _seconds(stamp: str) -> float:
    """Since 1970."""
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()


def _waits_for(status: dict[str, Any], conditions: dict[str, dict[str, Any]]) -> str:
    placed = conditions.get("PodScheduled", {})
    if placed.get("status") == "False":
        return str(placed.get("message") or placed.get("reason") or "")
    for one in status.get("containerStatuses", ()):
        waiting = one.get("state", {}).get("waiting")
        if waiting is not None:
            return str(waiting.get("message") or waiting.get("reason") or "")
    return ""
