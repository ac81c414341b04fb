"""Agent process: the real world of an agent, and its loop: `keepstep run`, once its supervisor has
started it.

Comes in: a launch, a configuration, an environment. Goes out: the exit code of the job here.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from keepstep.config import Config, Settings, resolve
from keepstep.core.economics.retention import check_rules
from keepstep.core.parts.kernel_log import load_table
from keepstep.core.postmortem.table import parse_table
from keepstep.core.redundancy.placement import place
from keepstep.core.wire.conversations import AGENT_WITH_KEEPER, AGENT_WITH_PROCESS
from keepstep.edge.kubernetes.provider import KubernetesProvider
from keepstep.edge.net import boxes
from keepstep.edge.net.keepers import KeeperSocket
from keepstep.edge.net.metrics_server import Exposition, Reading
from keepstep.edge.os.clock import CLOCK
from keepstep.edge.os.flock import hold
from keepstep.edge.os.job_directory import claim_job_dir, leave_job_dir
from keepstep.edge.os.journal import FileJournal, JournalTail, read_journal
from keepstep.edge.os.loop import Loop
from keepstep.edge.os.needs import check_needs, unsigned_blocks
from keepstep.edge.os.orphans import end_orphans, find_orphans
from keepstep.edge.os.own_tables import kernel_text, pattern_text
from keepstep.edge.os.provider import CommandProvider
from keepstep.edge.os.signals import Signals
from keepstep.edge.os.threads import Threads
from keepstep.edge.parts.probe import Targets
from keepstep.edge.parts.prober_process import ChildProber
from keepstep.edge.parts.traces import TRACES
from keepstep.edge.probes.devices import visible_devices
from keepstep.edge.probes.node import NodeProbes
from keepstep.edge.shm.keeper_look import keeper_look
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.status_pages import read_pages
from keepstep.edge.torch.meeting_place import StoreMeetingPlaces, local_address
from keepstep.edge.torch.pickles.plain import load_plain
from keepstep.edge.torch.ranks import TorchRankProcesses, streams
from keepstep.edge.torch.tcp_store import open_embedded
from keepstep.errors import ConfigError, IdentityError, KeepstepError
from keepstep.model.events import WARNING
from keepstep.model.hosts import first_host
from keepstep.model.launch import AGENT_SOCKET, RANK_OF, Launch
from keepstep.model.topology import Auto, parse_policy, topology
from keepstep.ports import Hearer, Journal, NodeProvider, OpenKV
from keepstep.runtime.agent.agent import SOCKET, Agent
from keepstep.runtime.agent.metrics import Metrics
from keepstep.runtime.agent.supervisor import SIGNALS, AgentReport, predecessor_of
from keepstep.runtime.agent.world import AgentOptions, AgentWorld, PartsWorld
from keepstep.runtime.job_name import default_job
from keepstep.runtime.keeper_search import KeeperSearches
from keepstep.runtime.refused_messages import RefusedMessages

LOCK = "agent.lock"  # held by the agent that lives
LOCK_WITHIN_S = 2.0  # an agent that has just been killed may not be gone yet
WORKERS = 4  # a look at ranks may hang; another one must not wait for it


class Closeable(Protocol):
    """Something that is served."""

    def close(self) -> None:
        """Serve it no longer."""


# Serves the job's dashboard where the settings want one. Raises ConfigError.
ServeDashboard = Callable[[Settings, FileJournal], Closeable | None]


def supervise(
    launch: Launch,
    config: Config,
    environ: Mapping[str, str],
    serve_dashboard: ServeDashboard = lambda settings, journal: None,
) -> int:
    """Run the job to its end; the exit code. Raises KeepstepError when it cannot begin."""
    handed_down = {"KEEPSTEP_AGENT": str(os.getpid())}
    job = launch.job or default_job(launch.argv)
    settings = resolve(config, {**environ, **handed_down}, job)
    check_rules(settings.keep)
    check_needs(settings)
    _check_sizes(launch, settings)
    streams(launch)
    claim_job_dir(settings.job_dir)
    _be_the_only_one(settings)
    before = predecessor_of(environ)
    if launch.nodes == 1 and before is not None and _over_unseen(settings)[0] in before.pids:
        _tell_over(settings, environ)
        leave_job_dir(settings.job_dir, LOCK)  # the keeper had removed it, with all that was in it
        return 0
    if before is None:
        _leave_finished_ranks(settings)
        _end_left_ranks(settings)
    rank_environ = {
        **replace(config, job=settings.job).to_env(),
        **handed_down,
        AGENT_SOCKET: str(settings.job_dir / SOCKET),
        RANK_OF: str(settings.job_dir),
    }
    with ExitStack() as undo:
        return _run(launch, settings, environ, rank_environ, serve_dashboard, undo)


def _check_sizes(launch: Launch, settings: Settings) -> None:
    """Raises ConfigError when the job could not go on with as few nodes as it may."""
    if settings.slots == 1 and launch.min_nodes == 1:
        raise ConfigError(
            "slots: expected 2 or more in a job that may be on one node, where nobody else has the "
            f"snapshot while the only slot is overwritten, found slots=1 and --nnodes "
            f"{launch.min_nodes}:{launch.nodes}"
        )
    if launch.min_nodes == launch.nodes:
        return
    sizes = f"--nnodes {launch.min_nodes}:{launch.nodes}"
    if settings.store is None:
        raise ConfigError(
            f"{sizes}: expected a store (--store), since a job of another size resumes from a "
            "checkpoint, found none"
        )
    policy = parse_policy(settings.redundancy)
    if launch.min_nodes > 1 and not isinstance(policy, Auto):
        try:
            place(policy, topology(launch.min_nodes))
        except ConfigError as error:
            raise ConfigError(f"{sizes}: redundancy {error}") from error


def _leave_finished_ranks(settings: Settings) -> None:
    """Raises IdentityError where ranks of a run that is over are still about what the program does
    after its last step: an export is not to be ended by a start."""
    found = find_orphans({RANK_OF: str(settings.job_dir)}, settings.job_dir)
    if not found:
        return  # as at most starts: no journal is read for it
    left = _over_unseen(settings)[1].intersection(found)
    if not left:
        return
    leave_job_dir(settings.job_dir, LOCK)
    pids = " ".join(map(str, sorted(left)))
    raise IdentityError(
        f"job {settings.job}: the earlier run ended well: expected none of its processes, found "
        f"{len(left)} still at work after their last step: wait until they have ended, or end them "
        f"(kill {pids}), and start again"
    )


def _end_left_ranks(settings: Settings) -> None:
    """When the supervisor of a run is killed with its agent, the ranks train on. Whoever starts the
    same command again wants this run: two lives of a rank must not be, and the others' keepers
    would meet anew over ranks that train. What they had done lies in memory."""
    ended = end_orphans({RANK_OF: str(settings.job_dir)}, settings.job_dir)
    if not ended:
        return
    with closing(FileJournal(settings.journal_path, "agent")) as journal:
        why = (
            f"processes of an earlier run of this job were at work without an agent ({len(ended)}):"
            " they are ended, and memory is asked for what they had done"
        )
        journal.record("left-ranks-ended", why, WARNING, ended=ended)


def _over_unseen(settings: Settings) -> tuple[int | None, set[int]]:
    """The last agent and the processes of its ranks, if all of these have ended well while nobody
    looked: then their memory is gone, and to start them again would be to begin anew. A journal
    that is another user's does not count, nor what it tells of a run whose first word is not
    there."""
    agent, is_over = None, False
    ranks: set[int] = set()
    for event in read_journal(settings.journal_path, os.geteuid()):
        if event.kind == "job-started":
            agent, ranks, is_over = event.data.get("pid"), set(), False
        elif event.kind == "rank-joined":
            ranks.add(event.data.get("pid", 0))
        elif event.kind == "resumed":
            is_over = False
        elif event.kind == "job-over":
            is_over = bool(event.data.get("ok"))
        elif event.kind == "job-ended" and not is_over:
            agent, ranks = None, set()  # it has seen the end, and waited for them
    return (agent, ranks) if is_over else (None, set())


def _tell_over(settings: Settings, environ: Mapping[str, str]) -> None:
    with closing(FileJournal(settings.journal_path, "agent")) as journal:
        why = "all ranks had ended well when the node's agent was gone: nothing is left to do"
        journal.record("job-ended", why, ok=True)
    AgentReport(environ).say_last_word(0)


def _be_the_only_one(settings: Settings) -> None:
    """Until this process ends. Raises IdentityError when another agent runs the job here: its ranks
    would be taken for ours, and ours for its."""
    until_s = time.monotonic() + LOCK_WITHIN_S
    while hold(settings.job_dir / LOCK) is None:
        if time.monotonic() > until_s:
            raise IdentityError(
                f"job {settings.job}: expected to be the only `keepstep run` of it on this node, "
                "found another one that is running; end that one, or give this one another name "
                "with --job"
            )
        time.sleep(LOCK_WITHIN_S / 40)


def _run(
    launch: Launch,
    settings: Settings,
    environ: Mapping[str, str],
    rank_environ: Mapping[str, str],
    serve_dashboard: ServeDashboard,
    undo: ExitStack,
) -> int:
    loop = Loop()
    undo.callback(loop.close)
    signals = Signals(loop)
    undo.callback(signals.close)
    journal = FileJournal(settings.journal_path, "agent")
    undo.callback(journal.close)
    tell_unsigned(launch, settings, journal)
    metrics = ServedMetrics(settings)
    undo.callback(metrics.stop)
    executor = Threads(WORKERS, loop.post)
    processes = TorchRankProcesses(loop, executor, launch, settings.job, rank_environ)
    options = _options(launch, settings, environ)
    if settings.metrics_port is not None:
        metrics.start(settings.metrics_port)
    dashboard = _dashboard(serve_dashboard, settings, journal, options)
    if dashboard is not None:
        undo.callback(dashboard.close)

    report = AgentReport(environ)

    def last_word(exit_code: int) -> None:
        report.say_last_word(exit_code)
        # Only the keeper's work is left: whoever does not want to wait for it need not.
        signals.close()

    door = KeeperSocket(loop, settings, AGENT_WITH_KEEPER, journal.record)
    world = AgentWorld(
        clock=CLOCK,
        timers=loop,
        memory=MEMORY,
        journal=journal,
        executor=executor,
        keepers=KeeperSearches(door, CLOCK, loop),
        processes=processes,
        probes=NodeProbes(settings.journal_path.parent, load_plain),
        serve_boxes=partial(_serve, loop, journal),
        open_kv=_open_kv(loop, launch, settings, journal),
        meeting_places=StoreMeetingPlaces(),
        provider=_provider(settings),
        token=lambda: secrets.token_hex(16),
        take_part=report.take_part,
        say_last_word=last_word,
        show=lambda text: print(text, file=sys.stderr),
        pid=os.getpid(),
        interpreter=sys.executable,
        parts=_parts(loop, settings),
        patterns=parse_table(pattern_text()),
    )
    outcome: list[int | KeepstepError] = []
    agent = Agent(world, options, launch, outcome.append)
    for signum in SIGNALS:
        _hear(signals, signum, agent)
    agent.begin()
    loop.run(lambda: bool(outcome))
    if isinstance(outcome[0], KeepstepError):
        raise outcome[0]
    return outcome[0]


def tell_unsigned(launch: Launch, settings: Settings, journal: Journal) -> None:
    """Where blocks cross between nodes, and nobody signs them, and nobody has decided so."""
    if launch.nodes > 1 and (unsigned := unsigned_blocks(settings)):
        journal.record("blocks-unsigned", unsigned, WARNING)


def _dashboard(
    serve: ServeDashboard, settings: Settings, journal: FileJournal, options: AgentOptions
) -> Closeable | None:
    """Raises ConfigError where it cannot be served; an agent that follows a killed one goes on
    without."""
    try:
        return serve(settings, journal)
    except ConfigError as error:
        if options.predecessor is None:
            raise
        journal.record("dashboard-missing", f"nobody serves the dashboard: {error}", WARNING)
        return None


class ServedMetrics:
    """The node's metrics over HTTP. Scrapes come on threads of the server's, and are answered one
    at a time."""

    def __init__(self, settings: Settings) -> None:
        """Made before the first event that is to count."""
        self._host = settings.metrics_host
        self._lock = threading.Lock()
        self._exposition: Exposition | None = None
        job_dir = settings.job_dir
        self._metrics = Metrics(
            settings.job,
            job_dir,
            CLOCK,
            MEMORY,
            JournalTail(settings.journal_path, from_its_end=True, owner=os.geteuid()),
            read_pages=lambda: read_pages(job_dir),
            keeper_lives=lambda: keeper_look(job_dir, CLOCK.monotonic_ns(), CLOCK.boot()).alive,
        )

    def start(self, port: int) -> int:
        """Serve on `port` of `metrics_host` (0 chooses one): the port. Raises ConfigError."""
        self._exposition = Exposition(self._read, port, self._host)
        return self._exposition.port

    def _read(self) -> Reading:
        with self._lock:
            return self._metrics.read()

    def stop(self) -> None:
        """Nothing the second time."""
        if self._exposition is not None:
            self._exposition.close()
            self._exposition = None


def _hear(signals: Signals, signum: int, agent: Agent) -> None:
    """A shell's `nohup` stays respected."""
    if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
        number = int(signum)  # that is what the other nodes are told
        signals.on(signum, lambda: agent.signalled(number))


def _options(launch: Launch, settings: Settings, environ: Mapping[str, str]) -> AgentOptions:
    meets_at = launch.endpoint
    found = os.uname().nodename if meets_at is None else local_address(meets_at)
    return AgentOptions.of(
        settings,
        launch,
        host=first_host(settings.host) or found,
        devices=tuple(visible_devices(environ)),
        predecessor=predecessor_of(environ),
    )


def _serve(loop: Loop, journal: Journal, path: Path, hearer: Hearer) -> boxes.UnixBoxServer:
    tell = RefusedMessages(journal).tell  # who sends nonsense does not fill the journal
    return boxes.listen(loop, path, AGENT_WITH_PROCESS, lambda box: hearer, tell)


def _parts(loop: Loop, settings: Settings) -> PartsWorld:
    store = settings.store
    targets = Targets(
        arena_dir=settings.arena_dir,
        disk_dir=Path(store) if store is not None and os.path.isdir(store) else settings.state_dir,
        pid=os.getpid(),
        traces=settings.journal_path.parent / TRACES,
    )
    return PartsWorld(ChildProber(loop, targets), load_table(kernel_text()))


def _provider(settings: Settings) -> NodeProvider | None:
    if settings.node_provider.startswith("kubernetes"):
        return KubernetesProvider(may_force=settings.node_provider.endswith(":force"))
    return CommandProvider(settings.replace_command) if settings.replace_command else None


def _open_kv(loop: Loop, launch: Launch, settings: Settings, journal: FileJournal) -> OpenKV:
    """Where the agents meet: etcd, or a store that one of them hosts."""
    prefix = f"keepstep/{os.getuid()}/{settings.job}/"  # an etcd may have jobs of many users

    def tell(why: str) -> None:
        journal.record("meeting-away", why)

    if launch.etcd is not None:
        from keepstep.edge.net.etcd import open_etcd  # an extra

        return partial(open_etcd, loop, launch.etcd, prefix, tell=tell)
    endpoint = launch.endpoint or ("", 0)  # of one node nobody asks
    return partial(open_embedded, loop, endpoint, prefix, tell=tell)
