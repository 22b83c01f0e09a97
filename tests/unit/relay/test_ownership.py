"""The ownership plan: relays that see the same agree, end with even shares, and move no run that need not move."""

import random

from hypothesis import given
from hypothesis import strategies as st

from common.ids import RelayId, RunId
from relay.ownership import PATIENCE_S, SETTLED_AFTER_S, SHED_MAX, Plan, plan_quotas, plan_shares

Holding = dict[RunId, RelayId | None]


def relays(number: int) -> list[RelayId]:
    return [RelayId(f"relay-{n}") for n in range(number)]


def runs(number: int) -> list[RunId]:
    return [RunId(f"run-{n}") for n in range(number)]


def plan(
    me: RelayId,
    members: list[RelayId],
    owners: Holding,
    *,
    free_for_s: float = 0.0,
    same_for_s: float = SETTLED_AFTER_S,
) -> Plan:
    held = [run for run, owner in owners.items() if owner == me]
    return plan_shares(
        me,
        set(members),
        held=held,
        owners={run: owner for run, owner in owners.items() if owner != me},
        free_for_s=dict.fromkeys(owners, free_for_s),
        members_same_for_s=same_for_s,
    )


def pass_once(members: list[RelayId], owners: Holding) -> tuple[Holding, int, int]:
    """Every relay plans on the same view, then all act; returns what holds, the takes and the sheds."""
    after = dict(owners)
    takes = sheds = 0
    for me in members:
        planned = plan(me, members, owners)
        for run in planned.take:
            assert owners[run] is None
            assert after[run] is None, "two relays tried one free run"
            after[run] = me
            takes += 1
        for run in planned.shed:
            assert owners[run] == me
            after[run] = None
            sheds += 1
    return after, takes, sheds


def shares(members: list[RelayId], owners: Holding) -> list[int]:
    held = list(owners.values())
    return [held.count(member) for member in members]


@given(
    st.integers(1, 7).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.one_of(st.none(), st.integers(0, n)), max_size=150))
    )
)
def test_from_any_holding_shares_become_even_and_then_nothing_moves(case: tuple[int, list[int | None]]) -> None:
    """Owner number n is no member (it died): its runs count as taken until their leases lapse, which is now."""
    number, holders = case
    members = relays(number)
    owners: Holding = {
        run: None if holder is None or holder == number else members[holder]
        for run, holder in zip(runs(len(holders)), holders, strict=True)
    }
    before = shares(members, owners)
    quota = plan_quotas(dict(zip(members, before, strict=True)), len(owners))
    surplus = sum(max(0, have - quota[member]) for member, have in zip(members, before, strict=True))
    moved = 0
    for _ in range(3 + surplus // SHED_MAX * 2):
        owners, _, sheds = pass_once(members, owners)
        moved += sheds
    assert None not in owners.values()
    assert max(shares(members, owners)) - min(shares(members, owners)) <= 1
    assert moved == surplus, "exactly those above the share of their holder move"
    assert pass_once(members, owners) == (owners, 0, 0)


@given(st.integers(2, 6), st.integers(0, 120))
def test_a_relay_that_comes_or_goes_moves_no_run_between_the_others(number: int, count: int) -> None:
    """Scale up: runs move to the new relay only. Scale down: only the runs of the one that left move."""
    members = relays(number)
    owners: Holding = dict.fromkeys(runs(count))
    owners, _, _ = pass_once(members, owners)
    grown = [*members, RelayId("newcomer")]
    after = owners
    for _ in range(2 + count // SHED_MAX * 2):
        after, _, _ = pass_once(grown, after)
    assert {after[run] for run in owners if after[run] != owners[run]} <= {RelayId("newcomer")}
    gone = grown.pop(0)
    freed: Holding = {run: None if owner == gone else owner for run, owner in after.items()}
    settled, _, sheds = pass_once(grown, freed)
    assert sheds == 0
    assert all(settled[run] == freed[run] for run in freed if freed[run] is not None)
    assert max(shares(grown, settled)) - min(shares(grown, settled)) <= 1


def test_at_start_every_free_run_is_tried_by_one_relay() -> None:
    members = relays(3)
    _, takes, _ = pass_once(members, dict.fromkeys(runs(300)))
    assert takes == 300


def test_a_run_that_its_first_relay_does_not_take_is_tried_by_one_more_after_each_patience() -> None:
    members = relays(4)
    owners: Holding = {RunId("run-0"): None}
    for tried in range(4):
        takers = [me for me in members if plan(me, members, owners, free_for_s=tried * PATIENCE_S).take]
        assert len(takers) == tried + 1


def test_nothing_is_given_away_while_relays_come_and_go() -> None:
    old, new = relays(2)
    owners: Holding = dict.fromkeys(runs(10), old)
    assert plan(old, [old, new], owners, same_for_s=SETTLED_AFTER_S - 0.1).shed == []
    assert len(plan(old, [old, new], owners).shed) == 5


def test_a_run_of_a_relay_that_is_gone_is_left_alone_until_its_lease_lapses() -> None:
    me, gone = relays(2)
    assert plan(me, [me], {RunId("run-0"): gone}) == Plan([], [])


def test_few_are_given_away_at_a_time() -> None:
    old, new = relays(2)
    assert len(plan(old, [old, new], dict.fromkeys(runs(500), old)).shed) == SHED_MAX


def test_a_relay_plans_for_itself_before_it_is_listed() -> None:
    """Its own entry in Redis may have lapsed or been flushed: it must not divide by nobody."""
    (me,) = relays(1)
    assert plan(me, [], {RunId("run-0"): None}).take == [RunId("run-0")]


def test_the_plan_does_not_depend_on_the_order_in_which_runs_are_listed() -> None:
    members = relays(3)
    listed = runs(50)
    shuffled = random.Random(7).sample(listed, len(listed))
    for me in members:
        assert plan(me, members, dict.fromkeys(listed)) == plan(me, members, dict.fromkeys(shuffled))
