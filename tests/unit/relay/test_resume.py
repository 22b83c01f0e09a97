"""Where a source goes on after a break: nothing twice, nothing lost that the upstream still has, doubts are said."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.resume import HELD_ITEMS_MAX, KNOWN_IDS_MAX, Passed, Resume, is_sendable
from towline.wire.sse import Event, Oversized

TERMINAL = frozenset({"result"})


def events(*numbers: int, ids: bool = True) -> list[Event]:
    return [Event("output", str(n).encode(), id=str(n) if ids else None) for n in numbers]


def resume(mode: str, uid: str = "", count: int = 0, *, first: bool = False) -> Resume:
    return Resume(mode, TERMINAL, uid=uid, count=count, is_first=first)  # type: ignore[arg-type]


# ---- ids


def test_ids_asks_for_what_follows_the_last_id() -> None:
    source = resume("ids", first=True)
    assert (source.last_event_id, source.open()) == ("", False)
    source.accept(events(1, 2, 3))
    assert (source.last_event_id, source.open()) == ("3", False)
    assert (source.uid, source.count) == ("3", 3)


def test_ids_leaves_out_what_earlier_connections_brought_when_the_upstream_starts_anew() -> None:
    source = resume("ids", first=True)
    source.open()
    source.accept(events(1, 2, 3))
    source.open()
    assert source.accept(events(1, 2)).items == ()
    assert source.accept(events(3, 4)) == Passed(events(4))
    assert source.accept(events(5)) == Passed(events(5))
    assert source.count == 5


def test_ids_keeps_events_that_share_an_id_on_one_connection() -> None:
    """Some upstreams number messages, not events: only what an earlier connection brought is left out."""
    source = resume("ids", first=True)
    source.open()
    assert len(source.accept(events(1, 1, 1)).items) == 3


def test_ids_after_a_takeover_leaves_out_the_last_one_repeated() -> None:
    source = resume("ids", uid="7", count=7)
    assert (source.last_event_id, source.open()) == ("7", False)
    assert source.accept(events(7, 8)) == Passed(events(8))


def test_ids_of_an_upstream_that_sends_none_cannot_be_vouched_for() -> None:
    source = resume("ids", first=True)
    source.open()
    source.accept(events(1, ids=False))
    assert (source.last_event_id, source.open()) == ("", True)


@pytest.mark.parametrize("uid", ["a\x01b", " a", "a\n", "x" * 3000, "a\x7f"])
def test_an_id_that_no_header_can_carry_is_a_discontinuity(uid: str) -> None:
    assert not is_sendable(uid)
    source = resume("ids", uid=uid, count=1)
    assert (source.last_event_id, source.open()) == ("", True)


def test_what_is_remembered_is_bounded() -> None:
    source = resume("ids", first=True)
    source.open()
    for n in range(KNOWN_IDS_MAX + 10):
        source.accept(events(n))
    source.open()
    assert source.accept(events(5, 6)).items, "too long ago to be recognised"


# ---- replay


@pytest.mark.parametrize("ids", [True, False], ids=["ids", "no-ids"])
def test_replay_leaves_out_what_was_had(ids: bool) -> None:
    source = resume("replay", uid="3" if ids else "", count=3)
    assert (source.last_event_id, source.open()) == ("", False)
    assert source.accept(events(1, 2, ids=ids)).items == ()
    assert source.accept(events(3, 4, 5, ids=ids)) == Passed(events(4, 5, ids=ids))
    assert source.count == 5


def test_replay_whose_beginning_is_gone_still_finds_the_last_one_by_its_id() -> None:
    source = resume("replay", uid="100", count=100)
    source.open()
    assert source.accept(events(99, 100, 101)) == Passed(events(101))


def test_replay_that_lacks_the_last_id_is_a_gap_and_passes_everything() -> None:
    """The upstream has lost more than it kept: after as many events as were had, it will not show up any more."""
    source = resume("replay", uid="3", count=3)
    source.open()
    assert source.accept(events(10, 11)) == Passed(())
    assert source.is_holding
    assert source.accept(events(12, 13)) == Passed(events(10, 11, 12, 13), missing_after="3")
    assert not source.is_holding
    assert source.accept(events(14)) == Passed(events(14))
    assert source.count == 8


@pytest.mark.parametrize("ids", [True, False], ids=["ids", "no-ids"])
def test_replay_shorter_than_what_was_had_is_a_gap_once_it_is_quiet(ids: bool) -> None:
    source = resume("replay", uid="30" if ids else "", count=30)
    source.open()
    assert source.accept(events(1, 2, ids=ids)).items == ()
    assert source.settle() == Passed(events(1, 2, ids=ids), missing_after="30" if ids else "")


def test_a_terminal_event_inside_what_was_had_is_a_gap() -> None:
    """What was had last was no terminal event, so this one is new, and the run must end."""
    source = resume("replay", count=30)
    source.open()
    end = Event("result", b"{}")
    assert source.accept([*events(1, ids=False), end]) == Passed([*events(1, ids=False), end], missing_after="")


def test_a_replay_that_breaks_off_is_void() -> None:
    source = resume("replay", uid="3", count=3)
    source.open()
    source.accept(events(1, 2))
    source.open()
    assert source.accept(events(1, 2, 3, 4)) == Passed(events(4))


def test_what_a_replay_holds_back_is_bounded() -> None:
    source = resume("replay", uid="never", count=10**9)
    source.open()
    passed = source.accept(events(*range(HELD_ITEMS_MAX)))
    assert passed.missing_after == "never"
    source = resume("replay", uid="never", count=10**9)
    source.open()
    assert source.accept([Oversized("output", None, 9 * 1024 * 1024)]).missing_after == "never"


def test_the_first_replay_is_passed_whole() -> None:
    source = resume("replay", first=True)
    source.open()
    assert source.accept(events(1, 2)) == Passed(events(1, 2))


# ---- live


def test_live_says_at_every_open_after_the_first_that_something_may_be_lost() -> None:
    source = resume("live", first=True)
    assert (source.last_event_id, source.open()) == ("", False)
    assert source.accept(events(1, ids=False)) == Passed(events(1, ids=False))
    assert (source.last_event_id, source.open()) == ("", True)
    assert resume("live").open(), "another relay had it open before"


# ---- all cuts


@given(
    total=st.integers(1, 60),
    cuts=st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=6),
    mode=st.sampled_from(["ids", "replay"]),
    ids=st.booleans(),
    honours=st.booleans(),
    chunk=st.integers(1, 7),
)
def test_every_event_once_and_in_order_whatever_the_breaks(
    total: int, cuts: list[tuple[int, bool]], mode: str, ids: bool, honours: bool, chunk: int
) -> None:
    """An upstream that replays from its start, or honours Last-Event-ID, is cut anywhere; some cuts are takeovers."""
    ids = ids or mode == "ids"
    everything = events(*range(1, total + 1), ids=ids)
    source = resume(mode, first=True)
    had: list[Event | Oversized] = []
    for cut, takeover in [*cuts, (total, False)]:
        last_event_id = source.last_event_id
        source.open()
        start = int(last_event_id or 0) if honours or takeover else 0
        if mode == "ids" and takeover and not honours:
            start = int(last_event_id or 0)  # a takeover knows the last id alone: such an upstream is `replay`
        sent = everything[start : max(cut, start)] if cut < total else everything[start:]
        for position in range(0, len(sent), chunk):
            passed = source.accept(sent[position : position + chunk])
            assert passed.missing_after is None
            had += passed.items
        if takeover:
            source = resume(mode, uid=source.uid, count=source.count)
            if mode == "ids" and not honours:
                honours = True
    assert had == everything
