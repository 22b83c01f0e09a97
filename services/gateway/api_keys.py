"""API keys over HTTP: mint, list, revoke. The first one is made by `towline keys bootstrap`."""

import msgspec
import structlog

from common.ids import is_uuid
from common.store.tokens import KeyRow, Tokens
from gateway import paging, problems
from gateway.auth import Auth
from gateway.http import Answer
from gateway.request import Request
from towline.wire import api, json
from towline.wire.api import timestamp

logger = structlog.get_logger(__name__)


class ApiKeyRoutes:
    """The handlers of everything about API keys.

    All need the scope `admin`, of a key that is not bound to users: that one could mint a key that reaches everyone.
    """

    def __init__(self, *, auth: Auth, tokens: Tokens) -> None:
        self._auth = auth
        self._tokens = tokens

    async def mint(self, request: Request) -> Answer:
        """`POST /v1/api-keys`."""
        by = await self._auth.require_unbound(request, "admin")
        body = await request.read(api.ApiKeyCreate)
        added = await self._tokens.add_api_key(body.name, sorted(set(body.scopes)), body.users)
        assert added is not None, "only a first key may be refused"
        row, value = added
        logger.info("api_key_minted", key_id=row.key_id, by=by.key_id)
        return Answer(201, json.dumps(api.MintedApiKey(**msgspec.structs.asdict(_view(row)), api_key=value)))

    async def list_keys(self, request: Request) -> Answer:
        """`GET /v1/api-keys`."""
        await self._auth.require_unbound(request, "admin")
        size = paging.limit(request)
        rows = await self._tokens.list_api_keys(before=paging.before(request), limit=size + 1)
        return Answer(200, json.dumps(paging.page(rows, size, _view, lambda row: row.key_id)))

    async def revoke(self, request: Request) -> Answer:
        """`DELETE /v1/api-keys/{key_id}`."""
        by = await self._auth.require_unbound(request, "admin")
        key_id = request.params["key_id"]
        if not is_uuid(key_id) or not await self._tokens.revoke_api_key(key_id):
            raise problems.not_found("API key")
        logger.info("api_key_revoked", key_id=key_id, by=by.key_id)
        return Answer(204)


def _view(row: KeyRow) -> api.ApiKey:
    return api.ApiKey(
        key_id=row.key_id,
        name=row.name,
        scopes=row.scopes,  # type: ignore[arg-type]  # only valid ones are ever stored
        users=row.users,
        created_at=timestamp(row.created_ms),
        revoked_at=None if row.revoked_ms is None else timestamp(row.revoked_ms),
    )
