"""NodeAgent: what a Ray actor does, which is to be `keepstep run` on its node.

Comes in: a command line and variables. Goes out: the exit code. Imports no ray but to ask where it
is, so that it can be tested without.

Invariant: when the actor ends, however it ends, so does all that it has started but the keeper,
whose memory the next one goes on from; at most one agent of a training runs on a node.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from keepstep.edge.os.orphans import end_orphans
from keepstep.edge.os.own_modules import module_words
from keepstep.edge.os.processes import RAY_MARK

NODE_ID_DIGITS = 12  # of Ray's 56


class NodeAgent:
    """One node's. Ray calls `serve`, and calls it again after it has started the actor anew."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        node_id: Callable[[], str] | None = None,
    ) -> None:
        """`command`: of `keepstep run`. `node_id`: asked for this node's; None: of Ray."""
        node = (node_id or _ray_node)()
        self._command = [sys.executable, *module_words("keepstep.cli.main", "run", *command)]
        words = "\0".join([node, *self._command])
        self._mark = {RAY_MARK: hashlib.sha256(words.encode()).hexdigest()[:16]}
        self._environ = {name: text.replace("{node_id}", node) for name, text in environ.items()}

    def serve(self) -> int:
        """Be the agent until the job is over on this node: its exit code."""
        end_orphans(self._mark)  # of an actor before this one, whose guard was killed, too
        [name], [mark] = self._mark, self._mark.values()
        guard = subprocess.Popen(
            [sys.executable, *module_words("keepstep.ray.guard", name, mark)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        assert guard.stdin is not None
        try:
            environ = {**os.environ, **self._environ, **self._mark}
            return subprocess.Popen(self._command, env=environ).wait()
        finally:
            guard.stdin.close()
            guard.wait()


def _ray_node() -> str:
    """Short enough for the path of a socket, and as good as the whole."""
    import ray

    return str(ray.get_runtime_context().get_node_id())[:NODE_ID_DIGITS]
