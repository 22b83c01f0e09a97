"""The stack: an installation of its own on given stores, with credentials that work."""

import asyncio
from pathlib import Path

import pytest

from common.store.postgres import open_postgres
from common.store.tokens import Tokens
from harness.runner import DirectoryBusy
from harness.stack import Stack, inherited_environment
from towline.wire.api import SCOPES


async def test_stack_makes_credentials_that_the_stores_know(
    state_directory: Path, postgres_url: str, redis_url: str
) -> None:
    """An API key for everything, and a machine token for the one user it was made for."""
    async with (
        Stack(state_directory / "stack", postgres_url=postgres_url, redis_url=redis_url) as stack,
        open_postgres(postgres_url) as postgres,
    ):
        key = await Tokens(postgres).find_api_key(stack.api_key)
        assert key is not None
        assert (key.scopes, key.users) == (frozenset(SCOPES), None)
        session = await Tokens(postgres).mint_session(await stack.mint_machine_token("ada"))
        assert session is not None
        assert session.user == "ada"


async def test_stack_leaves_no_port_and_no_lock_behind(
    state_directory: Path, postgres_url: str, redis_url: str
) -> None:
    """Its directory serves one stack at a time, and the next one after it."""
    for _ in range(2):
        async with Stack(state_directory / "again", postgres_url=postgres_url, redis_url=redis_url) as stack:
            port = int(stack.bridge_url.rpartition(":")[2])
            with pytest.raises(DirectoryBusy):
                async with Stack(state_directory / "again", postgres_url=postgres_url, redis_url=redis_url):
                    pass
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)


def test_settings_of_the_shell_do_not_reach_the_services(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who develops against a cluster has these set; a test must not run on them."""
    for name in ("TOWLINE_IDEMPOTENCY", "REDIS_URL", "DATABASE_URL"):
        monkeypatch.setenv(name, "elsewhere")
    environment = inherited_environment()
    assert "elsewhere" not in environment.values()
    assert "PATH" in environment


async def test_keys_of_an_installation_outlive_it(state_directory: Path, postgres_url: str, redis_url: str) -> None:
    """What one start has encrypted, the next one can read; another installation cannot."""
    directories = [state_directory / name for name in ("one", "one", "two")]
    keys = []
    for directory in directories:
        async with Stack(directory, postgres_url=postgres_url, redis_url=redis_url):
            keys.append((directory / "keys.json").read_text())
            assert (directory / "keys.json").stat().st_mode & 0o077 == 0
    assert keys[0] == keys[1] != keys[2]
