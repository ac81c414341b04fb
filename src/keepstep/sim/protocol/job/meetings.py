"""Meetings: the stores by which the ranks of an attempt find each other, by address, and one
agent's part in them as `ports.MeetingPlaces`.

A store is a process's: it ends with it, and whoever has not met by then does not.
"""

from __future__ import annotations

from keepstep.errors import MeetingError
from keepstep.model.messages.agent_rank import RegroupAt
from keepstep.sim.protocol.job.collectives import MeetingPlace
from keepstep.sim.protocol.wire.network import Network
from keepstep.sim.protocol.world.world import Process, World

FIRST_PORT = 40_000


class Meetings:
    """All of a cluster. What is asked for by several attempts at one address is a place for each:
    their keys in the store differ."""

    def __init__(self, world: World, network: Network) -> None:
        self._world = world
        self._network = network
        self._hosts: dict[tuple[str, int], Process] = {}
        self._places: dict[RegroupAt, MeetingPlace] = {}
        self._next_port = FIRST_PORT

    def open(self, process: Process, host: str, port: int) -> int:
        """A store of this process. Raises MeetingError when the port is taken."""
        if not port:
            self._next_port += 1
            port = self._next_port
        holder = self._hosts.get((host, port))
        if holder is not None and holder is not process and holder.alive:
            raise MeetingError(f"{host}:{port} is taken")
        self._hosts[host, port] = process
        return port

    def close(self, host: str, port: int) -> None:
        """Who meets there meets no more."""
        del self._hosts[host, port]
        for at, place in self._places.items():
            if (at.host, at.port) == (host, port):
                place.close()

    def at(self, where: RegroupAt) -> MeetingPlace:
        """Closed, if nobody is there."""
        place = self._places.get(where)
        if place is None:
            host = self._hosts.get((where.host, where.port))
            place = self._places[where] = MeetingPlace(self._world, self._network, host)
            if host is None or not host.alive:
                place.close()
        return place


class SimMeetingPlaces:
    """See `ports.MeetingPlaces`."""

    def __init__(self, meetings: Meetings, process: Process) -> None:
        self._meetings = meetings
        self._process = process
        self._own: tuple[str, int] | None = None

    def open(self, host: str, port: int) -> int:
        if self._process.touch("open meeting place") and port:
            raise MeetingError(f"no store can be had at {host}:{port}")
        self.close()
        found = self._meetings.open(self._process, host, port)
        self._own = (host, found)
        return found

    def close(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            self._meetings.close(*own)
