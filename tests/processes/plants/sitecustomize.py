"""Defects below the product: with this directory on PYTHONPATH, a node's Python has them.

PLANT names them, separated by commas. Each is in what the operating system or a library gives:
memory that loses a bit or is slow, a processor that gives another product, an fsync that takes
long, a function whose last bit is another one, a wall clock that is ahead.
"""

import os
import sys

WORDS = sys.orig_argv
PLANTED = os.environ.get("PLANT", "").split(",")


def lose_a_bit() -> None:
    import mmap

    class BrokenMap(mmap.mmap):
        def __getitem__(self, place):  # type: ignore[no-untyped-def]
            data = super().__getitem__(place)
            if isinstance(place, slice) and place.start == 5 << 20:
                data = bytearray(data)
                data[777] &= 0xEF
                return bytes(data)
            return data

    mmap.mmap = BrokenMap  # type: ignore[misc]


def be_slow_memory() -> None:
    """Every copy takes four times as long."""
    from keepstep.edge.preflight import memory

    class SlowView:
        def __init__(self, of):  # type: ignore[no-untyped-def]
            self.view = memoryview(of)

        def __setitem__(self, place, source):  # type: ignore[no-untyped-def]
            for _ in range(4):
                self.view[place] = getattr(source, "view", source)

        def release(self) -> None:
            self.view.release()

    memory.memoryview = SlowView  # type: ignore[attr-defined]


def give_another_product() -> None:
    from keepstep.edge.preflight import products

    multiply, count = products.multiply, 0

    def sometimes_wrong(left, right):  # type: ignore[no-untyped-def]
        nonlocal count
        product = multiply(left, right)
        count += 1
        if count == 7 and len(product) > 64:  # not the canary's
            product.view("uint8")[5, 5] ^= 1
        return product

    products.multiply = sometimes_wrong


def sync_slowly() -> None:
    import time

    fsync = os.fsync

    def slow(fd):  # type: ignore[no-untyped-def]
        time.sleep(0.5)
        fsync(fd)

    os.fsync = slow


def sync_slowly_once() -> None:
    """In the first process that looks."""
    from pathlib import Path

    mark = Path(os.environ["KEEPSTEP_STATE_DIR"]) / "was-slow"
    if not mark.exists():
        mark.touch()
        sync_slowly()


def change_the_last_bit() -> None:
    import torch

    gelu = torch.nn.functional.gelu
    torch.nn.functional.gelu = lambda x: gelu(x) * (1 + 2**-23)


def be_ahead() -> None:
    """Of all others, by 0.3 s."""
    import time

    now_ns = time.time_ns
    time.time_ns = lambda: now_ns() + 300_000_000


PLANTS = {
    "memory": ("memory", lose_a_bit),
    "memory-speed": ("memory-speed", be_slow_memory),
    "products": ("products", give_another_product),
    "disk": ("disk", sync_slowly),
    "disk-once": ("disk", sync_slowly_once),
    "loss": ("training", change_the_last_bit),
}

if "clock" in PLANTED and "preflight" in WORDS:
    be_ahead()
if "keepstep.runtime.preflight.child" in WORDS:
    for name in PLANTED:
        if name in PLANTS and PLANTS[name][0] in WORDS:
            PLANTS[name][1]()
