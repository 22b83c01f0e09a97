"""Credentials and epochs: what a token opens, and that epochs of a user only ever grow."""

import asyncio

import psycopg
from job_stores import new_user

from common.ids import MachineId, UserId, new_id
from common.store.tokens import API_KEY_PREFIX, MACHINE_TOKEN_PREFIX, Held, Tokens, hash_of
from towline.wire.frames import Hints, Tool


async def test_a_machine_token_mints_growing_epochs_for_its_user(tokens: Tokens, user: UserId) -> None:
    """Twenty handshakes at once: twenty different epochs, and none below the time."""
    row, value = await tokens.add_machine_token(user, "laptop", None)
    minted = await asyncio.gather(*(tokens.mint_session(value) for _ in range(20)))
    epochs = [one.epoch for one in minted if one]
    assert len(set(epochs)) == 20
    assert min(epochs) >= row.created_ms - 1000
    assert {(one.user, one.token_id) for one in minted if one} == {(user, row.token_id)}
    last = await tokens.mint_session(value)
    assert last is not None
    assert last.epoch > max(epochs)


async def test_epochs_grow_though_the_clock_was_set_back(tokens: Tokens, user: UserId, postgres_url: str) -> None:
    """`greatest(last + 1, time)`: also for a second token of the user."""
    ahead = 4_000_000_000_000
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
        await connection.execute("insert into session_epochs values (%s, %s)", [user, ahead])
    for number in (1, 2):
        _, value = await tokens.add_machine_token(user, "laptop", None)
        minted = await tokens.mint_session(value)
        assert minted is not None
        assert minted.epoch == ahead + number


async def test_a_token_that_is_not_good_mints_nothing(tokens: Tokens, user: UserId, postgres_url: str) -> None:
    """Unknown, revoked or expired; the user's epoch does not move."""
    row, revoked = await tokens.add_machine_token(user, "laptop", None)
    _, expired = await tokens.add_machine_token(user, "laptop", 0)
    assert await tokens.revoke_machine_token(user, row.token_id)
    for value in ("", "x", revoked, expired, revoked + "x", "ü" * 100):
        assert await tokens.mint_session(value) is None
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
        cursor = await connection.execute("select from session_epochs where user_id = %s", [user])
        assert await cursor.fetchall() == []


async def test_which_tokens_are_still_good(tokens: Tokens, user: UserId) -> None:
    """Asked for many at each heartbeat."""
    made = [await tokens.add_machine_token(user, "laptop", ttl_s) for ttl_s in (None, 3600, 0)]
    held = [Held(row.token_id, hash_of(value)) for row, value in made]
    assert await tokens.still_valid([*held, Held(new_id(), b"x")]) == dict.fromkeys(held[:2], False)
    assert not await tokens.revoke_machine_token(new_user(), held[0].token_id)  # another user cannot
    assert await tokens.still_valid(held) == dict.fromkeys(held[:2], False)
    assert await tokens.revoke_machine_token(user, held[0].token_id)
    assert await tokens.revoke_machine_token(user, held[0].token_id)  # twice is fine
    assert await tokens.still_valid(held) == {held[1]: False}
    assert await tokens.still_valid([]) == {}


async def test_values_are_not_stored(tokens: Tokens, user: UserId, postgres_url: str) -> None:
    """Only their hash; and each has a prefix that leak scanners know."""
    _, token = await tokens.add_machine_token(user, "laptop", None)
    made = await tokens.add_api_key("backend", ["jobs"], [user])
    assert made is not None
    assert token.startswith(MACHINE_TOKEN_PREFIX)
    assert made[1].startswith(API_KEY_PREFIX)
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
        for table in ("machine_tokens", "machine_token_values", "api_keys"):
            cursor = await connection.execute(f"select t::text from {table} t")
            text = str(await cursor.fetchall())
            assert token[5:20] not in text
            assert made[1][5:20] not in text


async def test_an_api_key_reaches_its_users_until_it_is_revoked(tokens: Tokens, user: UserId) -> None:
    """None for every user is another thing than no user."""
    made = [await tokens.add_api_key("k", ["jobs", "admin"], users) for users in ([user], None, [])]
    found = [await tokens.find_api_key(one[1]) for one in made if one]
    assert [(key.reaches(user), key.reaches("other")) for key in found if key] == [
        (True, False),
        (True, True),
        (False, False),
    ]
    assert found[0] is not None
    assert found[0].scopes == {"jobs", "admin"}
    assert made[0] is not None
    assert await tokens.revoke_api_key(made[0][0].key_id)
    assert await tokens.find_api_key(made[0][1]) is None
    assert not await tokens.revoke_api_key(new_id())
    # There is a usable key: bootstrapping is over.
    assert await tokens.add_api_key("k", ["admin"], None, first_only=True) is None


async def test_lists_are_paged_newest_first(tokens: Tokens, user: UserId) -> None:
    """By id, which sorts by time."""
    rows = [(await tokens.add_machine_token(user, f"t{n}", None))[0] for n in range(4)]
    first = await tokens.list_machine_tokens(user, before=None, limit=3)
    rest = await tokens.list_machine_tokens(user, before=first[-1].token_id, limit=3)
    assert [row.name for row in (*first, *rest)] == ["t3", "t2", "t1", "t0"]
    assert rest[-1] == rows[0]


async def test_the_catalogue_is_that_of_the_machine_with_the_newest_session(tokens: Tokens, user: UserId) -> None:
    """Whatever the order in which the writes arrive; every JSON text fits, U+0000 in a description too."""
    tool = Tool("echo", "says \x00 it again", {"type": "object"}, Hints(read_only=True))
    for machine, epoch in (("desktop", 7), ("laptop", 9), ("desktop", 8)):
        await tokens.see_machine(
            user, MachineId(machine), name=machine, version="1", tools=[tool] if epoch == 9 else [], epoch=epoch
        )
    catalogue = await tokens.catalogue(user)
    assert catalogue is not None
    assert (catalogue.machine, catalogue.name) == ("laptop", "laptop")
    assert '"name":"echo"' in catalogue.tools
    assert '"read_only":true' in catalogue.tools
    assert await tokens.catalogue(new_user()) is None
