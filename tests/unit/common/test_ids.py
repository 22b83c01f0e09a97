"""Ids of ours: unique, sorted by time, and recognised in one form only."""

import pytest

from common.ids import is_uuid, new_id, process_name

ID = "01a2296d-eb11-73b1-bd02-58d2eb233670"


def test_new_ids_are_unique_and_sort_by_the_time_they_were_minted() -> None:
    """Also those of one millisecond: lists page by id."""
    ids = [new_id() for _ in range(10_000)]
    assert ids == sorted(set(ids))
    assert all(map(is_uuid, ids))
    assert {id_[14] for id_ in ids} == {"7"}


@pytest.mark.parametrize(
    "change",
    [str.upper, lambda id_: id_.replace("-", ""), lambda id_: f"{{{id_}}}", lambda id_: f"urn:uuid:{id_}"],
    ids=["upper", "plain", "braces", "urn"],
)
def test_other_spellings_of_an_id_are_refused(change) -> None:  # type: ignore[no-untyped-def]
    """One job has one name: it is a key in Redis and in dictionaries."""
    assert not is_uuid(change(new_id()))


@pytest.mark.parametrize("text", ["", "x", "\x00", "ä" * 36, f"{ID}0", f"{ID}\n", f" {ID}"])
def test_what_is_no_id_is_refused(text: str) -> None:
    """Whatever a machine says, it is only ever true or false."""
    assert not is_uuid(text)


def test_two_processes_of_one_host_have_different_names() -> None:
    """Streams are named after processes, and never reused."""
    assert process_name() != process_name()
