"""RunPlan: what a run is to be: the cluster, the job, and how long things take. `small` draws one
from a seed.

Values only. The same plan and seed are the same run.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal

from keepstep.model.units import KIB, MIB, MS_NS, S_NS
from keepstep.sim.protocol.job.program import EvenTempo, Script, Tempo
from keepstep.sim.protocol.wire.network import Wires
from keepstep.sim.protocol.world.boxes import LOST_POKES

SHARES_STORE = 0.3  # in so many runs with a store somebody else uses it, too
STRANGERS = 0.15  # in so many runs of several nodes somebody comes who does not know the secret
KNOCKS = 0.4  # in so many runs of several nodes who connects to a keeper knocks first
SIGNS = 0.35  # so many runs of several nodes with agents have a secret of their own
OVER_NODES = 0.15  # in so many runs of several nodes ranks share over nodes
FIT_FEWER = ("none", "auto", "copies:2")  # policies that one node less can keep

Launcher = Literal["agents", "foreign"]
Beside = Literal["", "another", "races", "adopts", "yesterday"]


@dataclass(frozen=True)
class RunPlan:
    """`launcher`: who starts the ranks: keepstep's agents, or somebody who knows nothing of
    keepstep and starts all anew when one fails. `min_nodes`: with how many the job goes on; 0:
    with all. `stays`: ranks stay in their process when a peer is lost. `changes`: the part of all
    steps whose body begins by changing the state in place, and back. `doubts`: the part of all
    steps after which a rank asks all to halt behind one. `asks_every_steps`: the program asks for a
    checkpoint so often; 0: never. `names_phases`: it says which part of a step it is in.
    `interleaves`: copies go where collectives leave the network free. `checks`: all that is said
    crosses as its bytes. `lost_pokes`: the part of all pokes that get lost. `faults`: how many;
    none: an undisturbed run. `faults_until_ns`: then all is healed. `replaces`: another machine
    comes for each that is lost; else only where fewer than `min_nodes` would be left. `slow`: how
    many times as long as another rank's the acts of the last rank take. `replicas`: of so many
    kinds the ranks are, and share, those of a node or of the job (`shares_over`); 0: each is of
    its own. `astray`: a rank, and the step from which
    on it is no replica any more. `job`: its name; `adopts`: it takes over what others have left in
    the store. `strangers`: somebody without the secret comes to keepers' ports
    (`faults/strangers.py`). `beside`: who else uses the store (`faults/beside.py`). `signs`: the
    job has a secret of its own, so what stands where the agents meet, and in the store, is
    signed."""

    job: str = "simulated"
    adopts: bool = False
    nodes: int = 2
    ranks_per_node: int = 1
    launcher: Launcher = "agents"
    min_nodes: int = 0
    shrink_after_s: float = 30.0
    steps: int = 20
    step_ns: int = S_NS
    nbytes: int = 200
    policy: str = "copies:2"
    hosts: bool = False  # one of the agents has the KV, which is lost with it
    racks: int = 0  # 0: nobody says which
    slots: int = 0
    interfaces: int = 1  # of each machine
    link_streams: int | None = None
    store: bool = False
    persist_every_steps: int = 5
    asks_every_steps: int = 0
    names_phases: bool = False
    scrub_every_s: float = 5.0
    grace_s: float = 120.0
    link_dead_s: float = 3.0
    stays: bool = True
    changes: float = 0.0
    doubts: float = 0.0
    interleaves: bool = False
    checks: bool = True
    lost_pokes: float = LOST_POKES
    budget_bytes: int = 4 * MIB
    block_bytes: int = 4 * MIB  # of a snapshot, how many share a checksum
    turn_ns: int = MS_NS  # how long a keeper's loop takes to come round
    tick_ns: int = 200 * MS_NS  # and how long it waits when nothing comes
    look_ns: int = 0  # how often an agent looks at its ranks; 0: as often as it does
    # how long a keeper's loop takes to come round to what other keepers have said
    loop_ns: int = MS_NS // 20
    work_ns: int = 20 * MS_NS
    start_ns: int = 200 * MS_NS
    notice_ns: int = 2 * MS_NS
    act_ns: int = 50 * MS_NS
    store_act_ns: int = 200 * MS_NS
    replace_ns: int = 3 * S_NS
    replaces: bool = True
    slow: int = 1
    replicas: int = 0
    shares_over: Literal["node", "job"] = "node"
    astray: tuple[int, int] | None = None
    strangers: bool = False
    beside: Beside = ""
    signs: bool = False
    jumps: bool = False  # of wall clocks, beyond what docs/assumptions.md allows
    wires: Wires = field(default_factory=Wires)
    faults: int = 0
    faults_until_ns: int = 0
    limit_ns: int = 1000 * S_NS

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def script(self) -> Script:
        """What each rank's program is written to do."""
        asks, names = self.asks_every_steps, self.names_phases
        return Script(self.steps, self.stays, asks, names, self.changes, self.doubts)

    def new_tempo(self, rank: int, random: Random) -> Tempo:
        """How long this rank's steps take."""
        return EvenTempo(self.step_ns, random)

    def act_ns_of(self, rank: int, world_size: int) -> int:
        """How long an act of that rank's captures takes at most."""
        return self.act_ns * (self.slow if rank == world_size - 1 else 1)

    def takes_ns(self, what: str, random: Random) -> int:
        """How long something takes this time: `rank_start_ns`, `keeper_start_ns`,
        `agent_start_ns`, `persister_start_ns`, `notice_ns` or `replace_ns`."""
        match what:
            case "replace_ns":
                return self.replace_ns
            case "notice_ns":
                return 1 + random.randrange(self.notice_ns)
            case _:
                return self.start_ns // 2 + random.randrange(self.start_ns)


def small(seed: int) -> RunPlan:
    """A few nodes, some tens of steps, several faults."""
    chance = Random(f"{seed}/plan")
    nodes = chance.choice((1, 2, 2, 2, 3, 3, 4))
    ranks = chance.choice((1, 1, 2)) if nodes > 2 else chance.choice((1, 2, 2))
    policies = ["none"] if nodes == 1 else ["copies:2", "copies:2", "copies:2", "none", "auto"]
    racks = chance.choice((0, 0, 2)) if nodes == 4 else 0
    if racks:
        policies += ["parity:2"]
    elif nodes >= 3:
        policies += ["copies:3", f"parity:{nodes}", f"parity:{nodes}"]
    if nodes == 4 and not racks:
        policies += ["rs:2+2", "rs:3+1", "parity:2"]
    steps = chance.randrange(8, 26)
    step_ns = chance.choice((100, 300, 1000, 2500)) * MS_NS
    link_dead_s = chance.choice((2.0, 3.0, 5.0))
    wires = Wires(
        latency_ns=chance.choice((MS_NS // 10, MS_NS, 5 * MS_NS)),
        jitter_ns=chance.choice((MS_NS // 10, 2 * MS_NS, 50 * MS_NS)),
        bytes_per_s=chance.choice((2 * KIB, 20 * KIB, 100 * MIB)),
        queue_bytes=chance.choice((KIB, 64 * MIB, 64 * MIB)),
        halves=chance.choice((0.0, 0.3, 1.0)),
    )
    breaks = Random(f"{seed}/breaks").choice((0.0, 0.0, 0.01))
    store = chance.random() < 0.4
    shrinks = store and nodes > 1 and chance.random() < 0.5
    min_nodes = nodes - 1 if shrinks else 0
    checks = chance.random() < 0.25  # it costs a good part of the time
    plan = RunPlan(
        nodes=nodes,
        ranks_per_node=ranks,
        steps=steps,
        step_ns=step_ns,
        nbytes=chance.choice((40, 200, 700)),
        policy=chance.choice(policies),
        racks=racks,
        slots=chance.choice((0, 0, 2, 3, 4)),
        store=store,
        persist_every_steps=chance.choice((0, 3, 7)),
        scrub_every_s=chance.choice((0.0, 2.0, 10.0)),
        link_dead_s=link_dead_s,
        stays=chance.random() < 0.5,
        changes=Random(f"{seed}/changes").choice((0.0, 0.0, 0.0, 0.3)),
        doubts=Random(f"{seed}/doubts").choice((0.0, 0.0, 0.1, 0.3)),
        work_ns=chance.choice((MS_NS, 20 * MS_NS, 300 * MS_NS)),
        act_ns=max(1, int(step_ns * chance.choice((0.01, 0.1, 0.5)))),
        replace_ns=chance.choice((1, 20, 60) if shrinks else (1, 30)) * S_NS,
        min_nodes=min_nodes,
        shrink_after_s=3.0,
        launcher="foreign" if chance.random() < 0.12 else "agents",
        block_bytes=chance.choice((64, 64, 4 * MIB)),
        interleaves=chance.random() < 0.05,
        slow=Random(f"{seed}/slow").choice((1, 1, 4)),
        wires=replace(wires, checks=checks, breaks=breaks),
        checks=checks,
        faults=chance.choice((1, 2, 2, 3, 4, 6)),
        faults_until_ns=int((steps * step_ns + 5 * S_NS) * chance.uniform(0.4, 1.3)),
    )
    return _with_what_is_rare(plan, seed)


def _with_what_is_rare(plan: RunPlan, seed: int) -> RunPlan:
    """Each by a chance of its own: what else is drawn stays as it was."""
    is_of_agents = plan.launcher == "agents"
    can_shrink = plan.min_nodes and is_of_agents and plan.policy in FIT_FEWER
    can_be_lost = plan.nodes > 1 and is_of_agents and not plan.min_nodes
    hosts = can_be_lost and Random(f"{seed}/hosts").random() < 0.15
    roads = Random(f"{seed}/roads")
    interfaces = 1 + (plan.nodes > 1 and roads.random() < 0.12)
    link_streams = roads.choice((None, 1, 3)) if interfaces > 1 else None
    can_have_one_slot = plan.policy.startswith("copies") and plan.min_nodes != 1
    has_one_slot = can_have_one_slot and Random(f"{seed}/one slot").random() < 0.15
    can_do_without = can_shrink and Random(f"{seed}/replaces").random() < 0.5
    knocks = plan.nodes > 1 and Random(f"{seed}/knocks").random() < KNOCKS
    rare = replace(
        plan,
        wires=replace(plan.wires, knocks=knocks),
        replaces=not can_do_without,
        hosts=hosts,
        interfaces=interfaces,
        link_streams=link_streams,
        slots=1 if has_one_slot else plan.slots,
        strangers=plan.nodes > 1 and Random(f"{seed}/strangers").random() < STRANGERS,
        signs=plan.nodes > 1 and is_of_agents and Random(f"{seed}/signs").random() < SIGNS,
    )
    return _with_another(_sharing(rare, seed), seed)


def _with_another(plan: RunPlan, seed: int) -> RunPlan:
    """Some of those that have a store share it."""
    chance = Random(f"{seed}/beside")
    if not plan.store or chance.random() >= SHARES_STORE:
        return plan
    return beside(plan, chance.choice(("another", "races", "adopts", "yesterday", "yesterday")))


def beside(plan: RunPlan, kind: Beside) -> RunPlan:
    """With another run on the same store. Who loses the store to another one is not disturbed
    otherwise: nothing would be left to go on from."""
    loses_it = kind in ("races", "adopts")
    return replace(
        plan,
        beside=kind,
        faults=0 if loses_it else plan.faults,
        launcher="agents" if loses_it else plan.launcher,
        persist_every_steps=plan.persist_every_steps or 3,
    )


def _over_nodes(plan: RunPlan, chance: Random) -> RunPlan:
    """Replicas on several nodes, of one kind or of two."""
    astray = None
    if chance.random() < 0.4:
        astray = chance.randrange(plan.world_size), chance.randrange(1, plan.steps)
    kinds = chance.choice((1, 1, 2)) if plan.world_size == 4 else 1
    return replace(
        plan, replicas=kinds, shares_over="job", astray=astray, block_bytes=64, nbytes=700
    )


def _sharing(plan: RunPlan, seed: int) -> RunPlan:
    """Half of the runs of one node, and some of several: replicas, of blocks that are small enough
    to be shared."""
    over = Random(f"{seed}/over nodes")
    if not (plan.min_nodes or plan.nodes == 1) and over.random() < OVER_NODES:
        return _over_nodes(plan, over)
    chance = Random(f"{seed}/replicas")
    if plan.min_nodes or chance.random() < (0.5 if plan.nodes == 1 else 0.75):
        return plan
    ranks = chance.choice((2, 2, 3, 4) if plan.nodes == 1 else (2, 2, 3))
    astray = None
    if chance.random() < 0.4:
        astray = chance.randrange(ranks), chance.randrange(1, plan.steps)
    return replace(
        plan,
        ranks_per_node=ranks,
        replicas=chance.choice((1, 1, 2)) if ranks == 4 else 1,
        astray=astray,
        block_bytes=64,
        nbytes=700,
    )
