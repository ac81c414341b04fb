"""Topology: the nodes and their racks, what redundancy was asked for, and who holds what.

Values only. `core/redundancy/placement.py` makes a Placement from a Topology and a Scheme;
`core/redundancy/survival.py` says what it survives.

Invariant: node ids are 0..N-1 in order, and either every node has a rack or none has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keepstep.errors import ConfigError

MOST_MEMBERS = 255  # the codes are over bytes: a codeword has at most so many places


@dataclass(frozen=True, slots=True)
class TopologyNode:
    """A machine: what fails as one. `rack` is what fails together with its neighbours; None when
    nobody said."""

    id: int
    rack: str | None = None


@dataclass(frozen=True, slots=True)
class Topology:
    nodes: tuple[TopologyNode, ...]

    def __post_init__(self) -> None:
        ids = [node.id for node in self.nodes]
        if not ids or ids != list(range(len(ids))):
            raise ConfigError(
                f"topology: expected nodes 0 to N-1 in order, at least one, found {ids}"
            )
        without = [node.id for node in self.nodes if node.rack is None]
        if 0 < len(without) < len(ids):
            raise ConfigError(
                f"topology: expected a rack for every node or for none, found {len(without)} "
                f"of {len(ids)} nodes without: {without}"
            )

    @property
    def racks(self) -> dict[str, tuple[int, ...]]:
        """The nodes of each rack, in order; empty when there are no racks."""
        members: dict[str, list[int]] = {}
        for node in self.nodes:
            if node.rack is not None:
                members.setdefault(node.rack, []).append(node.id)
        return {rack: tuple(ids) for rack, ids in members.items()}


def topology(nodes: int, racks: Sequence[str] | None = None) -> Topology:
    """`nodes` nodes; `racks` names the rack of each. Raises ConfigError."""
    if racks is not None and len(racks) != nodes:
        raise ConfigError(f"racks: expected one rack for each of {nodes} nodes, found {len(racks)}")
    return Topology(
        tuple(TopologyNode(i, None if racks is None else racks[i]) for i in range(nodes))
    )


@dataclass(frozen=True, slots=True)
class NoRedundancy:
    """Every snapshot lies on its own node only."""

    def __str__(self) -> str:
        return "none"


@dataclass(frozen=True, slots=True)
class Copies:
    """Every snapshot on `m` nodes, its own among them."""

    m: int

    def __str__(self) -> str:
        return f"copies:{self.m}"


@dataclass(frozen=True, slots=True)
class Parity:
    """Rotating XOR over groups of `n`: any one of a group may be lost."""

    n: int

    def __str__(self) -> str:
        return f"parity:{self.n}"


@dataclass(frozen=True, slots=True)
class ReedSolomon:
    """Groups of `k + m`: any `m` of a group may be lost."""

    k: int
    m: int

    def __str__(self) -> str:
        return f"rs:{self.k}+{self.m}"


@dataclass(frozen=True, slots=True)
class Auto:
    """Let `core.placement.auto` choose."""

    def __str__(self) -> str:
        return "auto"


Scheme = NoRedundancy | Copies | Parity | ReedSolomon
Policy = Scheme | Auto


def parse_policy(text: str) -> Policy:
    """The inverse of `str(policy)`. Raises ConfigError naming expected and found."""
    match text.split(":"):
        case ["none"]:
            return NoRedundancy()
        case ["auto"]:
            return Auto()
        case ["copies", m] if _is_count(m, 2):
            return Copies(int(m))
        case ["parity", n] if _is_count(n, 2):
            return Parity(int(n))
        case ["rs", code]:
            k, plus, m = code.partition("+")
            if plus and _is_count(k, 1) and _is_count(m, 1) and int(k) + int(m) <= MOST_MEMBERS:
                return ReedSolomon(int(k), int(m))
    raise ConfigError(
        f"policy: expected none, copies:M or parity:N (2 to {MOST_MEMBERS}), rs:K+M "
        f"(together at most {MOST_MEMBERS}) or auto as redundancy, "
        f"found {text!r}"
    )


def _is_count(text: str, least: int) -> bool:
    return text.isascii() and text.isdigit() and least <= int(text) <= MOST_MEMBERS


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes that protect each other: the snapshots survive while at most `tolerates` members are
    lost.

    In a ring each member sends to the next `tolerates` ones, so it is `tolerates + 1` *consecutive*
    losses that hurt.
    """

    members: tuple[int, ...]
    tolerates: int
    ring: bool = False

    def holders(self, member: int) -> tuple[int, ...]:
        """Who has a part in restoring this member's snapshot: itself, then the others in cyclic
        order."""
        at = self.members.index(member)
        around = self.members[at:] + self.members[:at]
        return around[: self.tolerates + 1] if self.ring else around

    @property
    def needed(self) -> int:
        """How many holders it takes when the owner is gone: 1 for copies, k for a code."""
        return 1 if self.ring else len(self.members) - self.tolerates

    @property
    def bytes_ratio(self) -> float:
        """Bytes a member keeps in one slot, its own snapshot being 1."""
        return 1 + self.tolerates / self.needed


@dataclass(frozen=True, slots=True)
class Placement:
    """Who protects whom. `bytes_per_node_ratio`: the fullest node's bytes for one slot, its own
    snapshot being 1."""

    policy: Scheme
    groups: tuple[Group, ...]
    strategy: str
    why: str

    @property
    def nodes(self) -> int:
        return sum(len(group.members) for group in self.groups)

    @property
    def holders(self) -> dict[int, tuple[int, ...]]:
        """For each node who has a part in restoring its snapshot, itself first."""
        return dict(
            sorted(
                (member, group.holders(member)) for group in self.groups for member in group.members
            )
        )

    @property
    def bytes_per_node_ratio(self) -> float:
        return max(group.bytes_ratio for group in self.groups)

    @property
    def two_slots_ratio(self) -> float:
        """Two generations are kept: one stays whole while the next is written."""
        return 2 * self.bytes_per_node_ratio
