"""What a rank's last words mean, live; and that the agent's own short lists say the same."""

from __future__ import annotations

import pytest

from keepstep.core.detection import diagnosis
from keepstep.core.detection.diagnosis import ExitFacts, cause_of, explain_exit
from keepstep.core.postmortem.message import MOST_LINES, clause_of, pattern_of
from keepstep.core.postmortem.table import parse_table
from keepstep.edge.os.own_tables import pattern_text
from keepstep.model.failure import Cause
from tests.core.postmortem.failed_runs import HELD_OUT, TUNED, Wording

TABLE = parse_table(pattern_text())


def message_of(wording: Wording) -> str:
    """Without the traceback above it: the error's type and message are what a rank leaves."""
    return "\n".join(line for line in wording.lines if not line.startswith((" ", "Traceback")))


RAISED = {
    message_of(wording): wording.kind
    for wording in [*TUNED, *HELD_OUT]
    if wording.who == "rank" and wording.lines[0].startswith("Traceback")
}


@pytest.mark.parametrize("message", RAISED)
def test_a_message_alone_is_of_the_class_of_the_failed_run(message: str) -> None:
    pattern = pattern_of(message, TABLE)
    assert pattern is not None and pattern.failure == RAISED[message]


# As they are printed, for each word in the agent's lists one at least.
KNOWN_TO_BOTH = [
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "MemoryError: Unable to allocate 8.0 GiB for an array",
    "OSError: [Errno 12] Cannot allocate memory",
    "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
    "RuntimeError: Unable to determine the device handle for GPU0: 0000:3B:00.0: Unknown Error",
    "RuntimeError: GPU at PCI:0000:3b:00 has fallen off the bus",
    "RuntimeError: CUDA error: no CUDA-capable device is detected",
    "RuntimeError: No CUDA-capable device is detected",
    "keepstep.errors.DeviceError: rank 1 computes wrong [KS1023]",
    "KeeperError: the keeper does not answer",
    "StoreError: the store does not answer",
    "MeetingError: expected the other nodes, found none",
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] "
    "Connection closed by peer [127.0.0.1]:2410",
    "RuntimeError: Connection reset by peer",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "RuntimeError: [.../unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation",
    "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
    "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms",
    "torch.distributed.DistNetworkError: something new",
    "RuntimeError: Gloo connectFullMesh failed with [pair.cc:144] Connect timeout [10.0.0.2]:29400",
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, "
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting",
    "keepstep.errors.PeerLost: rank 2 is lost",
]
CLASSES = {
    Cause.OOM: {"gpu-memory", "host-allocation", "host-memory"},
    Cause.DEVICE: {"gpu-lost", "gpu-ecc", "device-wrong"},
    Cause.STATE: {"state", "storage", "rendezvous"},
    Cause.UNKNOWN: {"lost-rank", "hang", "rendezvous"},  # nobody in particular
}


def charged(message: str) -> Cause:
    """What the agent charges such an end to."""
    return cause_of(explain_exit(ExitFacts(rank=0, node=0, code=1, message=message)))


def agree(message: str) -> bool:
    """What the agent calls by a name of its own the table calls by one of the same kind, unless to
    the table it is any error; and the other way round for devices and for what others caused."""
    cause, pattern = charged(message), pattern_of(message, TABLE)
    if pattern is None or pattern.failure == "code":
        return True
    if cause in CLASSES:
        return pattern.failure in CLASSES[cause]
    return pattern.role == "root" and pattern.failure not in CLASSES[Cause.DEVICE]


@pytest.mark.parametrize("message", [*KNOWN_TO_BOTH, *RAISED])
def test_the_agents_words_and_the_table_agree(message: str) -> None:
    assert agree(message), (charged(message), pattern_of(message, TABLE))


def test_the_table_knows_what_the_agent_knows() -> None:
    lists = (
        diagnosis.OUT_OF_MEMORY,
        diagnosis.BROKEN_DEVICE,
        diagnosis.NO_STATE,
        diagnosis.CASCADE,
    )
    for word in (word for words in lists for word in words):
        assert any(word in message for message in KNOWN_TO_BOTH), f"no message has {word!r}"
    for message in KNOWN_TO_BOTH:
        assert charged(message) in CLASSES, message
        pattern = pattern_of(message, TABLE)
        assert pattern is not None and pattern.failure != "code", message


def test_a_root_beats_a_cascade_and_the_heavier_one_wins() -> None:
    lines = ["RuntimeError: Connection reset by peer", "ValueError: no", "CUDA out of memory"]
    kinds = [pattern_of("\n".join(lines[:n]), TABLE) for n in range(4)]
    assert [found and found.failure for found in kinds] == [None, "lost-rank", "code", "gpu-memory"]


def test_the_clause_tells_only_what_the_error_itself_means() -> None:
    full = pattern_of("OSError: [Errno 28] No space left on device", TABLE)
    assert clause_of(full, TABLE).startswith("; no space is left")
    for message in ("ValueError: no", "PeerLost: rank 2 is lost", "nothing that is known", ""):
        assert clause_of(pattern_of(message, TABLE), TABLE) == "", message


def test_a_message_without_end_is_read_so_far() -> None:
    long = "\n" * MOST_LINES + "OSError: [Errno 28] No space left on device"
    assert pattern_of(long, TABLE) is None and pattern_of(long[1:], TABLE) is not None
