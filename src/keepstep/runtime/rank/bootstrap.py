"""Bootstrap: under a foreign launcher (torchrun, srun, or none), how the nodes' keepers learn of
each other.

The ranks have a process group already; over it each tells where its node's keeper listens, and each
hands its keeper the whole mesh. Under `keepstep run` the agents do this. Never guesses: what is
missing is an error that names it.

Invariant: all ranks decide from the same gathered list, so they agree, or all of them raise the
same error.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from keepstep.core.wire.codec import Codec, NotAMessage
from keepstep.errors import ConfigError, KeeperError, KeepstepError
from keepstep.model.events import WARNING
from keepstep.model.mesh import Member, Mesh
from keepstep.model.messages.keeper_rank import Listening
from keepstep.model.messages.ranks import NodeHost, NodeKeeper
from keepstep.model.units import MS_NS
from keepstep.runtime.rank.keeper_client import KeeperClient
from keepstep.runtime.rank.world import RankIdentity, RankWorld

CODEC: Codec[Any] = Codec([NodeHost, NodeKeeper])


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What this node knows about itself. `host`, `rack`, `secret`: as configured, None where they
    are not; `encrypt`: as configured. `meeting_host`: where the ranks met; empty where nobody
    knows. `address_towards`: this machine's address on the way to a host; raises OSError when there
    is no way. `fresh_secret`: one that nobody can guess, for jobs that have none of their own.
    `unsigned_blocks`: why what it sends to others is not signed, if it is not and nobody has
    decided so."""

    host: str | None
    rack: str | None
    secret: str | None
    encrypt: bool
    meeting_host: str
    has_process_group: bool
    address_towards: Callable[[str], str]
    fresh_secret: str
    unsigned_blocks: str = ""
    redundancy: str = ""


class Bootstrap:
    """One rank's part in it. All ranks run it at the same time."""

    def __init__(
        self,
        world: RankWorld,
        node: NodeFacts,
        who: RankIdentity,
        keeper: KeeperClient,
        done: Callable[[], None],
        failed: Callable[[KeepstepError], None],
    ) -> None:
        """`done` is called once the keeper knows the mesh; else `failed`."""
        self._world = world
        self._node = node
        self._who = who
        self._keeper = keeper
        self._done = done
        self._failed = failed

    def run(self) -> None:
        who = self._who
        if not self._node.has_process_group:
            error = ConfigError(
                f"protect() with several nodes (LOCAL_WORLD_SIZE={who.local_world_size} of "
                f"WORLD_SIZE={who.world_size}) expected torch.distributed.init_process_group() "
                "before it, found none: the nodes' keepers need it to find each other"
            )
            self._failed(error)
            return
        self._attempt(self._gather_hosts)

    def _attempt(self, act: Callable[..., None], *arguments: Any) -> None:
        try:
            act(*arguments)
        except KeepstepError as error:
            self._failed(error)

    # -- one step after the other

    def _gather_hosts(self) -> None:
        host = self._node.host or self._towards(self._node.meeting_host)
        self._gather(NodeHost(host), lambda found: self._attempt(self._listen, host, found))

    def _listen(self, host: str, found: Sequence[NodeHost]) -> None:
        others = [other.host for other in found if not _is_loopback(other.host)]
        if self._node.host is None and others and _is_loopback(host):
            # The machine they met on knows its own name as loopback, as Debian's do.
            host = self._towards(others[0])

        def listening(answer: Listening | str) -> None:
            if isinstance(answer, Listening):
                self._gather_keepers(answer)
            else:
                self._failed(KeeperError(f"the keeper cannot listen at {host}: {answer}"))

        self._keeper.listen_at(host, 0, listening)

    def _gather_keepers(self, at: Listening) -> None:
        node = self._node
        has_own = node.secret is not None
        # Versions begin at the time, as the agents' do, and whatever the clocks say grow past any
        # that a keeper has lived.
        version = max(self._world.clock.wall_ns() // MS_NS, at.mesh_version + 1)
        mine = NodeKeeper(
            job=self._who.job,
            host=at.host,
            port=at.port,
            incarnation=at.incarnation,
            rack=node.rack,
            own_secret=has_own,
            fresh_secret="" if has_own else node.fresh_secret,
            encrypts=node.encrypt,
            mesh_version=version,
            redundancy=node.redundancy,
        )
        self._gather(mine, lambda found: self._attempt(self._tell_mesh, found))

    def _tell_mesh(self, found: Sequence[NodeKeeper]) -> None:
        unsigned, who = self._node.unsigned_blocks, self._who
        if unsigned and who.rank % who.local_world_size == 0:  # once a node
            self._world.journal.record("blocks-unsigned", unsigned, WARNING)
        self._keeper.begin_mesh(mesh_of(found, self._who.rank, self._node.secret))
        self._done()

    # -- the ways there

    def _gather(self, mine: Any, then: Callable[[Any], None]) -> None:
        def gathered(texts: list[bytes]) -> None:
            try:
                found = [CODEC.decode(text) for text in texts]
            except NotAMessage as error:
                self._failed(KeeperError(f"a rank runs another release of keepstep: {error}"))
                return
            then(found)

        self._world.groups.gather(CODEC.encode(mine), gathered)

    def _towards(self, host: str) -> str:
        if not host:
            raise ConfigError(
                "host: expected KEEPSTEP_HOST, the address at which other nodes reach this one, "
                "or MASTER_ADDR; found neither"
            )
        try:
            return self._node.address_towards(host)
        except OSError as error:
            raise ConfigError(
                f"host: expected a way to {host}, found none ({error.strerror}); set KEEPSTEP_HOST"
            ) from error


def mesh_of(found: Sequence[NodeKeeper], rank: int, own_secret: str | None) -> Mesh:
    """The mesh as this rank's node sees it, from what all ranks gave, in their order.

    Raises ConfigError when they do not agree, or a node's ranks are not in a row.
    """
    _check(found)
    nodes = [(keeper, list(ranks)) for keeper, ranks in groupby(found, key=lambda one: one.address)]
    if len({keeper for keeper, _ in nodes}) != len(nodes):
        order = [f"{host}:{port}" for (host, port, _), _ in nodes]
        raise ConfigError(
            "expected the ranks of a node in a row (with srun: --distribution=block), found "
            f"them on {', '.join(order)}"
        )
    members = tuple(
        Member(
            node=number,
            host=host,
            port=port,
            incarnation=incarnation,
            ranks=len(ranks),
            rack=ranks[0].rack,
        )
        for number, ((host, port, incarnation), ranks) in enumerate(nodes)
    )
    mine = found[rank].address
    node = next(number for number, (keeper, _) in enumerate(nodes) if keeper == mine)
    version = max(one.mesh_version for one in found)
    secret = own_secret or found[0].fresh_secret
    return Mesh(version, node, members, secret, found[rank].encrypts)


def _check(found: Sequence[NodeKeeper]) -> None:
    jobs = sorted({one.job for one in found})
    if len(jobs) > 1:
        raise ConfigError(
            f"job: expected one name on all nodes, found {' and '.join(jobs)}; set KEEPSTEP_JOB"
        )
    policies = {one.redundancy: rank for rank, one in enumerate(found)}
    if len(policies) > 1:
        told = " and ".join(f"{policy} for rank {rank}" for policy, rank in policies.items())
        raise ConfigError(f"redundancy: expected one on all nodes, found {told}")
    _check_all_or_none("secret", [one.own_secret for one in found])
    _check_all_or_none("encrypt", [one.encrypts for one in found])
    _check_all_or_none("rack", [one.rack is not None for one in found])


def _check_all_or_none(name: str, has: Sequence[bool]) -> None:
    if len(set(has)) > 1:
        raise ConfigError(
            f"{name}: expected one for all nodes or for none, found one for rank "
            f"{has.index(True)}, none for {has.index(False)}"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
