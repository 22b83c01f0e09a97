"""The values of a machine token: none that was given away is taken back before its end, and a lost one is made good."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest
from token_ages import grow_old

from common.ids import UserId
from common.store.postgres import open_postgres
from common.store.tokens import OTHER_VALUES_MAX, Held, Tokens, hash_of
from harness.faults import TcpProxy

LIFE_S = 1000.0
LAST_FIFTH_S = 0.85 * LIFE_S  # of its life gone: it is due


class Life:
    """One token, and the connection that looks behind the store's back."""

    def __init__(self, tokens: Tokens, url: str, token_id: str, first: str) -> None:
        self.tokens = tokens
        self.url = url
        self.token_id = token_id
        self.first = first

    def held(self, value: str) -> Held:
        """What a session whose machine has this value says."""
        return Held(self.token_id, hash_of(value))

    async def is_due(self, value: str) -> bool:
        """Whether a session that holds it would have it renewed."""
        return (await self.tokens.still_valid([self.held(value)]))[self.held(value)]

    async def renew(self, value: str) -> str:
        """Another value for such a session."""
        new = await self.tokens.renew_machine_token(self.held(value))
        assert new is not None
        return new

    async def opens(self, value: str) -> bool:
        """Whether a machine with this value is let in."""
        minted = await self.tokens.mint_session(value)
        assert minted is None or minted[2:] == self.held(value)
        return minted is not None

    async def grow_old(self, seconds: float) -> None:
        """Let time pass."""
        await grow_old(self.url, self.token_id, seconds)

    async def rows(self, query: str, *params: Any) -> list[Any]:
        """Ask the database."""
        async with await psycopg.AsyncConnection.connect(self.url, autocommit=True) as connection:
            cursor = await connection.execute(query, params)
            return await cursor.fetchall() if cursor.description else []


@pytest.fixture
async def life(tokens: Tokens, user: UserId, postgres_url: str) -> Life:
    """A token with a life that has just begun."""
    row, value = await tokens.add_machine_token(user, "laptop", LIFE_S)
    return Life(tokens, postgres_url, row.token_id, value)


async def test_a_machine_that_comes_with_its_old_value_is_offered_another(life: Life) -> None:
    """Until it comes with a newer one; all that were offered are good, whichever it got."""
    assert not await life.is_due(life.first)
    assert await life.tokens.renew_machine_token(life.held(life.first)) is None
    await life.grow_old(LAST_FIFTH_S)
    offered = []
    for _ in range(3):
        assert await life.opens(life.first)
        assert await life.is_due(life.first)
        offered.append(await life.renew(life.first))
        await life.grow_old(10)
    for value in (life.first, *offered):
        assert await life.opens(value)
    assert [await life.is_due(value) for value in (life.first, *offered)] == [True, False, False, False]
    # The first one ends when it always would have, and not the token: a session that was not told yet is offered one.
    await life.grow_old(LIFE_S - LAST_FIFTH_S - 30)
    assert [await life.opens(value) for value in (life.first, *offered)] == [False, True, True, True]
    assert await life.is_due(life.first)
    assert await life.opens(await life.renew(life.first))


async def test_what_has_ended_goes_with_the_next_renewal(life: Life) -> None:
    """Life after life, a token has a handful of values."""
    value = life.first
    for _ in range(12):
        await life.grow_old(LAST_FIFTH_S)
        assert await life.opens(value)
        value = await life.renew(value)
    assert await life.rows("select count(*) from machine_token_values where token_id = %s", life.token_id) == [(2,)]


async def test_lost_offers_are_bounded_and_take_away_nothing_that_is_in_use(life: Life) -> None:
    """A machine whose every offer is lost, and beside it one that was lucky: both keep what they have."""
    await life.grow_old(LAST_FIFTH_S)
    lucky = await life.renew(life.first)
    assert await life.opens(lucky)
    for _ in range(2 * OTHER_VALUES_MAX):
        assert await life.opens(life.first)
        newest = await life.renew(life.first)
    for value in (life.first, lucky, newest):
        assert await life.opens(value)
    ((kept,),) = await life.rows("select count(*) from machine_token_values where token_id = %s", life.token_id)
    assert kept == OTHER_VALUES_MAX + 2


async def test_sessions_and_workers_at_once_take_nothing_from_each_other(life: Life) -> None:
    """Ten renewals at the same moment, for the same value and for two different ones."""
    await life.grow_old(LAST_FIFTH_S)
    second = await life.renew(life.first)
    await life.rows(
        "update machine_token_values set expires_at = now() + interval '100 s' where token_id = %s", life.token_id
    )
    offered = await asyncio.gather(*(life.renew(value) for value in [life.first, second] * 5))
    assert len(set(offered)) == 10
    for value in (life.first, second, *offered):
        assert await life.opens(value)


async def test_revocation_ends_all_values(life: Life, user: UserId) -> None:
    """At once, and nothing is offered any more."""
    await life.grow_old(LAST_FIFTH_S)
    offered = [await life.renew(life.first) for _ in range(3)]
    assert await life.tokens.revoke_machine_token(user, life.token_id)
    for value in (life.first, *offered):
        assert not await life.opens(value)
        assert await life.tokens.renew_machine_token(life.held(value)) is None
        assert await life.tokens.still_valid([life.held(value)]) == {}


async def test_a_session_whose_value_was_removed_is_offered_another(life: Life) -> None:
    """It has ended, or there were too many; the token is good, and so is the session."""
    await life.rows("delete from machine_token_values where token_id = %s", life.token_id)
    assert await life.is_due(life.first)
    assert await life.opens(await life.renew(life.first))


# ---- answers that are lost


@pytest.fixture
async def lossy(postgres_url: str) -> AsyncIterator[tuple[Tokens, TcpProxy]]:
    """The store behind a link that can be cut."""
    proxy = TcpProxy(postgres_url)
    await proxy.start()
    try:
        async with open_postgres(proxy.url) as postgres:
            yield Tokens(postgres), proxy
    finally:
        await proxy.stop()


async def test_a_renewal_whose_answer_is_lost_is_found(life: Life, lossy: tuple[Tokens, TcpProxy]) -> None:
    """It is repeated by itself, and its value is good."""
    tokens, proxy = lossy
    await life.grow_old(LAST_FIFTH_S)
    cut = proxy.cut_after(b"update machine_tokens")
    value = await tokens.renew_machine_token(life.held(life.first))
    assert cut.happened.is_set()
    assert value is not None
    assert await life.opens(value)
    assert await life.opens(life.first)


async def test_a_token_whose_answer_is_lost_is_made_once(lossy: tuple[Tokens, TcpProxy], user: UserId) -> None:
    """No error, and no second token that nobody has the value of."""
    tokens, proxy = lossy
    cut = proxy.cut_after(b"insert into machine_tokens")
    row, value = await tokens.add_machine_token(user, "laptop", None)
    assert cut.happened.is_set()
    assert await tokens.list_machine_tokens(user, before=None, limit=9) == [row]
    minted = await tokens.mint_session(value)
    assert minted is not None
    assert minted.token_id == row.token_id


async def test_an_api_key_whose_answer_is_lost_is_made_once(
    lossy: tuple[Tokens, TcpProxy],
) -> None:
    """The first of all, too: it is not taken for the key of somebody who came before."""
    tokens, proxy = lossy
    for key in await tokens.list_api_keys(before=None, limit=99):
        await tokens.revoke_api_key(key.key_id)
    for first_only in (True, False):
        cut = proxy.cut_after(b"insert into api_keys")
        made = await tokens.add_api_key("backend", ["admin"], None, first_only=first_only)
        assert cut.happened.is_set()
        assert made is not None
        found = await tokens.find_api_key(made[1])
        assert found is not None
        assert found.key_id == made[0].key_id
    keys = await tokens.list_api_keys(before=None, limit=99)
    assert [key.revoked_ms is None for key in keys].count(True) == 2
