"""A node's metrics, scraped over HTTP and read by Prometheus' own parser."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from keepstep.config import Settings, resolve
from keepstep.edge.os.clock import CLOCK
from keepstep.edge.os.journal import FileJournal
from keepstep.edge.shm.beat_files import write_beat
from keepstep.edge.shm.collective_profile_page import COUNT_FILE
from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.node_safety_file import write_node_safety
from keepstep.edge.shm.parts_file import write_parts
from keepstep.edge.shm.slot import Slot, slot_path
from keepstep.edge.shm.status_page import StatusPage
from keepstep.errors import ConfigError
from keepstep.model.beats import SILENT_NS, KeeperBeat
from keepstep.model.horizon import Horizon
from keepstep.model.parts import STALE_NS, PartHealth, PartNumber, PartsReport
from keepstep.model.rhythm import Interleaved
from keepstep.model.snapshot import SlotState, SlotView, Stamp
from keepstep.model.units import S_NS
from keepstep.runtime.agent.process import ServedMetrics

Samples = dict[tuple[str, str], float]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    values = {
        "arena_dir": str(tmp_path / "arena"),
        "state_dir": str(tmp_path / "journals"),
        "host": "127.0.0.1",
    }
    made = resolve({"job": "demo", **values}, {}, "demo")
    made.job_dir.mkdir(parents=True)
    return made


@pytest.fixture
def metrics(settings: Settings) -> Iterator[ServedMetrics]:
    with writing(settings) as journal:
        journal.record("resumed", "of a run before", step=9, source="memory", lost_steps=7, epoch=1)
    made = ServedMetrics(settings)
    yield made
    made.stop()


@contextlib.contextmanager
def writing(settings: Settings) -> Iterator[FileJournal]:
    journal = FileJournal(settings.journal_path, "agent")
    yield journal
    journal.close()


def scrape(port: int) -> Samples:
    """By name and by the value of the only label, if there is one."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation and family.type in ("gauge", "counter", "histogram")
        for sample in family.samples:
            assert sample.name.startswith("keepstep_")
            found[sample.name, ",".join(sample.labels.values())] = sample.value
    return found


def rank_page(settings: Settings, rank: int, steps: list[int], world_size: int = 2) -> StatusPage:
    page = StatusPage.own(MEMORY, settings.job_dir, rank)
    assert page is not None
    slots = tuple(SlotView(SlotState.SEALED, Stamp(step, 2)) for step in steps)
    counts = {
        "captured_steps": 5,
        "skipped_steps": 2,
        "torn_steps": 1,
        "stall_ns_total": S_NS // 4,
        "step_ns_last": S_NS // 2,
    }
    page.publish(
        rank=rank,
        world_size=world_size,
        pid=7,
        epoch=2,
        completed_step=steps[-1],
        slots=slots,
        **counts,
    )
    return page


def test_a_job_before_anything_has_happened(metrics: ServedMetrics) -> None:
    found = scrape(metrics.start(0))
    assert found["keepstep_job_info", "demo"] == 1
    assert (
        found["keepstep_keeper_up", ""],
        found["keepstep_epoch", ""],
        found["keepstep_lost_steps_total", ""],
    ) == (0, 0, 0)
    assert ("keepstep_committed_step", "") not in found
    assert (
        sum(value for (name, _), value in found.items() if name == "keepstep_goodput_seconds") == 0
    )


def test_what_became_of_checkpoints_and_redundancy(
    settings: Settings, metrics: ServedMetrics
) -> None:
    port = metrics.start(0)
    before = scrape(port)
    assert ("keepstep_stored_step", "") not in before
    assert ("keepstep_redundancy_off", "") not in before
    assert [before["keepstep_checkpoints_total", o] for o in ("stored", "failed")] == [0, 0]
    with writing(settings) as journal:
        for kind, step in (("persisted", 3), ("persist-failed", 5), ("persisted", 7)):
            journal.record(kind, "so it was", step=step)
        for kind in ("persister-stuck", "store-unreachable", "store-unreachable", "declined"):
            journal.record(kind, "so it was")
    write_node_safety(MEMORY, settings.job_dir, {"policy": "none", "nodes": []})
    found = scrape(port)
    assert found["keepstep_stored_step", ""] == 7
    assert [found["keepstep_checkpoints_total", o] for o in ("stored", "failed")] == [2, 1]
    troubles = [found["keepstep_store_troubles_total", k] for k in ("hangs", "unreachable")]
    assert troubles == [1, 2]
    assert found["keepstep_declined_total", ""] == 1
    assert found["keepstep_redundancy_off", ""] == 1
    write_node_safety(MEMORY, settings.job_dir, {"policy": "copies:2", "nodes": []})
    assert scrape(port)["keepstep_redundancy_off", ""] == 0


def test_parts_as_other_exporters_name_them_while_they_are_news(
    settings: Settings, metrics: ServedMetrics
) -> None:
    port = metrics.start(0)
    assert not any("part_health" in name for name, _ in scrape(port))
    parts = (PartHealth("gpu 0000:3b:00", "bad", "hot", "cool it", 3, 1),)
    numbers = (
        PartNumber("DCGM_FI_DEV_GPU_TEMP", "pci_bus_id", "0000:3b:00", 91.0),
        PartNumber("node_network_carrier_changes_total", "device", "eth0", 4.0),
        PartNumber("node_infiniband_symbol_error_total", "device,port", "mlx5_0,1", 7.0),
    )
    now_ns, boot = CLOCK.monotonic_ns(), CLOCK.boot()
    assert write_parts(MEMORY, settings.job_dir, PartsReport(now_ns, boot, parts, numbers))
    found = scrape_all(port)
    assert found["keepstep_part_health", ("bad", "gpu 0000:3b:00")] == 1
    assert found["keepstep_part_health", ("ok", "gpu 0000:3b:00")] == 0
    assert found["DCGM_FI_DEV_GPU_TEMP", ("0000:3b:00",)] == 91
    assert found["node_network_carrier_changes_total", ("eth0",)] == 4
    assert found["node_infiniband_symbol_error_total", ("mlx5_0", "1")] == 7
    old_ns = max(0, now_ns - STALE_NS - S_NS)
    write_parts(MEMORY, settings.job_dir, PartsReport(old_ns, "another boot", parts, numbers))
    found = scrape_all(port)
    assert found["keepstep_part_health", ("unknown", "gpu 0000:3b:00")] == 1
    assert ("DCGM_FI_DEV_GPU_TEMP", ("0000:3b:00",)) not in found


def scrape_all(port: int) -> dict[tuple[str, tuple[str, ...]], float]:
    """By name and the values of all labels, by their names."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(of for _, of in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_who_is_slow(settings: Settings, metrics: ServedMetrics) -> None:
    port = metrics.start(0)
    with writing(settings) as journal:
        journal.record("slow-rank", "so it was", rank=1, excess_ratio=0.5)
        journal.record("slow-rank", "so it was", rank=3, excess_ratio=0.25)
        journal.record("slow-over", "so it was", rank=1)
    found = scrape(port)
    assert found["keepstep_slow_ratio", "3"] == 0.25 and found["keepstep_slow_total", ""] == 2
    assert ("keepstep_slow_ratio", "1") not in found


def test_which_links_are_slow_or_damage(settings: Settings, metrics: ServedMetrics) -> None:
    port = metrics.start(0)
    with writing(settings) as journal:
        for nodes in ([1], [2]):
            journal.record("slow-link", "so it was", side="sender", nodes=nodes, ratio=2.5)
        journal.record("slow-link-over", "so it was", side="sender", nodes=[1])
        for count in (10, 15):
            journal.record("link-damages", "so it was", node=3, count=count)
    found = scrape_all(port)
    assert found["keepstep_slow_link_ratio", ("2", "sender")] == 2.5
    assert ("keepstep_slow_link_ratio", ("1", "sender")) not in found
    assert found["keepstep_slow_link_total", ()] == 2
    assert found["keepstep_link_damages_total", ("3",)] == 25
    with writing(settings) as journal:
        journal.record("mesh", "another one", mesh_version=2)
    found = scrape_all(port)
    assert not any(name == "keepstep_slow_link_ratio" for name, _ in found)
    assert found["keepstep_slow_link_total", ()] == 2


def test_what_ranks_keeper_and_memory_say(settings: Settings, metrics: ServedMetrics) -> None:
    living, dead = rank_page(settings, 0, [7, 8]), rank_page(settings, 1, [8, 9])
    dead.close()
    for shelf, rank in (("", 0), ("held", 4), ("held", 5), ("parity", 0)):
        path = slot_path(settings.job_dir / shelf, rank, 0)
        path.parent.mkdir(parents=True, exist_ok=True)
        Slot.create(MEMORY, path, 4096, 4096).close()
    lock = os.open(settings.job_dir / "keeper.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    port = metrics.start(0)
    quiet = scrape_all(port)
    assert quiet["keepstep_keeper_up", ()] == 0, "it has never said that it lives"
    assert quiet["keepstep_unknown", ("silence", "keeper")] == 1
    beat = KeeperBeat(CLOCK.monotonic_ns(), CLOCK.boot(), 7)
    write_beat(MEMORY, settings.job_dir, beat)
    found = scrape(port)
    assert not any(name == "keepstep_unknown" for name, _ in found)
    write_beat(MEMORY, settings.job_dir, replace(beat, at_ns=beat.at_ns - SILENT_NS))
    assert scrape(port)["keepstep_keeper_up", ""] == 0
    os.close(lock)
    living.close()
    assert [found["keepstep_rank_up", rank] for rank in "01"] == [1, 0]
    assert [found["keepstep_completed_step", rank] for rank in "01"] == [8, 9]
    assert found["keepstep_committed_step", ""] == 8
    assert (found["keepstep_keeper_up", ""], found["keepstep_epoch", ""]) == (1, 2)
    for name, value in (
        ("captured_steps", 5),
        ("skipped_steps", 2),
        ("torn_steps", 1),
        ("stall_seconds", 0.25),
    ):
        assert found[f"keepstep_{name}_total", "0"] == value
    assert found["keepstep_step_seconds", "0"] == 0.5
    own, copies, parities = (
        found["keepstep_memory_bytes", kind] for kind in ("own", "copy", "parity")
    )
    # status pages are part of what is its own
    assert copies == 2 * parities > 0 and own >= parities


def test_what_the_keeper_s_gate_has_done(settings: Settings, metrics: ServedMetrics) -> None:
    port = metrics.start(0)
    assert not any(name.startswith("keepstep_interleave") for name, _ in scrape(port))
    counted = Interleaved(
        plans=3,
        idle_ns=S_NS // 4,
        used_ns=S_NS // 8,
        overflow_ns=0,
        idle_bytes=10**9,
        late_bytes=7,
        free_bytes=9,
    )
    (settings.job_dir / COUNT_FILE).write_text(json.dumps(asdict(counted)))
    found = scrape(port)
    assert found["keepstep_interleave_plans_total", ""] == 3
    assert [
        found["keepstep_interleave_bytes_total", when] for when in ("idle", "late", "free")
    ] == [10**9, 7, 9]
    assert [
        found["keepstep_interleave_step_seconds", part] for part in ("idle", "used", "overflow")
    ] == [0.25, 0.125, 0]


def test_of_several_nodes_the_leaders_word_counts(
    settings: Settings, metrics: ServedMetrics
) -> None:
    page = rank_page(settings, 0, [7, 8], world_size=4)
    port = metrics.start(0)
    assert ("keepstep_committed_step", "") not in scrape(port)
    horizon = HorizonPage(MEMORY, settings.job_dir)
    horizon.write(Horizon(2, committed=Stamp(6, 2)))
    assert scrape(port)["keepstep_committed_step", ""] == 6
    horizon.close()
    page.close()


def test_each_look_reads_what_was_added_and_the_parts_are_the_whole(
    settings: Settings, metrics: ServedMetrics
) -> None:
    port = metrics.start(0)
    with writing(settings) as journal:
        journal.record("job-started", "job demo")
        journal.record("resumed", "afresh", step=-1, source="fresh", lost_steps=0, epoch=1)
        first = scrape(port)
        parts = [value for (name, _), value in first.items() if name == "keepstep_goodput_seconds"]
        assert len(parts) == 7 and sum(parts) > 0
        journal.record("rank-exited", "rank 1 was killed", rank=1, code=-9)
        second = scrape(port)
    assert (
        second["keepstep_goodput_seconds", "recovering"]
        > 0
        == first["keepstep_goodput_seconds", "recovering"]
    )
    assert (
        second["keepstep_goodput_seconds", "starting"]
        == first["keepstep_goodput_seconds", "starting"]
    )


def test_recoveries_by_cause_with_their_duration_and_what_was_lost(
    settings: Settings, metrics: ServedMetrics
) -> None:
    """Told with clocks of an hour ago: what is young may still grow, and is not told of."""
    lines = []
    for kind, at_s, data in [
        ("job-started", 0, {}),
        ("resumed", 1, {"step": -1, "source": "fresh", "lost_steps": 0, "epoch": 1}),
        ("rank-exited", 100, {"rank": 1, "code": -9}),
        ("resumed", 104, {"step": 80, "source": "memory", "lost_steps": 1, "epoch": 2}),
        ("diagnosis", 200, {"kind": "hang", "culprit": 0, "stalled_ns": 8 * S_NS}),
        ("resumed", 232, {"step": 160, "source": "memory", "lost_steps": 2, "epoch": 3}),
    ]:
        long_ago = os.stat(settings.journal_path).st_mtime_ns - 3600 * S_NS + at_s * S_NS
        event = {
            "wall_ns": long_ago,
            "mono_ns": at_s * S_NS,
            "who": "keeper",
            "kind": kind,
            "why": kind,
            "data": data,
        }
        lines.append(json.dumps(event, separators=(",", ":")) + "\n")
    with open(settings.journal_path, "a") as journal:
        journal.writelines(lines)
    found = scrape(metrics.start(0))
    assert (
        found["keepstep_recoveries_total", "crash"],
        found["keepstep_recoveries_total", "hang"],
    ) == (1, 1)
    assert found["keepstep_lost_steps_total", ""] == 3
    assert [
        found["keepstep_recovery_seconds_bucket", limit] for limit in ("3", "5", "30", "60", "+Inf")
    ] == [0, 1, 1, 2, 2]
    assert (
        found["keepstep_recovery_seconds_count", ""],
        found["keepstep_recovery_seconds_sum", ""],
    ) == (2, 44)
    assert found["keepstep_goodput_seconds", "detecting"] == 8


def test_a_memory_that_is_removed_meanwhile_is_none(
    settings: Settings, metrics: ServedMetrics
) -> None:
    settings.job_dir.rmdir()
    assert scrape(metrics.start(0))["keepstep_memory_bytes", "own"] == 0


def test_a_port_that_is_taken(settings: Settings, metrics: ServedMetrics) -> None:
    port = metrics.start(0)
    with pytest.raises(
        ConfigError, match=rf"metrics_port: expected a free port of 127.0.0.1, found {port}"
    ):
        ServedMetrics(settings).start(port)
    metrics.stop()
    metrics.stop()
    assert metrics.start(port) == port


def test_who_serves_them_may_end_without_a_word(settings: Settings) -> None:
    code = (
        "import sys\n"
        "from keepstep.config import settings_from_text\n"
        "from keepstep.runtime.agent.process import ServedMetrics\n"
        "print(ServedMetrics(settings_from_text(sys.argv[1])).start(0) > 0)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, settings.to_text()], capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stdout) == (0, "True\n"), run.stderr


def test_without_the_extra_an_error_names_it(settings: Settings) -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"  # as where it is not installed
        "from keepstep.config import settings_from_text\n"
        "from keepstep.runtime.agent.process import ServedMetrics\n"
        "ServedMetrics(settings_from_text(sys.argv[1])).start(0)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, settings.to_text()], capture_output=True, text=True, timeout=60
    )
    assert (
        "ConfigError: metrics_port: expected prometheus-client (pip install "
        "'keepstep[metrics]'), found none" in run.stderr
    )
