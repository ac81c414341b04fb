"""EvidenceBoard: what one node shows the others see, its newest word alone, also after its agent
was replaced."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.runtime.agent.evidence_board import EvidenceBoard
from tests.runtime.fakes import FakeKV, FakeTime, Table

NODES = 3


class Meeting:
    def __init__(self) -> None:
        self.time = FakeTime()
        self.table = Table()

    def board(self, attempt: int = 3) -> EvidenceBoard:
        kv = FakeKV(self.time, self.table)
        return EvidenceBoard(lambda: kv, attempt, NODES)

    def exchange(self, board: EvidenceBoard, node: int, evidence: str) -> dict[int, str]:
        found: list[dict[int, str]] = []
        board.exchange(node, evidence, found.append)
        self.time.pass_ns()
        [shown] = found
        return shown


POSTS = st.lists(
    st.tuples(st.integers(0, NODES - 1), st.sampled_from(["", "a", "b"]), st.booleans())
)


@given(POSTS)
def test_all_see_the_newest_word_of_each_node(posts: list[tuple[int, str, bool]]) -> None:
    """Also of a node whose agent was followed by another one."""
    meeting = Meeting()
    boards = [meeting.board() for _ in range(NODES)]
    newest: dict[int, str] = {}
    for node, evidence, is_replaced in posts:
        if is_replaced:
            boards[node] = meeting.board()
        newest[node] = evidence
        shown = meeting.exchange(boards[node], node, evidence)
        assert shown == {at: text for at, text in newest.items() if text}


@given(st.lists(st.sampled_from(["", "a", "b"]), min_size=2))
def test_no_value_is_written_twice(posts: list[str]) -> None:
    """As the KV wants it: an answer that is lost may be asked for again."""
    meeting = Meeting()
    board = meeting.board()
    written = []
    for evidence in posts:
        meeting.exchange(board, 0, evidence)
        written.append(meeting.table.values["3/board/0"])
    assert len(set(written)) == len(written)


def test_another_attempts_board_is_empty_and_another_releases_words_are_nothing() -> None:
    meeting = Meeting()
    meeting.exchange(meeting.board(), 0, "a")
    assert meeting.exchange(meeting.board(4), 1, "b") == {1: "b"}
    for text in ("no json", "7", '["x", 1]', "[1, 2, 3]"):
        meeting.table.values["3/board/2"] = text
        assert meeting.exchange(meeting.board(), 1, "b") == {0: "a", 1: "b"}
