"""Names of behaviours: what they mean, and that an unknown one is no behaviour."""

import pytest

from harness.model.behaviour import Behaviour, UnknownBehaviour, answer_words, parse_behaviour


@pytest.mark.parametrize(
    ("name", "behaviour"),
    [
        ("fast", Behaviour()),
        ("slow-0.5", Behaviour(slow_s=0.5)),
        ("think-2", Behaviour(think_s=2)),
        ("tools-2+slow-5", Behaviour(tools=2, slow_s=5)),
        ("parallel-3", Behaviour(tools=3, at_once=True)),
        ("odd", Behaviour(is_odd=True)),
        ("fail-400", Behaviour(fault="fail", status=400)),
        ("fail-500-2", Behaviour(fault="fail", status=500, times=2)),
        ("hang", Behaviour(fault="hang")),
        ("cut-1", Behaviour(fault="cut", times=1)),
        ("malformed-3", Behaviour(fault="malformed", times=3)),
    ],
)
def test_a_name_is_read(name: str, behaviour: Behaviour) -> None:
    assert parse_behaviour(name) == behaviour


@pytest.mark.parametrize("name", ["", "gpt-5", "slow", "fail", "fail-5", "cut-", "fast+nothing", "slow-1-2"])
def test_another_name_is_refused(name: str) -> None:
    with pytest.raises(UnknownBehaviour):
        parse_behaviour(name)


def test_a_fault_with_a_count_passes() -> None:
    behaviour = parse_behaviour("fail-500-2")
    assert [behaviour.fault_of(number) for number in (1, 2, 3)] == ["fail", "fail", None]
    assert parse_behaviour("hang").fault_of(1000) == "hang"


def test_the_pieces_of_an_answer_are_the_answer() -> None:
    pieces = answer_words(parse_behaviour("slow-0.3"), "You said:  a\n b")
    assert "".join(pieces) == "You said:  a\n b 1 2 3"
    assert pieces == ["You ", "said:  ", "a\n ", "b ", "1 ", "2 ", "3"]
