"""Processes: what runs on the machine, and what this one may do with others.

Comes in: facts of processes and the scheduler. Goes out: defects.
"""

from __future__ import annotations

from collections.abc import Iterator

from keepstep.core.doctor.defect import Defect, DoctorCheck, broken, silence, warning
from keepstep.model.machine_facts import MachineFacts

MAX_LOAD = 1.5  # processes that want a core, for each core
MAX_ZOMBIES = 100
MAX_ZOMBIES_OF_INIT = 3  # one that has just died is no sign
# Programs that containers are often given as process 1, and that wait for no child but their own.
NO_INIT = {"sleep", "tail", "cat", "node", "java", "torchrun", "keepstep", "jupyter-lab"}


def cores(facts: MachineFacts) -> Iterator[Defect]:
    """Whether there is a core beside the trainer's."""
    if facts.processes.cpus < 2:
        yield warning(
            "this process may use one core only",
            "captures, copies and heartbeats compute while the trainer does: steps get longer",
            "give it two cores or more (taskset, docker run --cpuset-cpus, Slurm --cpus-per-task)",
        )


def load(facts: MachineFacts) -> Iterator[Defect]:
    """Whether the cores are free."""
    found, cpus = facts.processes.load, facts.processes.cpus
    if found is None:
        yield silence("the machine's load")
    elif found > MAX_LOAD * cpus:
        yield warning(
            f"{found:.1f} processes wanted to compute in the last minute, on {cpus} cores",
            "steps get longer, and late heartbeats look like failures",
            "end what computes (ps aux --sort=-pcpu | head), or wait for it",
        )


def zombies(facts: MachineFacts) -> Iterator[Defect]:
    """Whether dead processes are left lying."""
    found = facts.processes.zombies
    if found > MAX_ZOMBIES:
        yield warning(
            f"{found} processes are dead and nobody has waited for them",
            "each keeps its number, and nothing can be started when they run out",
            "end their parent (ps -eo ppid,stat | grep Z)",
        )


def init(facts: MachineFacts) -> Iterator[Defect]:
    """Whether process 1 waits for orphans, as an init does."""
    name, left = facts.processes.init, facts.processes.zombies_of_init
    why = "keepers are orphans by design: dead ones stay as zombies, and fill the process table"
    fix = "start the container with an init: docker run --init, or tini as its entry point"
    if name is None:
        yield silence("the name of process 1")
    elif left > MAX_ZOMBIES_OF_INIT:
        yield warning(
            f"process 1 ({name}) has not waited for {left} dead processes",
            why,
            fix,
        )
    elif name in NO_INIT or name.startswith("python"):
        yield warning(f"process 1 is {name}, no init", why, fix)


def ignored_signals(facts: MachineFacts) -> Iterator[Defect]:
    """Whether a shell or a service has handed down signals that are ignored or blocked."""
    ignored, blocked = facts.processes.ignored_signals, facts.processes.blocked_signals
    if "SIGCHLD" in ignored:
        yield broken(
            "SIGCHLD is ignored here and in all that is started from here",
            "the kernel forgets how a process ended: an agent cannot tell a crash from success",
            "trap - CHLD in the script that starts it, or signal(SIGCHLD, SIG_DFL) in its parent",
        )
    if "SIGTERM" in ignored | blocked:
        yield warning(
            "SIGTERM is ignored or blocked here and in all that is started from here",
            "a preemption is not noticed: its last checkpoint is not written, and SIGKILL follows",
            "trap - TERM in the script that starts it",
        )
    if "SIGCHLD" in blocked:
        yield warning(
            "SIGCHLD is blocked here and in all that is started from here",
            "programs that wait for it never hear of a dead child",
            "start it from a plain shell, or unblock it in the parent",
        )


def pidfd(facts: MachineFacts) -> Iterator[Defect]:
    """Whether processes can be watched without a race."""
    refusal = facts.processes.pidfd_refusal
    if refusal:
        yield broken(
            f"pidfd_open is refused: {refusal}",
            "agents watch their ranks by it",
            "Linux 5.3 or newer, and a seccomp profile that allows it (Docker 20.10 or newer)",
        )


def autogroup(facts: MachineFacts) -> Iterator[Defect]:
    """Whether a keeper can let the trainer compute first."""
    of = facts.processes
    if of.has_autogroup and not of.may_nice_session:
        yield warning(
            "the kernel schedules by session, and /proc/self/autogroup cannot be written",
            "a keeper cannot give way: it gets as much time as all of the trainer's threads",
            "sysctl -w kernel.sched_autogroup_enabled=0",
        )


def ptrace(facts: MachineFacts) -> Iterator[Defect]:
    """Whether the stacks of a hung rank can be read."""
    scope = facts.processes.ptrace_scope
    if scope and not facts.processes.may_trace:
        fix = "sysctl -w kernel.yama.ptrace_scope=0"
        if scope > 2:  # which the kernel lets nobody lower
            fix = "kernel.yama.ptrace_scope=0 in /etc/sysctl.d, and a reboot"
        yield warning(
            f"kernel.yama.ptrace_scope is {scope}",
            "py-spy may not read the Python frames of a rank that hangs",
            f"{fix}, or docker run --cap-add=SYS_PTRACE",
        )


def orphaned_keepers(facts: MachineFacts) -> Iterator[Defect]:
    """Whether a keeper lives whose memory is gone."""
    for keeper in facts.processes.keepers:
        if not keeper.has_memory:
            yield warning(
                f"the keeper of job {keeper.job}, process {keeper.pid}, has no directory any more",
                "it keeps memory that nobody can find",
                f"kill {keeper.pid}",
            )


CHECKS = (
    DoctorCheck("cores", cores),
    DoctorCheck("load", load),
    DoctorCheck("zombies", zombies),
    DoctorCheck("init", init),
    DoctorCheck("ignored-signals", ignored_signals),
    DoctorCheck("pidfd", pidfd),
    DoctorCheck("autogroup", autogroup),
    DoctorCheck("ptrace", ptrace),
    DoctorCheck("orphaned-keepers", orphaned_keepers),
)
