"""StepsBoard: the leader hears the newest of each node, and each node the leader's word; also after
an agent was replaced, and while nobody answers nothing piles up."""

from __future__ import annotations

from keepstep.ports import KV
from keepstep.runtime.agent.signed_kv import SignedKV
from keepstep.runtime.agent.steps_board import StepsBoard
from tests.runtime.fakes import FakeKV, FakeTime, Table


class Meeting:
    def __init__(self) -> None:
        self.time, self.table = FakeTime(), Table()
        self.kv: KV | None = FakeKV(self.time, self.table)

    def board(self, node: int, attempt: int = 3) -> StepsBoard:
        return StepsBoard(lambda: self.kv, attempt, node, nodes=3)

    def tell(self, board: StepsBoard, text: str) -> str:
        found: list[str] = []
        board.tell(text, found.append)
        assert not board.is_free
        self.pass_()
        assert board.is_free
        return found[0]

    def gather(self, board: StepsBoard) -> dict[int, str]:
        found: list[dict[int, str]] = []
        board.gather(lambda told: found.append(dict(told)))
        self.pass_()
        assert board.is_free
        return found[0]

    def say(self, board: StepsBoard, word: str) -> None:
        board.say(word)
        self.pass_()
        assert board.is_free

    def pass_(self) -> None:
        for _ in range(4):
            self.time.pass_ns()


def test_the_leader_hears_the_newest_of_each_and_each_its_word() -> None:
    meeting = Meeting()
    leader, one, two = map(meeting.board, range(3))
    assert meeting.gather(leader) == {}
    assert meeting.tell(one, "a") == "" and meeting.tell(two, "b") == ""
    assert meeting.tell(one, "c") == ""
    assert meeting.gather(leader) == {1: "c", 2: "b"}
    meeting.say(leader, "word")
    assert meeting.tell(one, "") == "word" == meeting.tell(two, "d")
    assert meeting.gather(leader) == {1: "c", 2: "d"}


def test_who_follows_an_agent_takes_its_place() -> None:
    meeting = Meeting()
    meeting.tell(meeting.board(1), "a")
    meeting.tell(meeting.board(1), "b")
    meeting.say(meeting.board(0), "word")
    meeting.say(meeting.board(0), "word 2")
    assert meeting.gather(meeting.board(0)) == {1: "b"}
    assert meeting.tell(meeting.board(2), "") == "word 2"


def test_another_attempt_has_other_words() -> None:
    meeting = Meeting()
    meeting.tell(meeting.board(1), "a")
    assert meeting.gather(meeting.board(0, attempt=4)) == {}


def test_where_nobody_answers_one_question_waits_and_another_kv_is_asked_anew() -> None:
    meeting = Meeting()
    board = meeting.board(1)
    board.tell("a", lambda word: None)
    assert not board.is_free
    meeting.kv = None
    assert not board.is_free
    meeting.kv = FakeKV(meeting.time, Table())
    assert board.is_free and meeting.tell(board, "b") == ""
    assert meeting.gather(meeting.board(0)) == {1: "b"}


def test_a_stranger_who_knows_no_secret_is_not_heard() -> None:
    meeting = Meeting()
    plain = meeting.kv
    assert plain is not None
    meeting.tell(meeting.board(1), "a stranger's")
    meeting.kv = SignedKV(plain, "secret", meeting.time, lambda key: None, "job")
    leader = meeting.board(0)
    assert meeting.gather(leader) == {}
    meeting.tell(meeting.board(1), "ours")
    assert meeting.gather(leader) == {1: "ours"}
