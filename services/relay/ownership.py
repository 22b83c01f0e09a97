"""Which runs this relay takes, and which it gives away: a plan over what every relay can see. PURE.

Promises: from one view all relays make plans that fit together: shares end within one of each other, a run moves only
          if its holder has more than its share, and a free run is tried by one relay first.
Used by:  relay.scan, several times a second. The lease decides who has a run; this only keeps relays out of each
          other's way, so two that see different things cost a refused take and nothing else.

A free run belongs to the relay that scores highest for it (rendezvous hashing) among those with room. Whoever is next
tries PATIENCE_S later, in case the first one cannot. Nothing is given away while the membership still changes: a
rolling deploy would make every run move with every pod.
"""

import hashlib
from collections.abc import Collection, Mapping, Set
from typing import NamedTuple

from common.ids import RelayId, RunId

# A relay that has not taken what is free for this long has had two looks at it; the next one in order may.
PATIENCE_S = 1.5
# Members must have been the same for this long before runs are given away to them: longer than one that died is listed.
SETTLED_AFTER_S = 5.0
# Given away in one pass: each costs its upstream a reconnect, and its readers a moment; the rest follows in the next.
SHED_MAX = 25


class Plan(NamedTuple):
    """What to do now; both in the order in which to do it."""

    take: list[RunId]
    shed: list[RunId]


def plan_shares(
    me: RelayId,
    members: Set[RelayId],
    *,
    held: Collection[RunId],
    owners: Mapping[RunId, RelayId | None],
    free_for_s: Mapping[RunId, float],
    members_same_for_s: float,
) -> Plan:
    """Plan one pass of one relay.

    Args:
        members: the relays alive; `me` counts whether it is listed or not.
        held: the runs of `me`.
        owners: every other run that should be followed, and whose lease it is; None when it is free.
        free_for_s: since when this relay has seen those without an owner; absent: just now.
    """
    relays = sorted(members | {me})
    counts = dict.fromkeys(relays, 0)
    counts[me] = len(held)
    free = []
    for run, owner in owners.items():
        if owner is None:
            free.append(run)
        elif owner in counts:
            counts[owner] += 1
    shares = plan_quotas(counts, len(held) + len(owners))
    room = {relay: shares[relay] - counts[relay] for relay in relays}
    take = []
    for run in sorted(free):
        order = sorted(relays, key=lambda relay: score(relay, run), reverse=True)
        first = next((relay for relay in order if room[relay] > 0), order[0])
        room[first] -= 1
        order.remove(first)
        turn = 0 if first == me else 1 + order.index(me)
        if free_for_s.get(run, 0.0) >= turn * PATIENCE_S:
            take.append(run)
    surplus = counts[me] - shares[me]
    if surplus <= 0 or members_same_for_s < SETTLED_AFTER_S:
        return Plan(take, [])
    return Plan(take, sorted(held, key=lambda run: score(me, run))[: min(surplus, SHED_MAX)])


def plan_quotas(counts: Mapping[RelayId, int], runs: int) -> dict[RelayId, int]:
    """How many of `runs` each relay should have: all the same or one more, the one more to those that have most."""
    base, extra = divmod(runs, len(counts))
    by_holding = sorted(counts, key=lambda relay: (-counts[relay], relay))
    return {relay: base + (position < extra) for position, relay in enumerate(by_holding)}


def score(relay: RelayId, run: RunId) -> bytes:
    """How well a run suits a relay: an order of all relays that is the same everywhere and different for each run."""
    return hashlib.blake2b(f"{relay}\n{run}".encode(), digest_size=8).digest()
