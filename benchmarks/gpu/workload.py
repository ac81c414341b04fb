"""What the experiments on a device train, and how they tell time."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from keepstep.model.snapshot import Stamp

GB = 1e9
WIDTH = 8192
SETTLED = 5  # steps before times count


def say(name: str, **figures: object) -> None:
    words = (f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in figures.items())
    print(f"{name}: {'  '.join(words)}", flush=True)


def clock(act: Callable[[], object]) -> float:
    """Seconds that it takes on the device."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    act()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def mark() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def device_times(marks: list[Any]) -> list[float]:
    """Milliseconds of each step, as the device has them."""
    pairs = zip(marks[SETTLED:], marks[SETTLED + 1 :], strict=False)
    return [began.elapsed_time(ended) for began, ended in pairs]


class Trainer:
    """Linear layers under a fused AdamW: `gb` of parameters and optimizer state."""

    def __init__(self, gb: float, tokens: int) -> None:
        count = max(1, round(gb * GB / 12 / WIDTH / WIDTH))
        layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)]
        self.model = torch.nn.Sequential(*layers).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self._x = torch.randn(tokens, WIDTH, device="cuda", dtype=torch.bfloat16)

    def step(self, before_update: Callable[[], object] = lambda: None) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            y = self.model(self._x).float().square().mean()
        y.backward()
        before_update()
        self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        states = [v for s in self.optimizer.state.values() for v in s.values() if v.is_cuda]
        return [*self.model.parameters(), *states]

    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self.tensors()]

    def seal(self, slot: Any, copy: Any, run: Callable[[Any], object]) -> None:
        """As a capture does it."""
        slot.begin(bytes(16), 0, 1, 1, Stamp(0, 1))
        copy.copy_moving()
        run(copy.copy_still())
        copy.passed()
        layout = copy.state.layout
        header = slot.write_table(
            copy.state.payload_bytes, json.dumps(layout.to_json()).encode(), copy.sums
        )
        slot.seal(header, layout.hash(), 0.0, wall_ns=1)

    def with_others(self, mode: str, steps: int, marks: list[Any]) -> dict[str, float]:
        """The same steps with nothing, or with what others do in place of keepstep."""
        saver = SAVERS[mode](self)
        host_s = []
        for _ in range(steps):
            self.step(saver.before_update)
            marks.append(mark())
            began = time.perf_counter()
            saver.save()
            host_s.append(time.perf_counter() - began)
        saver.before_update()
        saver.end()
        return {"call_ms": 1e3 * sum(host_s) / len(host_s)}


class Nothing:
    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def before_update(self) -> None:
        """Nothing is under way."""

    def save(self) -> None:
        """Nothing is kept."""

    def end(self) -> None:
        """Nothing is to be waited for."""


class Raw(Nothing):
    """Copies to pinned memory on a stream of their own: the least that anybody can do."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._stream = torch.cuda.Stream()
        self._there = trainer.tensors()
        self._hosts = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in self._there]

    def before_update(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)

    def save(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.no_grad():
            for host, tensor in zip(self._hosts, self._there, strict=True):
                host.copy_(tensor, non_blocking=True)


class Dcp(Nothing):
    """DCP's stager with its pinned cache, which `async_save` waits for. (`DefaultStager`, its newer
    one, raises KeyError on this state with torch 2.11.)"""

    def __init__(self, trainer: Trainer) -> None:
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        super().__init__(trainer)
        self._stager = BlockingAsyncStager(cache_staged_state_dict=True)

    def save(self) -> None:
        trainer = self._trainer
        state = {"m": trainer.model.state_dict(), "o": trainer.optimizer.state_dict()}
        self._stager.stage(state)


class DcpAsync(Nothing):
    """`dcp.async_save` with that stager, into files in memory. Who calls it again waits until the
    last one is over, as DCP wants it."""

    def __init__(self, trainer: Trainer) -> None:
        import tempfile

        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        super().__init__(trainer)
        self._stager = BlockingAsyncStager(cache_staged_state_dict=True)
        self._home = tempfile.TemporaryDirectory(dir="/dev/shm", prefix="gpu-lab-dcp-")
        self._saves: Any = None

    def save(self) -> None:
        import torch.distributed.checkpoint as dcp

        if self._saves is not None:
            self._saves.result()
        trainer = self._trainer
        state = {"m": trainer.model.state_dict(), "o": trainer.optimizer.state_dict()}
        self._saves = dcp.async_save(
            state, checkpoint_id=self._home.name, async_stager=self._stager, no_dist=True
        )

    def end(self) -> None:
        self._saves.result()
        self._home.cleanup()


class TorchSave(Nothing):
    """`torch.save` of everything, into nothing: what it costs before a disk is asked."""

    def save(self) -> None:
        trainer = self._trainer
        with contextlib.closing(io.BytesIO()) as sink:
            torch.save([trainer.model.state_dict(), trainer.optimizer.state_dict()], sink)


SAVERS: dict[str, type[Nothing]] = {
    "none": Nothing,
    "raw": Raw,
    "dcp": Dcp,
    "dcp_async": DcpAsync,
    "torch_save": TorchSave,
}
