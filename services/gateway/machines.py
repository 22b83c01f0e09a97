"""Machines over HTTP: presence, probes, catalogues, and the tokens that let a sidecar in.

Promises: presence is read from Redis at each call, never remembered; a probe takes a lane of its own on the machine, so
          it does not wait behind a running job, and it is answered within `PROBE_TIMEOUT_S` either way.
"""

import asyncio
import time

import msgspec
import structlog

from common.errors import StoreUnavailable
from common.ids import UserId, WorkerId, is_uuid, new_id
from common.store import keys
from common.store.control import tell_worker
from common.store.jobs import Jobs
from common.store.presence import state_of
from common.store.redis import Redis
from common.store.replies import Waiters
from common.store.tokens import Catalogue, TokenRow, Tokens
from gateway import paging, problems
from gateway.auth import Auth
from gateway.http import Answer
from gateway.problems import Refusal
from gateway.request import Request
from towline.wire import api, json
from towline.wire.api import timestamp
from towline.wire.frames import Tool

logger = structlog.get_logger(__name__)

# A round trip over a poor mobile link takes a second; what has not answered after three is not there.
PROBE_TIMEOUT_S = 3.0

_tools_decoder = msgspec.json.Decoder(list[Tool])


def tools_of(catalogue: Catalogue) -> list[Tool]:
    """The tools that a machine announced."""
    return _tools_decoder.decode(catalogue.tools)


class MachineRoutes:
    """The handlers of everything about machines."""

    def __init__(
        self, *, auth: Auth, redis: Redis, jobs: Jobs, tokens: Tokens, waiters: Waiters, timing: keys.Timing
    ) -> None:
        self._auth = auth
        self._redis = redis
        self._jobs = jobs
        self._tokens = tokens
        self._waiters = waiters
        self._timing = timing

    async def presence(self, request: Request) -> Answer:
        """`GET /v1/users/{user}/presence`."""
        user = await self._auth.require_for_user(request, "jobs")
        probe = request.query("probe")
        if probe not in (None, "true", "false"):
            raise Refusal(problems.INVALID_REQUEST, "the query parameter probe is not true or false")
        presence = await self._presence(user)
        if probe == "true":
            presence = await self._probe(user, presence)
        return Answer(200, json.dumps(presence))

    async def _presence(self, user: UserId) -> api.Presence:
        try:
            seen = await self._jobs.ask(user, "")
        except StoreUnavailable as error:
            # That nothing is known is what presence has a word for.
            logger.warning("presence_unread", error=str(error))
            return api.Presence("unknown", None, None, None, None, None, None)
        fields = seen.presence
        return api.Presence(
            state=state_of(seen, self._redis.answering_for_s(), self._timing),
            since=timestamp(int(fields["since"])) if fields else None,
            machine=fields.get("machine"),
            worker=fields.get("worker"),
            last_seen_at=timestamp(int(fields["seen"])) if fields else None,
            busy=fields["busy"] == "1" if fields else None,
            queued=seen.entries,
        )

    async def _probe(self, user: UserId, presence: api.Presence) -> api.Presence:
        """Corroborate presence with a round trip to the machine and back to this gateway."""
        if presence.worker is None:
            return msgspec.structs.replace(presence, probed=False, rtt_ms=None)
        nonce = new_id()
        began = time.perf_counter()
        reply = self._waiters.expect_probe(nonce)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                note = {"note": "probe", "user": user, "probe": nonce, "reply_to": self._waiters.gateway}
                await tell_worker(self._redis, WorkerId(presence.worker), note)
                fields = await reply
        except (TimeoutError, StoreUnavailable):
            return msgspec.structs.replace(presence, probed=False, rtt_ms=None)
        finally:
            self._waiters.forget_probe(nonce)
        rtt_ms = round((time.perf_counter() - began) * 1000, 1)
        return msgspec.structs.replace(presence, probed=True, rtt_ms=rtt_ms, busy=fields["busy"] == "1")

    async def tools(self, request: Request) -> Answer:
        """`GET /v1/users/{user}/tools`."""
        user = await self._auth.require_for_user(request, "jobs")
        found = await self._tokens.catalogue(user)
        if found is None:
            return Answer(200, json.dumps(api.Catalogue(None, None, None, None, [])))
        catalogue = api.Catalogue(
            machine=found.machine,
            name=found.name,
            version=found.version,
            announced_at=timestamp(found.seen_ms),
            tools=tools_of(found),
        )
        return Answer(200, json.dumps(catalogue))

    async def mint_token(self, request: Request) -> Answer:
        """`POST /v1/users/{user}/machine-tokens`."""
        user = await self._auth.require_for_user(request, "jobs")
        body = await request.read(api.MachineTokenCreate)
        row, value = await self._tokens.add_machine_token(user, body.name, body.ttl_s)
        logger.info("machine_token_minted", user=user, token_id=row.token_id)
        minted = api.MintedMachineToken(**msgspec.structs.asdict(_token_view(row)), token=value)
        return Answer(201, json.dumps(minted))

    async def list_tokens(self, request: Request) -> Answer:
        """`GET /v1/users/{user}/machine-tokens`."""
        user = await self._auth.require_for_user(request, "jobs")
        size = paging.limit(request)
        rows = await self._tokens.list_machine_tokens(user, before=paging.before(request), limit=size + 1)
        return Answer(200, json.dumps(paging.page(rows, size, _token_view, lambda row: row.token_id)))

    async def revoke_token(self, request: Request) -> Answer:
        """`DELETE /v1/users/{user}/machine-tokens/{token_id}`."""
        user = await self._auth.require_for_user(request, "jobs")
        token_id = request.params["token_id"]
        if not is_uuid(token_id) or not await self._tokens.revoke_machine_token(user, token_id):
            raise problems.not_found("machine token")
        logger.info("machine_token_revoked", user=user, token_id=token_id)
        try:
            seen = await self._jobs.ask(user, "")
            if worker := seen.presence.get("worker"):
                await tell_worker(self._redis, WorkerId(worker), {"note": "close", "user": user, "token_id": token_id})
        except StoreUnavailable as error:
            # It is revoked, durably: its worker asks at each heartbeat.
            logger.warning("token_close_untold", token_id=token_id, error=str(error))
        return Answer(204)


def _token_view(row: TokenRow) -> api.MachineToken:
    return api.MachineToken(
        token_id=row.token_id,
        user=row.user_id,
        name=row.name,
        created_at=timestamp(row.created_ms),
        expires_at=None if row.expires_ms is None else timestamp(row.expires_ms),
        revoked_at=None if row.revoked_ms is None else timestamp(row.revoked_ms),
    )
