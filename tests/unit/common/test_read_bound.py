"""How many entries a blocking read asks for: by what they weigh, and by how many streams may have them."""

from common.store.read_bound import ENTRIES_MAX, READ_BYTES, ReadBound


def stream(entries: int, size: int) -> list[tuple[str, dict[bytes, bytes]]]:
    return [("1-1", {b"data": b"x" * size})] * entries


def test_one_stream_of_small_entries_is_read_in_large_pieces() -> None:
    bound = ReadBound()
    for _ in range(20):
        bound.learn([stream(bound.count(1), 100)])
    assert bound.count(1) == ENTRIES_MAX


def test_what_all_streams_together_may_bring_is_bounded() -> None:
    bound = ReadBound()
    bound.count(20)
    bound.learn([stream(1, 100_000)])
    assert bound.count(20) * 20 * 100_000 <= READ_BYTES
    assert bound.count(1000) == 1  # there is no smaller read


def test_one_busy_stream_among_many_quiet_ones_is_soon_read_in_large_pieces_and_only_it() -> None:
    bound = ReadBound()
    first = bound.count(1000)
    asked = first
    for _ in range(12):
        asked = bound.count(1000)
        bound.learn([stream(asked, 100)])
    assert asked == ENTRIES_MAX
    bound.learn([stream(1, 100)])  # it was read to its end: now anyone may have more
    assert bound.count(1000) <= 4 * first


def test_many_busy_streams_are_not() -> None:
    bound = ReadBound()
    for _ in range(50):
        asked = bound.count(100)
        bound.learn([stream(asked, 2000)] * 100)
        assert asked * 100 * 3000 <= 2 * READ_BYTES


def test_a_read_that_brought_nothing_changes_nothing() -> None:
    bound = ReadBound()
    before = bound.count(10)
    bound.learn([])
    assert bound.count(10) == before
