"""Checksums of matrix products: how far right ones are off, which wrong ones they find, and their
price.

    python benchmarks/products.py            # about two minutes
    python benchmarks/products.py --json

**Fit.** The greatest distance of right products, in units of their rounding, over networks of
several widths, on some seeds; `ROUNDINGS` in `edge/torch/numbers/products.py` has to lie above.
**False alarms.** So many clean steps on other seeds. **Recall.** Flips of one bit of a linear
layer's output and of a weight's gradient, so many of each of the 32 bits; one counts that changes
a bit of the state. Wilson's intervals, 95 %. **Cost.** Steps with and without, in turns: the median
of neighbouring blocks' ratios.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import harness  # beside this file: it is started as a script
import torch
from torch import nn
from wrong_numbers import wilson  # beside this file: it is started as a script

from keepstep.edge.torch.numbers import products
from keepstep.edge.torch.numbers.products import Products

WIDTHS = (16, 64, 256)
BLOCK_STEPS = 10


class Training:
    """A small network and AdamW."""

    def __init__(self, seed: int, width: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.width = width

    def batch(self) -> torch.Tensor:
        return torch.randn(32, self.width)

    def step(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        (self.model(x) - x).square().mean().backward()
        self.optimizer.step()

    def looked_at(self, x: torch.Tensor) -> list[str]:
        found = Products({"model": self.model})
        self.step(x)
        found.end()
        return [str(origin) for origin in found.wrong]

    def state(self) -> list[torch.Tensor]:
        moments = [v for s in self.optimizer.state.values() for v in s.values()]
        return [t.clone() for t in (*self.model.parameters(), *moments)]

    def put_back(self, state: list[torch.Tensor]) -> None:
        moments = [v for s in self.optimizer.state.values() for v in s.values()]
        with torch.no_grad():
            for tensor, before in zip((*self.model.parameters(), *moments), state, strict=True):
                tensor.copy_(before)


def fit(seeds: range, steps: int) -> float:
    """The greatest distance of what is right, in roundings."""
    greatest = [0.0]

    def measured(expected: products.Sums, found: torch.Tensor, dtype: torch.dtype) -> bool:
        value, size = expected
        unit = torch.finfo(dtype).eps * size
        greatest.append(float(((found - value).abs() / unit.clamp(min=1e-300)).max()))
        return False

    are_apart, products.are_apart = products.are_apart, measured
    for seed in seeds:
        training = Training(seed, WIDTHS[seed % len(WIDTHS)])
        for _ in range(steps):
            training.looked_at(training.batch())
    products.are_apart = are_apart
    return max(greatest)


def false_alarms(seeds: range, steps: int) -> int:
    alarms = 0
    for seed in seeds:
        training = Training(seed, WIDTHS[seed % len(WIDTHS)])
        for _ in range(steps // len(seeds)):
            alarms += bool(training.looked_at(training.batch()))
    return alarms


def flipped(tensor: torch.Tensor, at: int, bit: int) -> torch.Tensor:
    wrong = tensor.clone(memory_format=torch.contiguous_format)
    raw = wrong.view(torch.int32).view(-1)
    raw[at % raw.numel()] ^= -(2**31) if bit == 31 else 1 << bit
    return wrong


def recall(seed: int, per_bit: int) -> list[dict[str, Any]]:
    """Each flip is a step done twice from one state: as it should be, and with it."""
    rng = random.Random(seed)
    training = Training(seed, 64)
    for _ in range(5):
        training.step(training.batch())
    rows = []
    for site in ("output", "weight's gradient"):
        for bit in [bit for bit in range(32) for _ in range(per_bit)]:
            x, before = training.batch(), training.state()
            training.step(x)
            right = training.state()
            training.put_back(before)
            layer = training.model[rng.choice((0, 2))]
            at = rng.randrange(10**9)
            if site == "output":
                handle = layer.register_forward_hook(
                    lambda module, args, y, at=at, bit=bit: _as_grad(
                        y, flipped(y.detach(), at, bit)
                    )
                )
            else:
                handle = layer.weight.register_hook(lambda g, at=at, bit=bit: flipped(g, at, bit))
            found = training.looked_at(x)
            handle.remove()
            is_changed = not all(map(_same, right, training.state()))
            training.put_back(right)
            rows.append({"site": site, "bit": bit, "changed": is_changed, "found": bool(found)})
    return rows


def _as_grad(y: torch.Tensor, wrong: torch.Tensor) -> torch.Tensor:
    """`wrong`, with the gradient of `y`."""
    return y + (wrong - y.detach()) if bool(torch.isfinite(wrong).all()) else wrong + 0 * y


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def cost(rounds: int, width: int) -> dict[str, float]:
    training = Training(1, width)
    ratios = []
    for _ in range(rounds):
        took = []
        for looks in (True, False):
            began = time.perf_counter()
            for _ in range(BLOCK_STEPS):
                (training.looked_at if looks else training.step)(training.batch())
            took.append(time.perf_counter() - began)
        ratios.append(took[0] / took[1])
    return {"ratio": statistics.median(ratios), "step_ms": 1000 * took[1] / BLOCK_STEPS}


def told(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for site in dict.fromkeys(row["site"] for row in rows):
        for bits in (range(32), range(20, 32), range(12, 20), range(12)):
            of = [r for r in rows if r["site"] == site and r["bit"] in bits and r["changed"]]
            if not of:
                continue
            hits = sum(r["found"] for r in of)
            low, high = wilson(hits, len(of))
            name = f"bits {bits.start} to {bits.stop - 1}"
            lines.append(f"{site}, {name}: {hits} of {len(of)} ({low:.1%} to {high:.1%})")
    return lines


def show(report: dict[str, Any]) -> None:
    print(f"right products are off by {report['fit']:.2f} roundings at most; the limit: ", end="")
    print(report["roundings"])
    print(f"{report['clean_steps']} clean steps on other seeds: {report['alarms']} alarms")
    print("\n".join(told(report["recall"])))
    spent = report["cost"]
    print(f"a step of {spent['step_ms']:.1f} ms takes {spent['ratio']:.2f} times as long")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--per-bit", type=int, default=3)
    parser.add_argument("--clean-steps", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--width", type=int, default=512, help="of the network whose steps are timed"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    watch = harness.watch()
    report: dict[str, Any] = {"roundings": products.ROUNDINGS, "clean_steps": args.clean_steps}
    report["fit"] = fit(range(100, 130), 30)
    report["alarms"] = false_alarms(range(200, 230), args.clean_steps)
    report["recall"] = recall(1, args.per_bit)
    report["cost"] = cost(args.rounds, args.width)
    harness.tell(watch.end(), report, args.json, show)


if __name__ == "__main__":
    main()
