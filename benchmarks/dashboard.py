"""What an open page costs who serves it, and how soon it is there.

Ranks are made up: pages and slots of the real formats, written by another process as a training
would, `--steps-per-s` each. `keepstep dashboard` serves them, in a process of its own, so its CPU
is the dashboard's alone; an agent does the same work on two threads. Measured in turns: without a
reader, with one. The reader is this process (`/live`), and a browser where there is one.

    python benchmarks/dashboard.py --ranks 64 --ranks 1000
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path

from benchmarks import harness

WRITER = """
import json, os, sys, time
from pathlib import Path
from keepstep.config import job_dir_of
from keepstep.edge.os.journal import FileJournal
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot, slot_path
from keepstep.edge.shm.status_page import StatusPage
from keepstep.model.layout import TensorSpec, lay_out
from keepstep.model.snapshot import Phase, SlotState, SlotView, Stamp

room, ranks, steps_per_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
job_dir = job_dir_of(room / "arena", "bench")
layout = lay_out([TensorSpec("weight", "float32", (1024,), 4096)])
manifest = json.dumps(layout.to_json()).encode()
journal = FileJournal(room / "state" / "bench" / "journal.jsonl", "keeper")
journal.record("keeper-started", "a keeper has it", adopted_slots=0)
pages, slots = [], []
for rank in range(ranks):
    journal.record("rank-joined", f"rank {rank} joins", rank=rank, pid=rank + 1)
    (job_dir / f"rank-{rank:05d}").mkdir(parents=True)
    slots.append([Slot.create(MEMORY, slot_path(job_dir, rank, i), 4096, 4096) for i in range(3)])
    pages.append(StatusPage.own(MEMORY, job_dir, rank))
journal.record("resumed", "afresh", source="fresh", step=-1, lost_steps=0, epoch=1)
step, held = 0, []
while True:
    began_s = time.monotonic()
    held = [*held, Stamp(step, 1)][-3:]
    views = [SlotView(SlotState.EMPTY, Stamp(-1, 0))] * 3
    for stamp in held:
        views[stamp.step % 3] = SlotView(SlotState.SEALED, stamp)
    for rank, page in enumerate(pages):
        slot = slots[rank][step % 3]
        slot.begin(bytes(16), rank, ranks, 1, Stamp(step, 1))
        slot.seal(slot.write_table(4096, manifest), layout.hash(), 0.5, time.time_ns())
        page.publish(
            rank=rank, world_size=ranks, pid=rank + 1, epoch=1, step=step + 1,
            phase=Phase.FORWARD, completed_step=step, slots=tuple(views), captured_steps=step,
            payload_bytes=4096, step_ns_last=20_000_000, loss=1 / (step + 1),
        )
    if step == 3:
        print("ready", flush=True)
    step += 1
    time.sleep(max(0.0, began_s + 1 / steps_per_s - time.monotonic()))
"""


@contextmanager
def job(ranks: int, steps_per_s: float) -> Iterator[dict[str, str]]:
    """A job of so many ranks that train; the environment in which it is found."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="keepstep-dashboard-") as room:
        (Path(room) / "arena").mkdir()
        words = [sys.executable, "-c", WRITER, room, str(ranks), str(steps_per_s)]
        writer = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        try:
            assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
            places = {"KEEPSTEP_ARENA_DIR": f"{room}/arena", "KEEPSTEP_STATE_DIR": f"{room}/state"}
            yield {**os.environ, **places}
        finally:
            writer.kill()
            writer.wait()


@contextmanager
def dashboard(environ: dict[str, str]) -> Iterator[tuple[int, int]]:
    """Process and port of what serves the job's page."""
    words = [sys.executable, "-m", "keepstep.cli.main", "dashboard", "bench", "--address", "0"]
    served = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        assert served.stdout is not None
        told = served.stdout.readline()
        url = next(word for word in told.split() if word.startswith("http"))
        yield served.pid, int(url.rstrip("/").rpartition(":")[2])
    finally:
        served.terminate()
        served.wait()


def cpu_s(pid: int) -> float:
    """Of the process and its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / harness.TICKS_PER_S


def share(pid: int, seconds: float) -> float:
    """Of a core, over a time in which nothing is done here."""
    began_s, before_s = time.monotonic(), cpu_s(pid)
    time.sleep(seconds)
    return (cpu_s(pid) - before_s) / (time.monotonic() - began_s)


@contextmanager
def reader(port: int) -> Iterator[tuple[float, int]]:
    """One page's connection: how long until it has everything, and how many bytes that is. What
    comes afterwards is read by a process of its own."""
    began_s = time.monotonic()
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/live")
    with closing(connection.getresponse()) as answer:
        while not (line := answer.readline()).startswith(b"data: "):
            pass
        took_s = time.monotonic() - began_s
        drain = subprocess.Popen(
            ["curl", "-sN", "-o", "/dev/null", f"http://127.0.0.1:{port}/live"]
        )
    try:
        yield took_s, len(line)
    finally:
        drain.kill()
        drain.wait()


def first_content_ms(port: int) -> list[float] | None:
    """In Chromium, from the begin of the navigation until the ranks are on the page; None where
    there is no browser."""
    try:
        from playwright.sync_api import sync_playwright

        from tests.dashboard.browser import browser_path
    except ImportError:
        return None
    found = []
    with sync_playwright() as playwright:
        path = browser_path(playwright)
        if path is None:
            return None
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        for _ in range(9):
            page = browser.new_page()
            page.add_init_script(
                """new MutationObserver((_, observer) => {
                  if (!document.querySelector("#ranks-table tbody tr")) return;
                  observer.disconnect();
                  requestAnimationFrame(() => {
                    window.contentMs = performance.now();
                  });
                }).observe(document, { subtree: true, childList: true });"""
            )
            page.goto(f"http://127.0.0.1:{port}/")
            while not (shown_ms := page.evaluate("window.contentMs")):
                page.wait_for_timeout(20)
            found.append(float(shown_ms))
            page.close()
        browser.close()
    return found


def measure(ranks: int, steps_per_s: float, rounds: int, seconds: float) -> None:
    """Print a row."""
    without, with_page, first_s, nbytes = [], [], [], 0
    with job(ranks, steps_per_s) as environ, dashboard(environ) as (pid, port):
        for _ in range(rounds):
            without.append(share(pid, seconds))
            with reader(port) as (took_s, nbytes):
                first_s.append(took_s)
                time.sleep(1.0)
                with_page.append(share(pid, seconds))
        content = first_content_ms(port)
    load = os.getloadavg()[0]
    shown = "no browser" if content is None else f"{statistics.median(content):.0f} ms"
    print(
        f"{ranks} ranks, {steps_per_s:g} steps/s, load {load:.1f}: page open "
        f"{statistics.median(with_page):.2%} of a core (least {min(with_page):.2%}), closed "
        f"{statistics.median(without):.2%}; everything sent after "
        f"{1000 * statistics.median(first_s):.0f} ms ({nbytes / 1024:.0f} KiB); first content in "
        f"Chromium: {shown}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--steps-per-s", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0)
    arguments = parser.parse_args()
    watch = harness.watch()
    for ranks in arguments.ranks or [64]:
        measure(ranks, arguments.steps_per_s, arguments.rounds, arguments.seconds)
    harness.tell(watch.end())


if __name__ == "__main__":
    main()
