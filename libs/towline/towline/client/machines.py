"""Machines: is a user's connected, with which tools, and the tokens that their sidecars present."""

from collections.abc import AsyncIterator

from towline.client.calls import Calls, in_path
from towline.wire.api import Catalogue, MachineToken, MachineTokenCreate, MintedMachineToken, Page, Presence


class MachineCalls(Calls):
    """The calls about machines and their tokens; see `towline.client.Client`."""

    async def presence(self, user: str, *, probe: bool = False) -> Presence:
        """Say whether the user's machine is connected; `probe` asks the machine itself (`probed`, `rtt_ms`)."""
        params = {"probe": "true"} if probe else {}
        return await self._call(Presence, "GET", f"/v1/users/{in_path(user, 'user')}/presence", params=params)

    async def tools(self, user: str) -> Catalogue:
        """Read the catalogue that the user's machine announced."""
        return await self._call(Catalogue, "GET", f"/v1/users/{in_path(user, 'user')}/tools")

    async def mint_machine_token(self, user: str, *, name: str = "", ttl_s: float | None = None) -> MintedMachineToken:
        """Make a token for the user's sidecar; its value is in this answer only. Never repeated by itself."""
        path = f"/v1/users/{in_path(user, 'user')}/machine-tokens"
        return await self._call(MintedMachineToken, "POST", path, body=MachineTokenCreate(name, ttl_s))

    async def list_machine_tokens(self, user: str, *, limit: int | None = None) -> AsyncIterator[MachineToken]:
        """Go through a user's machine tokens, newest first, revoked ones included; at most `limit` of them."""
        path = f"/v1/users/{in_path(user, 'user')}/machine-tokens"
        async for token in self._list(Page[MachineToken], path, {}, limit):
            yield token

    async def revoke_machine_token(self, user: str, token_id: str) -> None:
        """End a token; the socket that it opened is closed within a heartbeat."""
        await self._transport.request(
            "DELETE", f"/v1/users/{in_path(user, 'user')}/machine-tokens/{in_path(token_id, 'token')}"
        )
