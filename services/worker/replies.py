"""Replies: the worker's own blocking read of what its tool calls are told. `common.store.replies` has the waiters."""

import asyncio

import structlog

from common.errors import StoreUnavailable
from common.ids import GatewayId
from common.process.backoff import Backoff
from common.store import keys
from common.store.control import replies_inbox
from common.store.redis import Redis
from common.store.replies import Waiters

logger = structlog.get_logger(__name__)

# A stream that nobody keeps lapses after `keys.STREAM_TTL_S`; and how long a loss of Redis may go unnoticed.
LOOK_EVERY_S = 5.0


class Replies:
    """One process's replies stream, read for its waiters. `name`: under which they register."""

    def __init__(self, redis: Redis, waiters: Waiters, name: GatewayId) -> None:
        self._redis = redis
        self._waiters = waiters
        self._inbox = replies_inbox(redis, name)
        self._born: bytes | None = None

    async def run(self) -> None:
        """Read until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._run_reads(), name="replies-reads")
            group.create_task(self._run_looks(), name="replies-looks")

    async def remove(self) -> None:
        """Delete the stream when the process leaves. Raises: StoreUnavailable."""
        await self._inbox.remove()

    async def _run_reads(self) -> None:
        backoff = Backoff(first_s=0.05, cap_s=2.0)
        while True:
            try:
                notes = await self._inbox.read()
            except StoreUnavailable as error:
                logger.warning("replies_unread", error=str(error))
                self._waiters.renew()
                await asyncio.sleep(backoff.next_s())
                continue
            backoff.reset()
            try:
                self._waiters.take(notes)
            except Exception:
                # One reply that cannot be read must not end the process; the rereads find what it was to say.
                logger.exception("replies_undelivered", replies=len(notes))

    async def _run_looks(self) -> None:
        while True:
            try:
                await self._inbox.keep_alive()
                (born,) = await self._redis.send_many([("GET", keys.BORN)])
            except StoreUnavailable as error:
                logger.warning("replies_not_kept", error=str(error))
            else:
                if isinstance(born, bytes) and born != self._born:
                    if self._born is not None:
                        self._inbox.rewind()
                    self._born = born
            await asyncio.sleep(LOOK_EVERY_S)
