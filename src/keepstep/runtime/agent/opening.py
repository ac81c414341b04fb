"""Opening: the first word where the nodes meet, and the epoch of all that is said there after it.

Whoever comes first writes it, all others read it. The time in it is the meeting's **epoch**: with a
secret every other word is signed together with it (`signed_kv.py`). The opening itself is from
before any epoch, so whoever can write there could put back that of an earlier run. Therefore no
node takes one that is older than the newest it has seen, and the node that has made the KV none
from before that. What is too old gives way to a new one.

Comes in: what a node knows. Goes out: the opening that it meets the others under.
"""

from __future__ import annotations

from keepstep.errors import ConfigError
from keepstep.model.attempts import Opening
from keepstep.model.units import MS_NS, S_NS
from keepstep.runtime.agent.meeting_record import MeetingRecord
from keepstep.runtime.agent.standing import Standing
from keepstep.runtime.agent.world import AgentOptions, AgentWorld

# By so much clocks of the nodes may differ; where they differ by more the node that has made the KV
# begins once more, and the others follow.
CLOCKS_DIFFER_MS = 60 * S_NS // MS_NS


async def agree_on_opening(
    record: MeetingRecord,
    standing: Standing,
    options: AgentOptions,
    world: AgentWorld,
    is_hosted: bool,
) -> Opening:
    """Also notes the secret and the epoch. `is_hosted`: this node has made the KV, just now. Raises
    ConfigError when this node cannot meet the one that came first."""
    now_ms = world.clock.wall_ns() // MS_NS
    own, least = None, standing.epoch
    if options.secret is None:
        own, least = standing.secret or world.token() + world.token(), 0
    elif is_hosted and not standing.epoch:
        least = max(0, now_ms - CLOCKS_DIFFER_MS)
    proposal = Opening(own, max(now_ms, standing.epoch + 1), options.encrypt)
    opening = await record.open(proposal)
    while opening.first_version < least:
        opening = await record.open(proposal, opening)
    secret = options.secret or opening.secret
    if secret is None:
        raise ConfigError("secret: expected one, as on the node that came first, found none")
    if opening.encrypt != options.encrypt:
        expected, found = ("on", "off") if opening.encrypt else ("off", "on")
        raise ConfigError(
            f"encrypt: expected {expected}, as on the node that came first, found {found}: set "
            "it on every node or on none"
        )
    standing.secret, standing.epoch = secret, opening.first_version
    return opening


async def say_opening_again(record: MeetingRecord, opening: Opening) -> int:
    """Where somebody has taken it away: who comes then would begin another meeting. The epoch of
    what stands there now."""
    found = await record.open(opening)
    if found.first_version < opening.first_version:
        found = await record.open(opening, found)
    return found.first_version
