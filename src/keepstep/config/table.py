"""The table of options: everything a user may set stands here, and only here.

To add an option, add a field to `Options`. The rest is made from it: `keepstep.Config` and its
docstring, the runtime's `Settings`, the variables `KEEPSTEP_*`, checks and errors
(`config/settings.py`), the options of `keepstep run` (`cli/parameters.py`), and
`docs/configuration.md` (`cli/configuration_page.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic

from keepstep.config.option import (
    Check,
    Directory,
    Topic,
    Unset,
    option,
    options_of,
    seconds,
)
from keepstep.config.values import (
    MAX_JOB_CHARACTERS,
    absolute_dir,
    absolute_store,
    are_dotted_names,
    are_functions,
    default_job_name,
    default_state_dir,
    is_job_name,
    is_shared_store,
)
from keepstep.model.failure import DEFAULT_BUDGET, parse_budget
from keepstep.model.hosts import parse_hosts
from keepstep.model.parts import parse_part_policies
from keepstep.model.topology import parse_policy
from keepstep.model.web_address import EXPECTED, parse_web_address
from keepstep.model.wire import MAX_STREAMS

MIN_SECRET_BYTES = 16
MAX_PORT = 65535
MAX_DSCP = 63


@dataclass(frozen=True, slots=True)
class Options(Generic[Unset, Directory]):
    """Every option, in the order in which a `Config` takes them."""

    job: str | Unset = option(
        default=default_job_name,
        default_words="script name and a hash",
        check=Check(
            "a name of letters, digits, '.', '_' and '-', at most "
            f"{MAX_JOB_CHARACTERS} long and not all dots",
            is_job_name,
        ),
        topic=Topic.JOB,
        help="Name of the job. A job started again under its name finds its own state. The "
        "default is the same for the same user, script and directory, whatever its arguments.",
        example="pretrain-7b",
        metavar="NAME",
    )
    store: str | Unset | None = option(
        default=None,
        check=Check("a directory or an fsspec URL", is_shared_store, also=Path),
        topic=Topic.CHECKPOINTS,
        help="Directory or fsspec URL for checkpoints.",
        example="s3://bucket/run",
        metavar="URL",
        settle=absolute_store,
    )
    persist_every_steps: int | Unset = option(
        default=1000,
        check=Check("a whole number of steps, 0 or more", lambda value: value >= 0),
        topic=Topic.CHECKPOINTS,
        help="Write a checkpoint to the store every so many steps. 0: only on demand, on SIGTERM "
        "and at the end.",
        example=500,
        metavar="STEPS",
    )
    keep: str | Unset = option(
        default="latest:2",
        check=Check("retention rules such as 'latest:2,every:1000'", bool),
        topic=Topic.CHECKPOINTS,
        help="Which checkpoints to keep: all that one of the rules names. The rules are latest:N, "
        "every:STEPS, best:METRIC:min:N and best:METRIC:max:N.",
        example="latest:2,every:1000,best:loss:min:1",
        metavar="RULES",
    )
    slots: int | Unset = option(
        default=0,
        check=Check("0 (choose) or 1 to 8", lambda value: 0 <= value <= 8),
        topic=Topic.SNAPSHOTS,
        help="Snapshots per rank that memory has room for. 0: two, and more where captures find "
        "none free and the memory allows it. 1 needs redundancy copies:M, for while it is "
        "overwritten the newest step is in the copies alone.",
        example=3,
        metavar="N",
    )
    arena_dir: Directory | Unset = option(
        default="/dev/shm",
        check=Check("a directory in memory", bool),
        topic=Topic.SNAPSHOTS,
        help="Directory for snapshots: memory (tmpfs). A disk is taken, too, and as slow as it is.",
        example="/mnt/tmpfs",
        metavar="DIR",
        settle=absolute_dir,
    )
    grace_s: float | Unset = option(
        default=300.0,  # a Slurm requeue, or a person who mends a line, takes minutes
        check=seconds(),
        topic=Topic.SNAPSHOTS,
        help="Keep the snapshots of a job that has not ended well this long after agent and ranks "
        "are gone, so that it can be started again.",
        example=900.0,
        metavar="SECONDS",
    )
    lazy: bool | Unset = option(
        default=True,
        check=Check("True or False"),
        topic=Topic.SNAPSHOTS,
        help="Copy parameters and optimizer state while the next step computes. Turn it off for "
        "code that writes to `.data` outside the optimizer's step: everything is then copied at "
        "the step boundary.",
        example=False,
    )
    scrub_every_s: float | Unset = option(
        default=30.0,
        check=seconds(),
        topic=Topic.SNAPSHOTS,
        help="Verify the checksums of snapshots at rest this often. 0: never.",
        example=60.0,
        metavar="SECONDS",
    )
    state_dir: Directory | Unset = option(
        default=default_state_dir,
        default_words="~/.local/state/keepstep",
        check=Check("a directory", bool),
        topic=Topic.JOB,
        help="Directory for journals and the keeper's log. The default is below $XDG_STATE_HOME "
        "where that is set.",
        example="/var/lib/keepstep",
        metavar="DIR",
        settle=absolute_dir,
    )
    redundancy: str | Unset = option(
        default="auto",
        check=Check("none, copies:M, parity:N, rs:K+M or auto", parse_policy),
        topic=Topic.NODES,
        help="What other nodes keep of each snapshot: none, copies:M, parity:N, rs:K+M or auto. "
        "`keepstep placement` shows what each survives.",
        example="copies:2",
        metavar="POLICY",
    )
    host: str | Unset | None = option(
        default=None,
        default_words="the one that leads to the meeting point",
        check=Check("addresses or names, with commas between", parse_hosts),
        topic=Topic.NODES,
        help="Address at which other nodes reach this one. Of a node with several network "
        "interfaces: their addresses with commas between, in the same order on every node. Copies "
        "go over all of them, everything else over the first.",
        example="10.0.0.7",
        metavar="ADDRESS",
        agents_from=2,
    )
    link_streams: int | Unset | None = option(
        default=None,
        default_words="as many as make copies faster, 8 at most",
        check=Check(
            f"a number of connections, 1 to {MAX_STREAMS}", lambda value: 0 < value <= MAX_STREAMS
        ),
        topic=Topic.NODES,
        help="TCP connections over which a node sends copies to another one. One moves what one "
        "core moves; of a node with several addresses each has one at least.",
        example=4,
        metavar="N",
    )
    rack: str | Unset | None = option(
        default=None,
        check=Check("a name", bool),
        topic=Topic.NODES,
        help="Name of what this node fails together with, such as a rack. No two holders of a "
        "snapshot share one. Set it on every node or on none.",
        example="rack-7",
        metavar="NAME",
        agents_from=2,
    )
    secret: str | Unset | None = option(
        default=None,
        default_words="a new one at each start",
        check=Check(
            f"at least {MIN_SECRET_BYTES} bytes",
            lambda value: len(value.encode()) >= MIN_SECRET_BYTES,
        ),
        topic=Topic.NODES,
        help="Secret by which the job's keepers know each other. The default is exchanged at the "
        "meeting point: set one where that can be overheard, on every node or on none. With one of "
        "its own, the same at every start, the job signs its checkpoints and takes no others.",
        example="correct-horse-battery-staple",
        metavar="TEXT",
        is_secret=True,
        agents_from=2,
    )
    link_dead_s: float | Unset = option(
        default=10.0,
        check=seconds(least=2),
        topic=Topic.NODES,
        help="Declare a node lost when its link has been down this long.",
        example=20.0,
        metavar="SECONDS",
        agents_from=2,
    )
    interleave: str | Unset = option(
        default="auto",
        check=Check("auto or off", lambda value: value in ("auto", "off")),
        topic=Topic.NODES,
        help="auto: send copies to other nodes while training leaves the network idle, where that "
        "can be measured and helps. off: send them at once.",
        example="off",
        metavar="auto|off",
    )
    copy_dscp: int | Unset = option(
        default=0,
        check=Check(
            f"a differentiated services code point, 0 to {MAX_DSCP}",
            lambda value: 0 <= value <= MAX_DSCP,
        ),
        topic=Topic.NODES,
        help="Class of the packets that carry copies between nodes, for a network whose switches "
        "serve collectives first, such as 1 for lower effort (RFC 8622). 0: no class of their own.",
        example=1,
        metavar="N",
    )
    block_mac: str | Unset = option(
        default="auto",
        check=Check("auto, on or off", lambda value: value in ("auto", "on", "off")),
        topic=Topic.NODES,
        help="Put what crosses between nodes under MACs, so that nobody on the way can change it. "
        "auto: between nodes that both have keepstep[secure]. on: refuse nodes that have not.",
        example="on",
        metavar="auto|on|off",
    )
    encrypt: bool | Unset = option(
        default=False,
        check=Check("True or False"),
        topic=Topic.NODES,
        help="Encrypt what keepers of different nodes send each other. Needs keepstep[secure] and "
        "a `secret` of the job's own; set it on every node or on none. Not encrypted: checkpoints "
        "in the store, what nodes say where they meet, and what ranks exchange.",
        example=True,
    )
    transport: str | Unset = option(
        default="tcp",
        check=Check("tcp or nixl", lambda value: value in ("tcp", "nixl")),
        topic=Topic.NODES,
        help="nixl: copies cross to other nodes by RDMA where both have keepstep[nixl] and network "
        "cards for it, and over TCP elsewhere. For a network that only the job's own nodes reach: "
        "docs/security.md.",
        example="nixl",
        metavar="tcp|nixl",
    )
    metrics_port: int | Unset | None = option(
        default=None,
        check=Check(f"a port, 1 to {MAX_PORT}", lambda value: 0 < value <= MAX_PORT),
        topic=Topic.MONITORING,
        help="Serve Prometheus metrics on this port of every node. Needs keepstep[metrics].",
        example=9100,
        metavar="PORT",
        agents_from=1,
    )
    metrics_host: str | Unset = option(
        default="127.0.0.1",
        check=Check("an address of the node", bool),
        topic=Topic.MONITORING,
        help="Serve metrics at this address. The default is reached from the node alone; with "
        "0.0.0.0 anybody may read who reaches any address of it.",
        example="0.0.0.0",
        metavar="ADDRESS",
        agents_from=1,
    )
    dashboard: bool | Unset = option(
        default=False,
        check=Check("True or False"),
        topic=Topic.MONITORING,
        help="Serve a page that shows the job as it runs, from each node's agent.",
        example=True,
        agents_from=1,
    )
    dashboard_address: str | Unset | None = option(
        default=None,
        default_words="127.0.0.1, at the first free port from 8610 on",
        check=Check(EXPECTED, parse_web_address),
        topic=Topic.MONITORING,
        help="Serve the dashboard there: a port of 127.0.0.1, or HOST:PORT. Naming one turns it "
        "on. At a loopback address it answers this user and root; any other needs a "
        "`dashboard_token`.",
        example="0.0.0.0:8610",
        metavar="ADDRESS",
        agents_from=1,
    )
    dashboard_token: str | Unset | None = option(
        default=None,
        check=Check(
            f"at least {MIN_SECRET_BYTES} bytes",
            lambda value: len(value.encode()) >= MIN_SECRET_BYTES,
        ),
        topic=Topic.MONITORING,
        help="Whoever shows this may read the dashboard, and nobody else. It crosses the network "
        "as it is: use a tunnel where that can be overheard.",
        example="a-long-random-string",
        metavar="TEXT",
        is_secret=True,
        agents_from=1,
    )
    hang_after_s: float | Unset | None = option(
        default=None,
        default_words="learned from the job's own steps",
        check=seconds(least=4),
        topic=Topic.FAILURES,
        help="Declare a hang after this many seconds without progress on any rank. `keepstep "
        "timeouts` shows what follows from it.",
        example=120.0,
        metavar="SECONDS",
        agents_from=1,
    )
    wrong_numbers: str | Unset = option(
        default="undo",
        check=Check(
            "undo, skip, stop or off", lambda value: value in ("undo", "skip", "stop", "off")
        ),
        topic=Topic.FAILURES,
        help="What becomes of a step that makes the state not finite. It is taken back and run "
        "again; when that comes again, undo: its batches are left out where they can be, and the "
        "program is never stopped. skip: likewise, and no update of gradients that are not finite "
        "is made, and what cannot be left out ends the job; for gradients that are summed over all "
        "ranks. stop: as skip, and end with the evidence. off: nothing is looked at.",
        example="skip",
        metavar="undo|skip|stop|off",
    )
    skip_spikes: bool | Unset = option(
        default=False,
        check=Check("True or False"),
        topic=Topic.FAILURES,
        help="With wrong_numbers: compare loss and gradient with those of the steps before, run a "
        "step again that lies far beyond them, and with skip leave its batches out when that comes "
        "again. Harder data look the same.",
        example=True,
    )
    check_products: bool | Unset = option(
        default=False,
        check=Check("True or False"),
        topic=Topic.FAILURES,
        help="With wrong_numbers: compare the products of linear layers with their checksums in "
        "each step that is looked at. Finds what a device computes wrong and is finite, beyond the "
        "products' rounding.",
        example=True,
    )
    look_every_steps: int | Unset = option(
        default=8,
        check=Check("a whole number of steps, 1 or more", lambda value: value >= 1),
        topic=Topic.FAILURES,
        help="Look at gradients in every so many steps, at each snapshot's parameters in "
        "any case. 1: no wrong gradient reaches the parameters, and whose it was is always known; "
        "that costs some 2 % of a step on a CPU.",
        example=1,
        metavar="STEPS",
    )
    calibrate_runs: int | Unset = option(
        default=0,
        check=Check("a whole number of runs, 0 to 64", lambda value: 0 <= value <= 64),
        topic=Topic.FAILURES,
        help="With wrong_numbers: run an early step in which nothing is wrong so many times again, "
        "and tell whether it comes to the same bits; where it does not, verdicts allow for what "
        "such runs differ by. The loop's body runs more often then. 0: not.",
        example=3,
        metavar="RUNS",
    )
    replay_update_bytes: int | Unset = option(
        default=0,
        check=Check("a number of bytes, 0 or more", lambda value: value >= 0),
        topic=Topic.FAILURES,
        help="With wrong_numbers: in each step that is looked at, make the update of so many bytes "
        "of parameters again, of those that no other rank has, from the snapshot before it, and "
        "compare the bits. Others come in turn. It takes some five times as much memory for a "
        "moment. 0: none.",
        example=1 << 20,
        metavar="BYTES",
    )
    canary_every_s: float | Unset = option(
        default=300.0,
        check=seconds(),
        topic=Topic.FAILURES,
        help="Show what judges parts, ranks and links a planted sickness, slow rank or slow link "
        "this often. What does not see it is not believed: what it judges is unknown. 0: only at "
        "the start.",
        example=60.0,
        metavar="SECONDS",
        agents_from=1,
    )
    replace_command: str | Unset | None = option(
        default=None,
        check=Check("a command", str.strip),
        topic=Topic.FAILURES,
        help="Shell command that asks the platform for a new node when one is lost. One of the "
        "agents runs it, with KEEPSTEP_LOST_NODE, KEEPSTEP_LOST_HOST, KEEPSTEP_LOST_JOB and "
        "KEEPSTEP_LOST_WHY set.",
        example="sbatch --nodes=1 --export=ALL agent.sbatch",
        metavar="COMMAND",
        agents_from=1,
    )
    node_provider: str | Unset = option(
        default="command",
        check=Check(
            "command, kubernetes or kubernetes:force",
            lambda value: value in ("command", "kubernetes", "kubernetes:force"),
        ),
        topic=Topic.FAILURES,
        help="Who is asked for a new node when one is lost: command runs replace_command, where "
        "there is one; kubernetes deletes the lost node's pod and waits for the one that its "
        "controller makes; with kubernetes:force also without the word of a machine that does not "
        "answer.",
        example="kubernetes",
        metavar="PROVIDER",
        agents_from=1,
    )
    budget: str | Unset = option(
        default=DEFAULT_BUDGET.to_text(),
        default_words=DEFAULT_BUDGET.to_text().replace(",", ", "),
        check=Check("causes with numbers such as 'crash=3,node=unlimited'", parse_budget),
        topic=Topic.FAILURES,
        help="How many restarts in a row each cause of failure may cost. A cause not named keeps "
        "its default. `refill` new steps after a restart, its cause has its whole budget again.",
        example="crash=3,node=unlimited,refill=50",
        metavar="CAUSE=N,...",
        agents_from=1,
    )
    digest_every_steps: int | Unset = option(
        default=1,
        check=Check("a whole number of steps, 0 or more", lambda value: value >= 0),
        topic=Topic.FAILURES,
        help="Compare what must be equal on several ranks (parameters and optimizer state of "
        "data-parallel replicas) every so many steps, by digests of their snapshots. 0: never.",
        example=10,
        metavar="STEPS",
    )
    on_difference: str | Unset = option(
        default="tell",
        check=Check("rollback, tell or stop", lambda value: value in ("rollback", "tell", "stop")),
        topic=Topic.FAILURES,
        help="What follows when such replicas differ. rollback: the rank that is wrong ends, and "
        "all go back to the last step at which all agreed; tell: a line in the journal, and what "
        "is wrong is committed like anything else; stop: the job ends, and its memory is kept.",
        example="rollback",
        metavar="WAY",
    )
    slow_ranks: str | Unset = option(
        default="tell",
        check=Check("tell, swap or off", lambda value: value in ("tell", "swap", "off")),
        topic=Topic.FAILURES,
        help="tell: measure what each rank does itself in its steps, and say which one is slow, in "
        "which section, what for, and what would help. Nothing in the training changes. swap: as "
        "tell, and a node whose rank has cost more than a swap does leaves its place to a spare. "
        "off: nothing is measured.",
        example="off",
        metavar="tell|swap|off",
        agents_from=1,
    )
    sick_parts: str | Unset = option(
        default="warn",
        check=Check(
            "off, or what is done about sick parts, such as 'gpu=leave,nic=avoid'",
            lambda value: parse_part_policies(value) is not None,
        ),
        topic=Topic.FAILURES,
        help="What is done when a part of a node's machine is sick (gpu, nic, disk, shm, memory, "
        "cpu, clock, kernel): warn: it is told; avoid: at its next restart the node leaves its "
        "place to a spare; leave: it does so now, where the other nodes' memory can do without it; "
        "stop: the job ends, its newest step in the store. One word for all, or PART=WORD,... off: "
        "nothing is probed.",
        example="gpu=leave,nic=avoid",
        metavar="PART=WORD,...",
        agents_from=1,
    )
    shrink_after_s: float | Unset = option(
        default=300.0,
        check=seconds(),
        topic=Topic.FAILURES,
        help="With --nnodes MIN:MAX: wait this long for missing nodes, then go on without them.",
        example=60.0,
        metavar="SECONDS",
        agents_from=2,
    )
    trusted_types: str | Unset = option(
        default="",
        default_words="none",
        check=Check("dotted names such as 'mypackage.records.Record'", are_dotted_names),
        topic=Topic.SNAPSHOTS,
        help="Classes, functions and modules, separated by commas, that a saved state may name and "
        "call although the state of the live program does not when it is restored. What is neither "
        "named here, nor in the live state, nor a plain type is refused, and everything is kept.",
        example="mypackage.records,mypackage.quantized.State8bit",
        metavar="NAME,...",
    )
    share_replicas: str | Unset = option(
        default="off",
        check=Check("off, node or job", lambda value: value in ("off", "node", "job")),
        topic=Topic.SNAPSHOTS,
        help="node: of what replicas on one node have in common each copies and keeps its share, "
        "and the checksums of all; other nodes hold these shares. job: replicas on all nodes do, "
        "where they are equal in all that their optimizers own. off: each rank keeps all of its "
        "own.",
        example="node",
        metavar="off|node|job",
    )
    prebuild: str | Unset = option(
        default="",
        default_words="none",
        check=Check("functions such as 'models:make'", are_functions),
        topic=Topic.FAILURES,
        help="Functions of the program, separated by commas, that the process which stands by "
        "calls ahead, on the CPU. When it takes a lost rank's place, `keepstep.prebuilt` hands out "
        "what they made. It needs the memory for that.",
        example="models:make",
        metavar="MODULE:FUNCTION,...",
        agents_from=1,
    )
    log: str | Unset = option(
        default="info",
        check=Check(
            "quiet, warning, info or debug",
            lambda value: value in ("quiet", "warning", "info", "debug"),
        ),
        topic=Topic.MONITORING,
        help="What is told on stderr. quiet: errors; warning: what is wrong or not covered; info: "
        "also what is protected, where it goes on and a summary, by rank 0; debug: every event. "
        "Where the program has set up Python's logging (the logger `keepstep`), that decides.",
        example="quiet",
        metavar="LEVEL",
    )
    fresh: bool | Unset = option(
        default=False,
        check=Check("True or False"),
        topic=Topic.JOB,
        help="Start over: what memory holds of the job is given up when the new run begins. The "
        "checkpoints in the store are kept and not taken; the new run's go into a directory beside "
        "them. This holds for a run's first life: what is restarted within the run goes on from "
        "the run's own progress.",
        example=True,
    )
    adopt: bool | Unset = option(
        default=False,
        check=Check("True or False"),
        topic=Topic.JOB,
        help="Go on from the checkpoints of another job that are in the store, which is this job's "
        "from then on, or that nobody has signed with the job's secret. Without it a store that "
        "another job has written to is refused, and so is what is not signed. Theirs are never "
        "removed.",
        example=True,
    )


OPTIONS = options_of(Options)
