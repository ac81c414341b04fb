"""Pod replacing: a process that gets one lost node's pod replaced, and says how that went.

`python -m keepstep.runtime.agent.pod_replacing [--force]`, with KEEPSTEP_LOST_HOST set. Comes in:
the pods, once a second. Goes out: at most one deletion, or two with --force, and one line on
standard output. An API server that does not answer is asked again until the time is over.

A process of its own, since the client takes a second of a core to import, and an agent that is just
recovering has none to spare.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from keepstep.core.recovery.pod_replacement import WITHIN_S, Delete, PodReplacement
from keepstep.edge.kubernetes.pods_api import NotAllowedError, PodsApi

EVERY_S = 1.0


def replaced(
    api: PodsApi,
    addresses: list[str],
    me: str,
    may_force: bool,
    now_s: Callable[[], float],
    pause: Callable[[float], None],
) -> str:
    """How it went. now_s: since 1970, as the cluster has it."""
    began_s = now_s()
    replacement = PodReplacement(addresses, me, may_force, began_s)
    wanted: Delete | None = None  # that nobody has acknowledged yet
    while True:
        why = ""
        try:
            act = wanted or replacement.look(api.pods(), now_s())
            if isinstance(act, str):
                return act
            wanted = act
            if act is not None:
                api.delete(act.name, act.uid, act.by_force)
                wanted = None
        except NotAllowedError as error:
            return str(error)
        except OSError as error:
            why = str(error)
        if why and now_s() - began_s >= WITHIN_S:
            return f"no answer within {WITHIN_S:.0f} s: {why}"
        pause(EVERY_S)


def main() -> int:
    addresses = os.environ["KEEPSTEP_LOST_HOST"].replace(",", " ").split()
    me = os.environ.get("POD_NAME") or os.environ.get("HOSTNAME", "")
    try:
        api = PodsApi.found()
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(replaced(api, addresses, me, "--force" in sys.argv[1:], time.time, time.sleep))
    return 0


if __name__ == "__main__":
    sys.exit(main())
