"""Users' sidecars as processes of this machine, for an installation that runs here or elsewhere, and their credentials.

Owns:     their logs, pid files and journals in one directory.
Used by:  `harness.stack`, and the drills of an installation that runs elsewhere.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.ids import UserId
from common.store.postgres import open_postgres
from common.store.tokens import Tokens
from harness.runner import Process
from towline.wire.api import SCOPES

CONNECTED_WITHIN_S = 30.0


async def mint_api_key(postgres_url: str) -> tuple[str, str]:
    """Make an API key with every scope, for every user; returns its id and its value. Raises: StoreUnavailable."""
    async with open_postgres(postgres_url) as postgres:
        minted = await Tokens(postgres).add_api_key("harness", SCOPES, None)
    assert minted is not None, "only a first key may be refused"
    return minted[0].key_id, minted[1]


async def mint_machine_token(postgres_url: str, user: str) -> str:
    """Make a machine token for a user, as `towline tokens` does. Raises: StoreUnavailable."""
    async with open_postgres(postgres_url) as postgres:
        _, value = await Tokens(postgres).add_machine_token(UserId(user), "harness", None)
    return value


class Sidecar(Process):
    """A user's sidecar; its journal outlives its restarts."""

    async def start_connected(self, *, within_s: float = CONNECTED_WITHIN_S) -> None:
        """Start it and wait until a worker has welcomed it. Raises: ProcessFailed."""

        async def is_connected() -> bool:
            return '"event":"connected"' in self.read_log().replace(" ", "")

        await self.start()
        await self.wait_ready(is_connected, within_s=within_s)


class Sidecars:
    """All sidecars of one installation. Any number of them may be added at the same time.

    Attributes:
        added: in the order they were added, those that are not running included.
    """

    def __init__(self, directory: Path, *, postgres_url: str, env: Mapping[str, str]) -> None:
        """Describe them.

        Args:
            directory: takes logs, pid files and journals.
            postgres_url: where their tokens are made.
            env: of all of them, without what configures the product.
        """
        self.added: list[Sidecar] = []
        self._directory = directory
        self._postgres_url = postgres_url
        self._env = dict(env)

    async def add(
        self,
        user: str,
        bridge_url: str,
        *,
        tools: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        connected: bool = True,
    ) -> Sidecar:
        """Start a sidecar for a user and, if `connected`, wait until a worker has welcomed it.

        Args:
            user: gets a machine token of its own with each sidecar.
            bridge_url: what it dials.
            tools: modules or files for `--tools`.
            env: further variables.
        """
        token = await mint_machine_token(self._postgres_url, user)
        name = f"sidecar-{len(self.added) + 1}"
        state = self._directory / name
        state.mkdir(mode=0o700, exist_ok=True)
        sidecar_env = {
            **self._env,
            "TOWLINE_BRIDGE_URL": bridge_url,
            "TOWLINE_TOKEN": token,
            "TOWLINE_STATE_DIR": str(state),
            # Drills and the soak read deliveries and starts out of the log, and those are told at debug only.
            "TOWLINE_LOG_LEVEL": "debug",
            **(env or {}),
        }
        argv = [sys.executable, "-m", "towline.cli", "sidecar", "run", "--name", name, "--log-format", "json"]
        argv += [word for module in tools for word in ("--tools", module)]
        sidecar = Sidecar(name, argv, directory=self._directory, env=sidecar_env)
        self.added.append(sidecar)
        if connected:
            await sidecar.start_connected()
        else:
            await sidecar.start()
        return sidecar

    async def stop(self) -> None:
        """End those that run, the last added first."""
        for sidecar in reversed(self.added):
            await sidecar.stop()
