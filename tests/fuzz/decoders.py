"""Decoders: each reader of what somebody else may have written, with right bytes to begin from.

What a decoder may do with wrong bytes: raise one of its named errors, or return a value that says
the same when it is written and read again. Where bytes are under a checksum or a MAC, all that is
not as it was written must be refused; what a hostile writer puts under a right checksum is tried
too.
"""

from __future__ import annotations

import json
import pickle
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import fsspec
import xxhash
from hypothesis import Phase as Hypothesis
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.coding.checksum import checksum
from keepstep.config import from_mapping
from keepstep.core.detection.slow_words import with_words
from keepstep.core.economics.costs import parse_cluster_policy
from keepstep.core.economics.retention import parse_rules
from keepstep.core.postmortem.recorder import Recorder, RecorderDump, parse_dump
from keepstep.core.wire.codec import NotAMessage
from keepstep.core.wire.connection import KEEPERS_FORMAT, Connection, WireFormat
from keepstep.core.wire.conversations import (
    AGENT_WITH_KEEPER,
    AGENT_WITH_PROCESS,
    KEEPER_WITH_NODE,
    PROCESS_WITH_AGENT,
    RANK_WITH_KEEPER,
)
from keepstep.core.wire.messages import decode, encode
from keepstep.edge.net import etcd_answers
from keepstep.edge.os.clock import CLOCK
from keepstep.edge.os.error_file import read_error_file
from keepstep.edge.shm.collective_profile_page import read_word
from keepstep.edge.shm.double_buffered_page import DoubleBufferedPage
from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.node_safety_file import FILE, read_node_safety
from keepstep.edge.shm.slot_header import parse_page
from keepstep.edge.shm.status_page import StatusPage, status_path
from keepstep.edge.store.manifest import manifest_from_bytes
from keepstep.edge.store.owner import OWNER, OwnerRecord, owner_record, read_owner
from keepstep.edge.store.parts import (
    part_from_bytes,
    part_to_bytes,
    survey_from_bytes,
    survey_to_bytes,
)
from keepstep.edge.store.runs import RUN, begin_run, newest_run
from keepstep.edge.torch.pickles.checked import load_pickles
from keepstep.edge.torch.pickles.inert import Inert
from keepstep.edge.torch.pickles.known import Known
from keepstep.edge.torch.pickles.plain import load_plain
from keepstep.errors import ConfigError, DamageError, IdentityError, StoreError, UntrustedError
from keepstep.model.decoding import from_json
from keepstep.model.diagnosis import Evidence, evidence_from_text, evidence_to_text
from keepstep.model.events import Event, event_from_line
from keepstep.model.failure import parse_budget
from keepstep.model.horizon import Horizon
from keepstep.model.layout import Shard, TensorSpec, lay_out, layout_from_text
from keepstep.model.messages.agent_rank import FromProcess, ToProcess
from keepstep.model.messages.keeper_agent import BeginMesh, FromAgent, ToAgent
from keepstep.model.messages.keeper_rank import FromRank, ToRank
from keepstep.model.messages.peers import KeeperMessage
from keepstep.model.node_steps import (
    NamedSlow,
    NodeSteps,
    SlowWord,
    node_steps_from_text,
    node_steps_to_text,
    slow_word_from_text,
    slow_word_to_text,
)
from keepstep.model.rhythm import Told
from keepstep.model.snapshot import Phase, RankStatus, SlotState, SlotView, Stamp
from keepstep.model.step_work import GroupEntries, Section, Slow, Timing, WorkBlock
from keepstep.model.topology import parse_policy
from keepstep.model.units import PAGE_BYTES
from keepstep.model.wire import BlockComing
from keepstep.runtime.agent import meeting_record
from keepstep.runtime.agent.evidence_board import _evidence
from keepstep.runtime.agent.signed_kv import WordSeal
from keepstep.runtime.replication.encode import contents_from
from tests.core.postmortem.recorded import a_call
from tests.core.wire import test_connection as wire
from tests.core.wire.drawn import values
from tests.edge.store.test_manifest import WHOLE
from tests.edge.store.test_parts import ATTEMPT, PART, SURVEY
from tests.edge.store.test_signer import OURS, SIGNED
from tests.edge.torch.pickles.test_known import PLACEMENTS, PLAIN

JSON_SEAL = b'{"xxh3_64": "%s",\n'


@dataclass(frozen=True)
class Decoder:
    """`read`: raises `refuses`, or returns something. `same`: of that and of the bytes, raises
    AssertionError when no writer says so. `seal`: what a hostile writer does to his bytes."""

    seeds: Sequence[bytes]
    read: Callable[[bytes], Any]
    refuses: tuple[type[Exception], ...] = ()
    same: Callable[[Any, bytes], None] = lambda found, said: None
    seal: Callable[[bytes], bytes] = lambda said: said


def drawn(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """So many of it, always the same."""
    found: list[Any] = []

    @settings(derandomize=True, max_examples=count, database=None, phases=[Hypothesis.generate])
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


# -- messages


def of_messages(
    union: Any, write: Callable[[Any], bytes], read: Callable[[bytes], Any], rewrite: Any = None
) -> Decoder:
    """`rewrite`: writes what `read` has found, where that is another end's work."""
    again = rewrite or write

    def same(found: Any, said: bytes) -> None:
        assert read(again(found)) == found

    kinds = [kind for kind in get_args(union) if kind is not BeginMesh]
    seeds = [write(message) for kind in kinds for message in drawn(values(kind), 3)]
    return Decoder(seeds, read, (NotAMessage,), same)


def of_meetings() -> Decoder:
    """What stands where the nodes meet, and no secret is configured."""
    kinds = meeting_record.KINDS
    seeds = [meeting_record._encode(one) for kind in kinds for one in drawn(values(kind), 3)]
    return Decoder(
        [seed.encode() for seed in seeds],
        lambda said: meeting_record._message(_text(said)),
        (NotAMessage,),
    )


def a_connection(said: bytes, format: WireFormat) -> list[Any]:
    """All that an end makes of a stream."""
    _, two = wire.pair(format=format)
    return wire.feed(two, said)


def a_stranger(said: bytes) -> Connection:
    """Whoever dials says this first."""
    end = wire.acceptor()
    wire.feed(end, said)
    return end


def of_streams(format: WireFormat) -> Decoder:
    one, _ = wire.pair(format=format)
    kinds = get_args(KeeperMessage)[:6]
    items = [message for kind in kinds for message in drawn(values(kind), 1)]
    script = wire.play(one, [*items, b"a block", wire.Signalled(wire.Signal.PING, 0), b"x" * 200])

    def same(found: list[Any], said: bytes) -> None:
        """Nothing that was not sent, but that bytes of a block are others: these are refused."""
        for event, sent in zip(found, script.events, strict=False):
            if isinstance(event, (wire.Refused, wire.BlockDamaged)):
                return
            assert isinstance(sent, bytes) or event == sent
            assert not isinstance(event, BlockComing) or event == sent

    return Decoder([b"".join(script.frames)], lambda said: a_connection(said, format), (), same)


def of_strangers() -> Decoder:
    return Decoder([wire.dialer().take()], a_stranger, (), lambda end, said: _not_proven(end))


def _not_proven(end: Connection) -> None:
    assert not end._has_keys, "nobody has proven anything"


# -- memory


def of_slot_headers(resealed: bool) -> Decoder:
    page = _slot_page()

    def seal(said: bytes) -> bytes:
        body = said[: PAGE_BYTES - 8].ljust(PAGE_BYTES - 8, b"\0")
        return body + checksum(body).to_bytes(8, "little")

    def as_page(said: bytes) -> bytes:
        return said[:PAGE_BYTES].ljust(PAGE_BYTES, b"\0")

    def same(found: Any, said: bytes) -> None:
        assert resealed or as_page(said) == page, "a page that is not as it was written"

    def read(said: bytes) -> Any:
        return parse_page(as_page(said), Path("slot"))

    return Decoder([page], read, (DamageError,), same, seal if resealed else lambda said: said)


def _slot_page() -> bytes:
    from keepstep.edge.shm.slot_header import page_of
    from keepstep.model.snapshot import SlotHeader

    header = SlotHeader(
        state=SlotState.SEALED,
        sequence=4,
        job_hash=b"j" * 16,
        layout_hash=b"l" * 16,
        rank=3,
        world_size=8,
        incarnation=77,
        stamp=Stamp(12, 2),
        payload_bytes=1 << 20,
        manifest_bytes=900,
        block_bytes=4096,
        block_count=256,
        table_checksum=1,
        manifest_checksum=2,
        sealed_wall_ns=3,
        loss=0.5,
    )
    return page_of(header, 1 << 21)


def of_layouts() -> Decoder:
    layout = lay_out(
        [
            TensorSpec("model.weight", "float32", (8, 3), 96, shard=Shard((16, 3), (8, 0))),
            TensorSpec("model.bias", "bfloat16", (8,), 16, stride=(1,)),
            TensorSpec("optimizer.step", "int64", (), 8),
        ]
    )

    def same(found: Any, said: bytes) -> None:
        again = json.dumps(found.to_json()).encode()
        assert layout_from_text(again, "again") == found

    seed = json.dumps(layout.to_json()).encode()
    return Decoder([seed], partial(layout_from_text, where="slot"), (DamageError,), same)


def of_parities() -> Decoder:
    seed = {
        "row": [0, 1, 2, 3],
        "tolerates": 1,
        "data_bytes": [4096, 8192, 4096, 100],
        "metas": {"1": [4096, 8192, 300], "2": [16384, 4096, 200]},
    }

    def same(found: Any, said: bytes) -> None:
        assert contents_from(found.to_text(), 4096) == found

    text = json.dumps(seed).encode()
    return Decoder([text], lambda said: contents_from(said, 4096), (DamageError,), same)


class Pages:
    """Pages of a job directory, in which anybody of that user can write."""

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="keepstep-fuzz-", dir="/dev/shm")
        self.place = Path(self._temporary.name)
        (self.place / "rank-00000").mkdir()
        self.status = StatusPage.own(MEMORY, self.place, 0, CLOCK)
        assert self.status is not None
        self.status.publish(phase=Phase.STEP, slots=(SlotView(SlotState.SEALED, Stamp(3, 1)),))
        self.horizon = HorizonPage(MEMORY, self.place)
        self.horizon.write(Horizon(2, Stamp(3, 1), None, frozenset({Stamp(3, 1)}), 3, None, 1))

    def body(self, path: Path) -> bytes:
        found = DoubleBufferedPage.open(MEMORY, path).read()
        assert found is not None
        return found

    def as_body(self, path: Path, read: Callable[[], Any]) -> Decoder:
        """Under a right checksum."""
        page = DoubleBufferedPage.open(MEMORY, path)

        def written(said: bytes) -> Any:
            page.write(said[:1000])
            return read()

        return Decoder([self.body(path)], written)

    def as_bytes(self, path: Path, read: Callable[[], Any]) -> Decoder:
        """Whatever the checksum says."""
        region = MEMORY.open(path)

        def written(said: bytes) -> Any:
            region.view[:] = said[:PAGE_BYTES].ljust(PAGE_BYTES, b"\0")
            return read()

        return Decoder([bytes(region.view)], written)

    def as_file(self, name: str, seed: Any, read: Callable[[Path], Any]) -> Decoder:
        path = self.place / name

        def written(said: bytes) -> Any:
            path.write_bytes(said)
            return read(path)

        return Decoder([json.dumps(seed).encode()], written)


def of_pages() -> dict[str, Decoder]:
    pages = Pages()
    status, horizon = status_path(pages.place, 0), pages.place / "horizon"
    told = Told("", 1.5, 10, 20, 30, 40, 50, 60, 0)
    error = {"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "File"}}}

    def a_status() -> RankStatus | None:
        page = StatusPage(MEMORY, status)
        try:
            return page.read()
        finally:
            page.close()

    def a_horizon() -> Horizon:
        found = pages.horizon.last()
        assert all(isinstance(stamp.step, int) for stamp in found.alive)
        return found

    return {
        "status page": pages.as_body(status, a_status),
        "status page's bytes": pages.as_bytes(status, a_status),
        "horizon": pages.as_body(horizon, a_horizon),
        "horizon's bytes": pages.as_bytes(horizon, a_horizon),
        "node safety": pages.as_file(
            FILE, {"nodes": [], "step": 3}, lambda path: read_node_safety(MEMORY, path.parent)
        ),
        "rhythm": pages.as_file("plan", asdict(told), lambda path: read_word(MEMORY, path, Told)),
        "error file": pages.as_file("error", error, lambda path: read_error_file(str(path))),
    }


# -- the store


def json_sealed(said: bytes) -> bytes:
    """As `manifest.seal` does it, whatever it is."""
    rest = said.partition(b"\n")[2]
    return JSON_SEAL % xxhash.xxh3_64_hexdigest(rest).encode() + rest


def of_manifests(resealed: bool) -> Decoder:
    seed = WHOLE.to_bytes()

    def same(found: Any, said: bytes) -> None:
        assert resealed or said == seed, "a manifest that is not as it was written"
        assert manifest_from_bytes(found.to_bytes(), "again") == found

    return Decoder(
        [seed],
        partial(manifest_from_bytes, where="store"),
        (DamageError, StoreError),
        same,
        json_sealed if resealed else lambda said: said,
    )


def of_signed_manifests() -> Decoder:
    """Whoever can write to the store can seal what it likes, and sign nothing."""
    seed = SIGNED.to_bytes(OURS)

    def same(found: Any, said: bytes) -> None:
        assert said == seed, "a manifest that nobody signed so"

    return Decoder(
        [seed],
        partial(manifest_from_bytes, where="store", signer=OURS),
        (DamageError,),
        same,
        json_sealed,
    )


def of_parts(write: Any, read: Any, value: Any) -> Decoder:
    return Decoder(
        [write(ATTEMPT, 1, value)],
        lambda said: read(said, "store", ATTEMPT, 1),
        (DamageError, StoreError, IdentityError),
        seal=json_sealed,
    )


def of_owners() -> Decoder:
    """Of a store whose job has a secret. Whom a record keeps out is believed, whoever wrote it;
    whose checkpoints it lets in is not."""
    fs = fsspec.filesystem("memory")
    seed = owner_record("ours", ["theirs", "another"], OURS)

    def read(said: bytes) -> OwnerRecord:
        fs.pipe_file(f"/fuzz-owner/{OWNER}", said)
        return read_owner(fs, "/fuzz-owner", OURS)

    def same(found: OwnerRecord, said: bytes) -> None:
        assert said == seed or not found.adopted, "let in, and nobody signed it"

    return Decoder([seed], read, (DamageError, StoreError), same, json_sealed)


def of_runs() -> Decoder:
    """Whoever began a run could have the job start afresh."""
    fs = fsspec.filesystem("memory")
    begun = f"{begin_run(fs, '/fuzz-run', 2, OURS)}/{RUN}"
    seed = fs.cat_file(begun)

    def read(said: bytes) -> int:
        fs.pipe_file(begun, said)
        return newest_run(fs, "/fuzz-run", OURS)

    def same(found: int, said: bytes) -> None:
        assert (found, said) == (2, seed), "a run that nobody of ours has begun"

    return Decoder([seed], read, (DamageError, StoreError), same, json_sealed)


# -- where nodes meet, and what people write


def of_evidence() -> Decoder:
    numbers = [3] * 8
    rank = Evidence(1, 0, Phase.STEP, True, 3, 4, 0, "running", "", 0.5, *numbers[:6])
    seed = evidence_to_text([rank]).encode()

    def same(found: list[Evidence], said: bytes) -> None:
        assert evidence_from_text(evidence_to_text(found)) == found or any(
            one.cpu_ratio != one.cpu_ratio for one in found
        )

    return Decoder([seed], lambda said: evidence_from_text(_text(said)), (ValueError,), same)


def of_node_steps() -> Decoder:
    """What another node tells is judged: it must be blocks that took some steps."""
    block = WorkBlock(5, (1, 2, 3, 4, 5, 2, 1), (6,) * 7, 7, (8,) * 7, 9, 10)
    block = block._replace(groups=(GroupEntries(11, 12, 13),))
    seed = node_steps_to_text(NodeSteps(1, 2, Timing.HOST, {5: {0: block, 1: block}})).encode()

    def same(found: NodeSteps, said: bytes) -> None:
        assert all(one.steps > 0 for blocks in found.blocks.values() for one in blocks.values())
        assert node_steps_from_text(node_steps_to_text(found)) == found

    return Decoder([seed], lambda said: node_steps_from_text(_text(said)), (ValueError,), same)


def of_slow_words() -> Decoder:
    slow = Slow(3, Section.COMPUTE, "compute", 400, 60, 40, 20, 0.45, True, False, "")
    word = SlowWord(2, 7, 20, 440, 4, (1,), {2: 0.3}, (NamedSlow(slow, 9, 16),))
    seed = slow_word_to_text(word).encode()

    def same(found: SlowWord, said: bytes) -> None:
        assert slow_word_from_text(slow_word_to_text(found)).block_steps == found.block_steps > 0
        assert all(with_words(one.slow).why for one in found.slow)

    return Decoder([seed], lambda said: slow_word_from_text(_text(said)), (ValueError,), same)


def of_signed_values() -> Decoder:
    seal = WordSeal("the job's secret", "j")
    seed = seal.sign("0/verdict", "a word").encode()

    def same(found: str | None, said: bytes) -> None:
        assert found is None or said == seed, "a word of a stranger"

    return Decoder([seed], lambda said: seal.opened("0/verdict", _text(said)), (), same)


def of_events() -> Decoder:
    event = Event(1, 2, "keeper", "loaded", "loaded and proven", {"step": 3, "a": [1]}, "boot")

    def same(found: Event, said: bytes) -> None:
        assert event_from_line(found.to_line()).kind == found.kind

    seed = event.to_line().encode()
    return Decoder([seed], lambda said: event_from_line(_text(said)), (ValueError,), same)


def of_settings() -> Decoder:
    seed = {"job": "j", "slots": 3, "store": "s3://b/p", "keep": "latest:2", "lazy": True}

    def read(said: bytes) -> Any:
        plain = json.loads(said)
        return from_mapping(plain if isinstance(plain, dict) else {})

    refuses = (ConfigError, ValueError, RecursionError)  # the last two: of json.loads here
    return Decoder([json.dumps(seed).encode()], read, refuses)


def of_etcd_answers() -> Decoder:
    """Of reads. What stands under a key is signed, and not by etcd."""
    seed = {
        "header": {"cluster_id": "14841639068965178418", "revision": "17", "raft_term": "2"},
        "succeeded": True,
        "responses": [
            {"response_range": {"header": {"revision": "17"}, "kvs": [{"value": "eA=="}]}},
            {"response_range": {"header": {"revision": "17"}}},
        ],
    }

    def read(said: bytes) -> list[tuple[str | None, int]]:
        return etcd_answers.values_read(from_json(said), 2)

    def same(found: list[tuple[str | None, int]], said: bytes) -> None:
        assert len(found) == 2 and all(0 <= revision < 10**20 for _, revision in found)

    return Decoder([json.dumps(seed).encode()], read, (ValueError,), same)


def of_etcd_swaps() -> Decoder:
    refused = {"responses": [{"response_range": {"kvs": [{"value": "eA=="}]}}]}
    seeds = [json.dumps(said).encode() for said in ({"succeeded": True}, refused)]
    return Decoder(seeds, lambda said: etcd_answers.swapped(from_json(said), "mine"), (ValueError,))


def of_etcd_watches() -> Decoder:
    seeds = [b'{"result": {"header": {}, "events": [{"kv": {"key": "eA=="}}]}}', b""]
    return Decoder(seeds, etcd_answers.is_news, (ValueError,))


def of_words(parse: Callable[[str], Any], *seeds: str) -> Decoder:
    return Decoder(
        [seed.encode() for seed in seeds], lambda said: parse(_text(said)), (ConfigError,)
    )


def of_recorders() -> Decoder:
    """Dumps of torch's flight recorder, as it pickles them and as JSON."""
    document = {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
        "entries": [a_call(0, 7, "nccl:all_reduce"), a_call(0, 8, "nccl:send 0->1", is_p2p=True)],
    }

    def read(said: bytes) -> RecorderDump:
        plain = json.loads(said) if said[:1] == b"{" else load_plain(said)
        dump = parse_dump(0, plain)
        recorder = Recorder()
        recorder.take(dump)
        recorder.mismatch()
        recorder.missed([0, 1])
        return dump

    refuses = (UntrustedError, ValueError, RecursionError)  # the last one: of json.loads here
    seeds = [json.dumps(document).encode(), pickle.dumps(document, 2)]
    return Decoder(seeds, read, refuses)


def _text(said: bytes) -> str:
    return said.decode("utf-8", "surrogateescape")


# -- pickles


def of_pickles(vocabulary: Callable[[], Known]) -> Decoder:
    """Of all plain types: no input may end the process or take its memory."""
    seeds = [pickle.dumps(value, protocol) for value in PLAIN for protocol in (2, 5)]
    return Decoder(
        [*seeds, *(pickle.dumps(value, 5) for value in PLACEMENTS)],
        lambda said: load_pickles(said, (1,), vocabulary()),
        (UntrustedError,),
    )


def all_decoders() -> dict[str, Decoder]:
    """By name."""
    node = KEEPER_WITH_NODE
    return {
        "frames": of_streams(KEEPERS_FORMAT),
        "encrypted frames": of_streams(wire.ENCRYPTS),
        "strangers": of_strangers(),
        "keepers": of_messages(KeeperMessage, encode, decode),
        "ranks": of_messages(
            FromRank, RANK_WITH_KEEPER.encode, node.decode, RANK_WITH_KEEPER.encode
        ),
        "to ranks": of_messages(ToRank, node.encode, RANK_WITH_KEEPER.decode),
        "agents": of_messages(FromAgent, AGENT_WITH_KEEPER.encode, node.decode, _either_end),
        "to agents": of_messages(ToAgent, node.encode, AGENT_WITH_KEEPER.decode),
        "processes": of_messages(FromProcess, PROCESS_WITH_AGENT.encode, AGENT_WITH_PROCESS.decode),
        "to processes": of_messages(
            ToProcess, AGENT_WITH_PROCESS.encode, PROCESS_WITH_AGENT.decode
        ),
        "meeting": of_meetings(),
        "slot header": of_slot_headers(resealed=False),
        "hostile slot header": of_slot_headers(resealed=True),
        "layout": of_layouts(),
        "parity": of_parities(),
        **of_pages(),
        "manifest": of_manifests(resealed=False),
        "hostile manifest": of_manifests(resealed=True),
        "signed manifest": of_signed_manifests(),
        "part": of_parts(part_to_bytes, part_from_bytes, PART),
        "survey": of_parts(survey_to_bytes, survey_from_bytes, SURVEY),
        "owner": of_owners(),
        "run": of_runs(),
        "plain state": of_pickles(Known),
        "state passed on": of_pickles(Inert),
        "evidence": of_evidence(),
        "node steps": of_node_steps(),
        "slow words": of_slow_words(),
        "evidence board": Decoder([b'[3, "[]"]'], lambda said: _evidence(_text(said)), ()),
        "signed values": of_signed_values(),
        "etcd's values": of_etcd_answers(),
        "etcd's swaps": of_etcd_swaps(),
        "etcd's watches": of_etcd_watches(),
        "events": of_events(),
        "flight recorder": of_recorders(),
        "settings": of_settings(),
        "policy": of_words(parse_policy, "copies:2", "rs:4+2", "auto", "parity:4"),
        "cluster policy": of_words(parse_cluster_policy, "copies:2", "rs:4+2"),
        "budget": of_words(parse_budget, "crash=3,node=unlimited,refill=50"),
        "retention": of_words(parse_rules, "latest:2,every:1000,best:loss:min:1"),
    }


def _either_end(message: Any) -> bytes:
    """What a keeper understands comes from ranks and from agents."""
    try:
        return AGENT_WITH_KEEPER.encode(message)
    except NotAMessage:
        return RANK_WITH_KEEPER.encode(message)
