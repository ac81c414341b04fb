"""Faults: what a drill does to a job, where and when; as text, as values, drawn from a seed.

Comes in: `kill:rank=1,step=20,phase=capture`, `kill-node:node=1+2,step=20` or
`bitflip:site=weight,rank=1,step=20,bit=30`. Goes out: `Fault`s in the order they are to happen.
Decides nothing about how a fault is done (injector.py, number_faults.py, witness.py) or proved
(verdict.py). Pure: the generator of random faults takes its seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from keepstep.errors import ConfigError

# what happens to a node's link and passes: it is away, slow, or loses packets
LINK_KINDS = ("link-down", "link-slow", "link-loss")
NODE_KINDS = ("kill-node", *LINK_KINDS)  # what happens to whole nodes: needs more than one
AGENT_KILL = "agent-kill"  # of `keepstep run`, whose steward starts another one
ETCD_RESTART = "etcd-restart"  # what happens to the etcd the nodes meet over
# what happens to the store of checkpoints: connections are refused, answers are late, do not come
# until it heals, fail now and then
STORE_KINDS = ("store-refuses", "store-slow", "store-hangs", "store-flaky")
# what happens to numbers of the training itself, and where it may
BITFLIP, NAN, SPIKE = NUMBER_KINDS = ("bitflip", "nan", "spike")
SITES = {
    BITFLIP: ("weight", "grad", "reduced", "optimizer", "activation", "batch"),
    NAN: ("batch", "grad", "reduced", "weight", "optimizer", "activation"),
    SPIKE: ("batch", "grad", "reduced"),
}  # the first is the default
# what is seen of each, and a time behind it
LINK_WORDS = {
    "link-down": "was down for",
    "link-slow": "was slow for",
    "link-loss": "lost packets for",
}
HARMED_BITS_PER_S = 20_000_000  # of a link that is slow or loses packets
# what makes a rank's steps slow, and stays
SLOW, CPU_QUOTA = SLOWNESS_KINDS = ("slow", "cpu-quota")
DEFAULT_FACTORS = {SLOW: 1.5, CPU_QUOTA: 0.3}
# what a part of the machine seems to have, and what keeps its watcher from seeing; stays
HOT, DISK_SLOW, BLIND = PART_FAULTS = ("hot", "disk-slow", "blind")
MOST_BIT = 31  # of a 32-bit number
SPIKE_FACTOR = 1000.0
KINDS = (
    "kill",
    "stop",
    "keeper-kill",
    AGENT_KILL,
    "flip",
    "torn",
    "full",
    *NODE_KINDS,
    ETCD_RESTART,
    *STORE_KINDS,
    *NUMBER_KINDS,
    *SLOWNESS_KINDS,
    *PART_FAULTS,
)
LASTING = (*LINK_KINDS, ETCD_RESTART, *STORE_KINDS)
# what a fault of numbers may say besides site, rank, step and times
NUMBER_KEYS: dict[str, tuple[str, ...]] = {BITFLIP: ("bit",), NAN: (), SPIKE: ("factor",)}
PHASES = ("forward", "backward", "update", "capture", "seal", "persist", "restore")
# a snapshot is sealed and on its way to other nodes: seen from outside, so only what happens to
# nodes can wait for it
PROTECT = "protect"
PLACES = {"flip": ("arena", "store"), "full": ("store", "arena")}  # the first is the default
# what a campaign draws from; `full` needs a filesystem of its own
DRAWN = ("kill", "stop", "torn", "keeper-kill", "flip")
STRIDE_STEPS = 8  # mean distance of a campaign's faults


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: rank `rank` meets it on entering `phase` of `step`, or of the first later step
    that has such a phase.

    phase=restore: in the recovery from the fault before it in the list; `step` says in which step
        that one comes.
    after_ms: done from outside, that long after the rank began the step (phase=restore: began
        restoring).
    where: `arena` or `store`, for the kinds that can be in either.
    nodes: for what happens to nodes, all at once, by the job's own numbers; the moment is that of
        the first one's first rank.
    for_ms: how long a link, or etcd, stays away; at least how long a store is rough.
    site: for what happens to numbers, which of them: the batch, an activation, the local gradient
        (`grad`) or the reduced one, a weight after the update, the optimizer's state after it.
    bit: of a bitflip, None: drawn. factor: of a spike; of a slow rank's step, in its usual ones; of
        a quota, in processors.
    times: in so many executions of that step or a later one, 0: in all of them.
    """

    kind: str
    rank: int
    step: int
    phase: str = "forward"
    where: str = ""
    after_ms: float | None = None
    nodes: tuple[int, ...] = ()
    for_ms: float | None = None
    site: str = ""
    bit: int | None = None
    factor: float | None = None
    times: int = 1

    @property
    def is_number(self) -> bool:
        """Whether it happens to numbers of the training: nobody's process or memory is hurt."""
        return self.kind in NUMBER_KINDS

    @property
    def is_slowness(self) -> bool:
        """Whether a rank's steps take longer from then on, and nothing else happens."""
        return self.kind in SLOWNESS_KINDS

    @property
    def slows_by(self) -> float:
        """How many times as long steps may take from then on."""
        if not self.is_slowness or self.factor is None:
            return 1.0
        return max(1.0, 1 / self.factor if self.kind == CPU_QUOTA else self.factor)

    @property
    def ends_a_rank(self) -> bool:
        """Whether a restart follows."""
        return self.kind in ("kill", "stop", "flip", "torn", "kill-node", BITFLIP) or (
            self.kind,
            self.where,
        ) == ("full", "arena")

    @property
    def from_outside(self) -> bool:
        """Whether the rank itself has no part in it. A rank cannot end its node: it asks for that,
        and waits."""
        return (
            self.phase == PROTECT
            or self.kind in (ETCD_RESTART, *STORE_KINDS, *PART_FAULTS)
            or (self.after_ms is not None and not self.nodes)
        )

    @property
    def needs_store(self) -> bool:
        """Lost nodes may be more than memory survives."""
        return (
            self.where == "store"
            or self.phase == "persist"
            or self.kind in ("kill-node", *STORE_KINDS)
        )

    def __str__(self) -> str:
        if self.is_number:
            bit = "" if self.bit is None else f",bit={self.bit}"
            factor = "" if self.factor is None else f",factor={self.factor:g}"
            times = "" if self.times == 1 else f",times={self.times}"
            where = f"site={self.site},rank={self.rank},step={self.step}"
            return f"{self.kind}:{where}{bit}{factor}{times}"
        if self.is_slowness:
            return f"{self.kind}:rank={self.rank},step={self.step},factor={self.factor:g}"
        whom = f"node={'+'.join(map(str, self.nodes))}" if self.nodes else f"rank={self.rank}"
        where = f",where={self.where}" if self.where else ""
        after = "" if self.after_ms is None else f",after={self.after_ms:g}"
        lasting = "" if self.for_ms is None else f",for={self.for_ms:g}"
        return f"{self.kind}:{whom},step={self.step},phase={self.phase}{where}{after}{lasting}"


def parse(text: str) -> Fault:
    """`kind:rank=R,step=S,phase=P[,where=arena|store][,after=MS]`, for nodes
    `kind:node=N[+N],...`; what lasts has `,for=MS` besides; for numbers
    `bitflip:site=SITE,rank=R,step=S[,bit=B][,times=N]`; for slow ranks
    `slow:rank=R,step=S[,factor=F]`. Raises ConfigError."""
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise ConfigError(f"fault {text!r}: expected one of {', '.join(KINDS)}, found {kind!r}")
    values: dict[str, str] = {}
    keys = [
        "node" if kind in NODE_KINDS else "rank",
        "step",
        "phase",
        "where",
        "after",
        *(["for"] if kind in LASTING else []),
    ]
    if kind in SITES:
        keys = ["site", "rank", "step", *NUMBER_KEYS[kind], "times"]
    if kind in SLOWNESS_KINDS:
        keys = ["rank", "step", "factor"]
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if key not in keys or not equals:
            raise ConfigError(
                f"fault {text!r}: expected {'=, '.join(keys[:-1])}= or {keys[-1]}=, found {part!r}"
            )
        if key in values:
            raise ConfigError(f"fault {text!r}: expected {key}= once, found it again as {part!r}")
        values[key] = value
    for key in (
        "step",
        *(("node",) if kind in NODE_KINDS else ()),
        *(("for",) if kind in LASTING else ()),
    ):
        if key not in values:
            raise ConfigError(f"fault {text!r}: expected {key}=, found none")
    if kind in SITES:
        return _number_fault(text, kind, values)
    if kind in SLOWNESS_KINDS:
        return _slowness(text, kind, values)
    after, lasting = values.get("after"), values.get("for")
    default_phase = {"torn": "seal", "full": "persist"}.get(kind, "forward")
    return _checked(
        text,
        Fault(
            kind,
            _number(text, "rank", values.get("rank", "0")),
            _number(text, "step", values["step"]),
            values.get("phase", default_phase),
            values.get("where", PLACES.get(kind, ("",))[0]),
            None if after is None else float(_number(text, "after", after)),
            tuple(sorted({_number(text, "node", n) for n in values["node"].split("+")}))
            if "node" in values
            else (),
            None if lasting is None else float(_number(text, "for", lasting)),
        ),
    )


def _number_fault(text: str, kind: str, values: Mapping[str, str]) -> Fault:
    """What happens to numbers of the training."""
    site = values.get("site", SITES[kind][0])
    if site not in SITES[kind]:
        raise ConfigError(
            f"fault {text!r}: expected site= one of {', '.join(SITES[kind])}, found {site!r}"
        )
    bit = None if "bit" not in values else _number(text, "bit", values["bit"])
    if bit is not None and bit > MOST_BIT:
        raise ConfigError(f"fault {text!r}: expected bit= 0 to {MOST_BIT}, found {bit}")
    factor = None
    if kind == SPIKE:
        factor = _factor(text, values.get("factor", f"{SPIKE_FACTOR:g}"))
    return Fault(
        kind,
        _number(text, "rank", values.get("rank", "0")),
        _number(text, "step", values["step"]),
        site=site,
        bit=bit,
        factor=factor,
        times=_number(text, "times", values.get("times", "1")),
    )


def _slowness(text: str, kind: str, values: Mapping[str, str]) -> Fault:
    """What makes a rank's steps slow."""
    factor = _factor(text, values.get("factor", f"{DEFAULT_FACTORS[kind]:g}"))
    least = 1.0 if kind == SLOW else 0.0
    if factor <= least:
        raise ConfigError(f"fault {text!r}: expected factor= above {least:g}, found {factor:g}")
    rank = _number(text, "rank", values.get("rank", "0"))
    return Fault(kind, rank, _number(text, "step", values["step"]), factor=factor)


def _factor(text: str, value: str) -> float:
    try:
        factor = float(value)
    except ValueError:
        factor = math.nan
    if not math.isfinite(factor):
        raise ConfigError(f"fault {text!r}: expected factor= a number, found {value!r}")
    return factor


def _number(text: str, key: str, value: str) -> int:
    if not value.isdecimal():
        raise ConfigError(
            f"fault {text!r}: expected {key}= a whole number, 0 or more, found {value!r}"
        )
    return int(value)


def _checked(text: str, fault: Fault) -> Fault:
    phases = (*PHASES, PROTECT) if fault.nodes else PHASES
    if fault.phase not in phases:
        raise ConfigError(
            f"fault {text!r}: expected phase= one of {', '.join(phases)}, found {fault.phase!r}"
        )
    places = PLACES.get(fault.kind, ("",))
    if fault.where not in places:
        expected = f"where= one of {', '.join(places)}" if places != ("",) else "no where="
        raise ConfigError(f"fault {text!r}: expected {expected}, found {fault.where!r}")
    by_outsider = fault.kind in (
        "kill",
        "stop",
        "keeper-kill",
        AGENT_KILL,
        ETCD_RESTART,
        *STORE_KINDS,
    ) and fault.phase in ("forward", "restore")
    if fault.after_ms is not None and not (fault.nodes or by_outsider):
        raise ConfigError(
            f"fault {text!r}: expected after= with what is done from outside and "
            f"phase=forward or restore, found {fault}"
        )
    return fault


def check(
    faults: Iterable[Fault], nproc: int, steps: int, nodes: int = 1, etcd: bool = False
) -> None:
    """Raises ConfigError when a fault cannot happen in a job of `nodes` nodes with `nproc` ranks
    each, which meet over an `etcd` or not."""
    world_size = nodes * nproc
    for fault in faults:
        if fault.rank >= world_size:
            ranks = "--nproc" if nodes == 1 else "--nodes times --nproc"
            raise ConfigError(
                f"fault {str(fault)!r}: expected rank= below {world_size} ({ranks}), found "
                f"{fault.rank}"
            )
        if fault.step >= steps:
            raise ConfigError(
                f"fault {str(fault)!r}: expected step= below {steps} (--steps), found {fault.step}"
            )
        if fault.nodes and nodes == 1:
            raise ConfigError(
                f"fault {str(fault)!r}: expected more than one node (--nodes), found 1"
            )
        if fault.nodes and max(fault.nodes) >= nodes:
            raise ConfigError(
                f"fault {str(fault)!r}: expected node= below {nodes} (--nodes), found "
                f"{max(fault.nodes)}"
            )
        if fault.kind == ETCD_RESTART and not etcd:
            raise ConfigError(
                f"fault {str(fault)!r}: expected --rdzv-backend etcd, found another one"
            )
        if nodes > 1 and (fault.kind, fault.where) == ("full", "arena"):
            raise ConfigError(
                f"fault {str(fault)!r}: expected one node (the memory of several is one "
                f"filesystem here), found {nodes}"
            )


def with_triggers(faults: Sequence[Fault]) -> list[Fault]:
    """A restore has to be caused: put a plain kill before each `phase=restore` that does not follow
    a deadly fault of its step."""
    out: list[Fault] = []
    for fault in faults:
        caused = bool(out) and out[-1].ends_a_rank and out[-1].step == fault.step
        if fault.phase == "restore" and not caused:
            out.append(Fault("kill", fault.rank, fault.step))
        out.append(fault)
    return out


def draw(
    seed: int,
    count: int,
    nproc: int,
    kinds: Sequence[str] = DRAWN,
    first_step: int = 4,
    nodes: int = 1,
) -> list[Fault]:
    """`count` faults, each a random moment after the one before. Half of the kills come from
    outside, at a random millisecond."""
    rng = random.Random(seed)
    world_size = nodes * nproc
    faults: list[Fault] = []
    step = first_step
    while len(faults) < count:
        kind, rank = rng.choice(list(kinds)), rng.randrange(world_size)
        one = Fault(kind, rank, step, rng.choice(PHASES[:-1]))
        if kind == "torn":
            one = replace(one, phase="seal")
        elif kind == "flip":
            one = replace(one, where="arena")
        elif kind == "kill-node":
            one = _draw_node(rng, step, (*PHASES[:-1], PROTECT), nodes)
        elif rng.random() < 0.5:
            one = replace(one, phase="forward", after_ms=round(rng.uniform(0, 40), 1))
        drawn = [one]
        # alone it costs nothing: a rank goes too, while the new keeper adopts
        if kind == "keeper-kill":
            drawn.append(
                Fault(
                    "kill",
                    rng.randrange(world_size),
                    step,
                    "forward",
                    after_ms=round(rng.uniform(0, 60), 1),
                )
            )
        if rng.random() < 0.15:  # and once more, while everybody is restoring
            if "kill-node" in kinds and rng.random() < 0.5:
                drawn.append(_draw_node(rng, step, ("restore",), nodes))
            else:
                delay_ms = None if rng.random() < 0.5 else round(rng.uniform(0, 40), 1)
                drawn.append(
                    Fault("kill", rng.randrange(world_size), step, "restore", after_ms=delay_ms)
                )
        faults += drawn
        step += rng.randint(2, 2 * STRIDE_STEPS - 2)
    return faults[:count]


def _draw_node(rng: random.Random, step: int, phases: Sequence[str], nodes: int) -> Fault:
    """One node is lost, now and then two at once, at the moment itself or some milliseconds
    later."""
    lost = rng.sample(range(nodes), 2 if nodes > 2 and rng.random() < 0.2 else 1)
    after_ms = None if rng.random() < 0.5 else round(rng.uniform(0, 40), 1)
    return Fault(
        "kill-node", 0, step, rng.choice(list(phases)), after_ms=after_ms, nodes=tuple(sorted(lost))
    )


def kinds_of(text: str, nodes: int = 1) -> tuple[str, ...]:
    """`kill,stop`: kinds a campaign may draw; nothing: all of them. Raises ConfigError."""
    known = DRAWN if nodes == 1 else (*DRAWN, "kill-node")
    kinds = tuple(filter(None, text.split(","))) if text else known
    wrong = [k for k in kinds if k not in known]
    if wrong or not kinds:
        raise ConfigError(f"kinds: expected some of {', '.join(known)}, found {text!r}")
    return kinds


def to_plan(faults: Sequence[Fault]) -> list[dict[str, object]]:
    """As JSON, for the job."""
    return [{f.name: getattr(fault, f.name) for f in fields(Fault)} for fault in faults]


def from_plan(plan: Iterable[Mapping[str, Any]]) -> tuple[Fault, ...]:
    """The inverse of `to_plan`, after JSON has made lists of tuples."""
    return tuple(Fault(**{**f, "nodes": tuple(f["nodes"])}) for f in plan)
