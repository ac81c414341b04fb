"""A cluster in memory, behind a real HTTP server with the paths and answers of Kubernetes' own.

Pods have the shape of a JobSet's on Kubernetes 1.34 (`jobset_pod.json`: names and identities are
made up, fields and labels are those of such a pod); refusals that of its `Status`. What its parts
do is done in virtual time, by `pass_s`: the API server marks a deleted pod, its machine ends it
within its grace, its controller makes another one when it is gone, the scheduler finds room, a
machine starts it. No real cluster has answered here.
"""

from __future__ import annotations

import copy
import json
import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

TOKEN = "a-token-of-the-service-account"
BEGAN_S = datetime(2026, 11, 25, 12, tzinfo=timezone.utc).timestamp()
POD = json.loads((Path(__file__).parent / "jobset_pod.json").read_text())
ENDS_WITHIN_S = 5.0
PLACED_WITHIN_S = 3.0
STARTED_WITHIN_S = 4.0
NO_ROOM = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."


def stamp(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


class Cluster:
    """silent: machines that do not answer. has_room: the scheduler finds a machine. makes_others:
    the controller does. refuses: by verb, the status of its answers, an authorizer's or a broken
    server's."""

    def __init__(self, pods: int = 4) -> None:
        self.now_s = BEGAN_S
        self.silent: set[str] = set()
        self.has_room = self.makes_others = True
        self.refuses: dict[str, int] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        self.deletions: list[dict[str, Any]] = []
        self.asked = 0
        self._lock = Lock()
        self._made = 0
        self._due: list[tuple[float, str, str]] = []  # when, what, which pod or index
        for index in range(pods):
            self.add(f"train-nodes-0-{index}-first", index, f"gpu-{index}", f"10.0.{index}.7")

    def add(self, name: str, index: int, machine: str = "", address: str = "") -> dict[str, Any]:
        """A pod in that place; without a machine it waits for one."""
        self._made += 1
        pod: dict[str, Any] = copy.deepcopy(POD)
        about, status = pod["metadata"], pod["status"]
        about["name"], about["uid"] = name, f"5f1c1f0e-6a1f-4a58-8f1c-{self._made:012d}"
        for told in (about["labels"], about["annotations"]):
            told["batch.kubernetes.io/job-completion-index"] = str(index)
        if machine:
            pod["spec"]["nodeName"] = machine
            status["podIP"], status["podIPs"] = address, [{"ip": address}]
        else:
            del pod["spec"]["nodeName"]
            for told in ("podIP", "podIPs", "hostIP", "hostIPs", "containerStatuses", "startTime"):
                del status[told]
            status["phase"] = "Pending"
            about["creationTimestamp"] = stamp(self.now_s)
            status["conditions"] = [
                {
                    "type": "PodScheduled",
                    "status": "False",
                    "reason": "Unschedulable",
                    "message": NO_ROOM,
                    "lastProbeTime": None,
                    "lastTransitionTime": stamp(self.now_s),
                }
            ]
        self.pods[name] = pod
        return pod

    def runs(self, name: str, since_s: float | None = None, restarts: int = 0) -> None:
        """Its container does, since then; since None: it has just ended, and waits."""
        status = self.pods[name]["status"]
        container = copy.deepcopy(POD["status"]["containerStatuses"][0])
        container["restartCount"] = restarts
        if since_s is None:
            container.update(ready=False, started=False)
            container["state"] = {
                "waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting"}
            }
        else:
            container["state"] = {"running": {"startedAt": stamp(since_s)}}
        is_ready = "False" if since_s is None else "True"
        status["phase"], status["containerStatuses"] = "Running", [container]
        status["conditions"] = [
            {**each, "status": is_ready if "Ready" in each["type"] else "True"}
            for each in POD["status"]["conditions"]
        ]

    # -- what its parts do

    def pass_s(self, duration_s: float) -> None:
        with self._lock:
            until_s = self.now_s + duration_s
            while self._due and min(self._due)[0] <= until_s:
                self._due.sort()
                at_s, what, about = self._due.pop(0)
                self.now_s = max(self.now_s, at_s)
                getattr(self, f"_{what}")(about)
            self.now_s = until_s

    def _in(self, duration_s: float, what: str, about: str) -> None:
        self._due.append((self.now_s + duration_s, what, about))

    def _end(self, name: str) -> None:
        if name in self.pods and self.pods[name]["spec"].get("nodeName") not in self.silent:
            self._remove(name)

    def _remove(self, name: str) -> None:
        gone = self.pods.pop(name)
        if self.makes_others:
            index = gone["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]
            self._in(1.0, "make", index)

    def _make(self, index: str) -> None:
        name = f"train-nodes-0-{index}-other"
        self.add(name, int(index))
        self._in(PLACED_WITHIN_S, "place", name)

    def _place(self, name: str) -> None:
        if self.has_room:
            self.pods[name]["spec"]["nodeName"] = "gpu-9"
            self._in(STARTED_WITHIN_S, "start", name)

    def _start(self, name: str) -> None:
        self.pods[name]["status"].update(podIP="10.0.9.7", podIPs=[{"ip": "10.0.9.7"}])
        self.runs(name, self.now_s)

    # -- the API server

    def answer(self, verb: str, path: str, token: str, body: bytes) -> tuple[int, dict[str, Any]]:
        with self._lock:
            self.asked += 1
            if token.partition(" ")[::2] not in (("Bearer", TOKEN), ("bearer", TOKEN)):
                return refusal(401, "Unauthorized", "Unauthorized")
            asked = {"GET": "list", "DELETE": "delete"}[verb]
            if asked in self.refuses:
                return self._refused(self.refuses[asked], asked)
            found = re.fullmatch(r"/api/v1/namespaces/ml/pods(?:/(?P<name>[^/?]+))?", path)
            if found is None:
                return refusal(404, "NotFound", "the server could not find the requested resource")
            if verb == "GET":
                return 200, {
                    "kind": "PodList",
                    "apiVersion": "v1",
                    "metadata": {"resourceVersion": "184502"},
                    "items": copy.deepcopy(list(self.pods.values())),
                }
            return self._delete(found["name"], json.loads(body or b"{}"))

    def _refused(self, status: int, verb: str) -> tuple[int, dict[str, Any]]:
        if status != 403:
            return refusal(status, "InternalError", "etcdserver: request timed out")
        return refusal(
            403,
            "Forbidden",
            f'pods is forbidden: User "system:serviceaccount:ml:keepstep" cannot {verb} resource '
            '"pods" in API group "" in the namespace "ml"',
        )

    def _delete(self, name: str, options: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.deletions.append({"name": name, **options})
        pod = self.pods.get(name)
        if pod is None:
            return refusal(404, "NotFound", f'pods "{name}" not found')
        about, wanted = pod["metadata"], options.get("preconditions", {}).get("uid")
        if wanted is not None and wanted != about["uid"]:
            return refusal(
                409,
                "Conflict",
                f'Operation cannot be fulfilled on pods "{name}": Precondition failed: UID in '
                f"precondition: {wanted}, UID in object meta: {about['uid']}",
            )
        grace_s = options.get("gracePeriodSeconds", pod["spec"]["terminationGracePeriodSeconds"])
        about["deletionGracePeriodSeconds"] = grace_s
        about["deletionTimestamp"] = stamp(self.now_s + grace_s)
        answer = copy.deepcopy({"kind": "Pod", "apiVersion": "v1", **pod})
        if grace_s == 0:
            self._remove(name)
        else:
            self._in(ENDS_WITHIN_S, "end", name)
        return 200, answer


def refusal(code: int, reason: str, message: str) -> tuple[int, dict[str, Any]]:
    return code, {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


@contextmanager
def served(cluster: Cluster, certificate: Path | None = None) -> Iterator[str]:
    """Where. certificate: with its key; by TLS then."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(size)
            token = self.headers.get("Authorization", "")
            status, said = cluster.answer(self.command, self.path.partition("?")[0], token, body)
            text = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_DELETE = _answer

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        scheme = "http" if certificate is None else "https"
        yield f"{scheme}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def kubeconfig(path: Path, url: str, token: str = TOKEN) -> Path:
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "contexts": [
                    {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "ml"}}
                ],
                "clusters": [{"name": "c", "cluster": {"server": url}}],
                "users": [{"name": "u", "user": {"token": token}}],
            }
        )
    )
    return path
