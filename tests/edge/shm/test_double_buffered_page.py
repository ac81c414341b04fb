"""Double-buffered pages: what was written last is read by everybody, and a writer that dies in the
midst of a write costs that write."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.edge.shm.double_buffered_page import (
    HALF_BYTES,
    MAX_BODY_BYTES,
    DoubleBufferedPage,
)
from keepstep.edge.shm.memory import MEMORY

bodies = st.binary(min_size=1, max_size=40) | st.just(bytes(range(256)) * 8).map(
    lambda long: long[:MAX_BODY_BYTES]
)
# what is written; by a writer that begins anew; which then dies after so many bytes
writes = st.lists(
    st.tuples(bodies, st.booleans(), st.none() | st.integers(0, HALF_BYTES - 1)), max_size=12
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page") / "page"


@given(writes)
def test_all_read_what_was_written_last_and_whole(
    path: Path, writes: list[tuple[bytes, bool, int | None]]
) -> None:
    path.unlink(missing_ok=True)
    writer = DoubleBufferedPage.ensure(MEMORY, path)
    reader = DoubleBufferedPage.open(MEMORY, path)
    last: bytes | None = None
    assert reader.read() is None
    for body, begins_anew, dies_at in writes:
        if begins_anew:
            writer.close()
            writer = DoubleBufferedPage.ensure(MEMORY, path)
        with path.open("r+b") as file:
            before = file.read()
            writer.write(body)
            if dies_at is None:
                last = body
            else:
                # the body goes first, from its begin on, and its head last
                file.seek(0)
                after = file.read()
                (at,) = (
                    at
                    for at in (0, HALF_BYTES)
                    if before[at : at + HALF_BYTES] != after[at : at + HALF_BYTES]
                )
                head = 16
                torn = before[at : at + head] + after[at + head : at + dies_at]
                torn += before[at + len(torn) : at + HALF_BYTES]
                file.seek(at)
                file.write(torn[:HALF_BYTES])
                file.flush()
                writer.close()
                writer = DoubleBufferedPage.ensure(MEMORY, path)
        fresh = DoubleBufferedPage.open(MEMORY, path)
        assert reader.read() == fresh.read() == writer.read() == last
        if dies_at is None:
            assert reader.read() is reader.read()
        fresh.close()
    reader.close()
    writer.close()


def test_another_size_is_no_page(tmp_path: Path) -> None:
    (tmp_path / "page").write_bytes(bytes(2 * HALF_BYTES + 1))
    with pytest.raises(ValueError, match=f"expected a page of {2 * HALF_BYTES} bytes, found"):
        DoubleBufferedPage.open(MEMORY, tmp_path / "page")
