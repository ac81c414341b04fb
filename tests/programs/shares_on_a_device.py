"""`benchmarks/gpu/sharing.py` where there is no device: tensors of the host stand for one that does
at once whatever is ordered, and counters of steps are on the host. What it shows is everything but
the order: plans, digests, slots with holes, votes, restores."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.gpu import sharing
from keepstep.edge.torch import capture, live_state, tree
from keepstep.edge.torch.copy_plans import CopyPlans
from keepstep.edge.torch.copy_stream import CopyStream, TorchOrders

CPU = torch.device("cpu")


class Prompt:
    """A stream, an event and torch's `cuda`, of a device that is always through."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """As either is made."""

    def nothing(self, *_: Any) -> None:
        """It has been done."""

    record = wait_event = wait_stream = synchronize = nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Prompt) -> float:
        return 0.0

    def current_stream(self, device: object = None) -> Prompt:
        return self

    @contextmanager
    def stream(self, stream: Prompt) -> Any:
        yield

    def is_current_stream_capturing(self) -> bool:
        return False


Prompt.Stream = Prompt.Event = Prompt  # type: ignore[attr-defined]


class Orders(TorchOrders):
    def copy_each(self, to: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(list(to), list(sources))


def main() -> None:
    tree.by_address = lambda tensor: tensor.numel() == 1
    capture.begin_host_thread = lambda: None
    plans = CopyPlans({CPU: CopyStream(CPU, Prompt(), Orders())})

    def look(self: Any, state: Any) -> Any:
        self._plans = plans
        return plans.devices

    live_state.TorchState._look_for_devices = look  # type: ignore[method-assign]
    sharing.main()


if __name__ == "__main__":
    main()
