"""Notes between processes: a control stream per worker, a replies stream per process that waits for jobs.

Owns:     `bridge:control`, `bridge:replies`.
Promises: nothing: a note may be lost (a flush, a trim), and everything works without it, later. Notes are wake-ups.
Used by:  the gateway (probe, cancel, close; reads replies, and wakes itself by one), the worker (reads control and
          answers probes; for the tools of its turns: cancel, replies).
"""

from collections.abc import Mapping

from common.ids import GatewayId, WorkerId
from common.store import keys
from common.store.redis import Call, Reader, Redis, script

# An entry of any stream: its id and its fields.
Entry = tuple[str, dict[bytes, bytes]]


# The fields of one entry of a control or replies stream; they differ by kind.
Note = Mapping[str, str]


class Inbox:
    """The one blocking read of a process: its own stream, from where it left off, and for a gateway those it serves."""

    def __init__(self, redis: Redis, reader: Reader, stream: str) -> None:
        self._redis = redis
        self._reader = reader
        self._stream = stream
        # From the beginning: whatever was written before the first read is ours too, for names are never reused.
        self._last = "0-0"

    async def read(self) -> list[Note]:
        """Wait up to 5 s for notes. Raises: StoreUnavailable (read again; nothing is skipped)."""
        notes, _ = await self.read_beside({})
        return notes

    async def read_beside(self, streams: Mapping[str, str]) -> tuple[list[Note], dict[str, list[Entry]]]:
        """Wait up to 5 s for notes or for entries of other streams, in one call.

        Args:
            streams: by key, the id after which to read; what they bring is not remembered here.

        Raises:
            StoreUnavailable: read again; nothing is skipped.
        """
        found = dict(await self._reader.read({**streams, self._stream: self._last}))
        notes: list[Note] = []
        for entry_id, fields in found.pop(self._stream, ()):
            self._last = entry_id
            notes.append({k.decode(): v.decode() for k, v in fields.items()})
        return notes, found

    def rewind(self) -> None:
        """Read from 0 again: after a Redis loss new ids may be lower than those seen (rule 13, `bridge:born`)."""
        self._last = "0-0"

    async def keep_alive(self) -> None:
        """Let go of what was read and put off the stream's expiry; once per heartbeat. Raises: StoreUnavailable."""
        keep = Call(script("keep_notes"), [self._stream], [self._last, keys.STREAM_TTL_S])
        await self._redis.run_many([keep])  # one that cannot be written to is no reason not to read from it

    async def remove(self) -> None:
        """Delete the stream when its process leaves. Raises: StoreUnavailable."""
        await self._redis.send_many([("DEL", self._stream)])


def control_inbox(redis: Redis, worker: WorkerId) -> Inbox:
    """Where a worker reads its notes."""
    return Inbox(redis, redis.reader(), keys.control(worker))


def replies_inbox(redis: Redis, gateway: GatewayId) -> Inbox:
    """Where a process reads what its waiters are told: a gateway, or a worker that runs turns (under its own name)."""
    return Inbox(redis, redis.reader(), keys.replies(gateway))


async def tell_worker(redis: Redis, worker: WorkerId, fields: Mapping[str, str]) -> None:
    """Append a note to a worker's stream; `note` names its kind: `probe`, `cancel`, `close`.

    Raises: StoreUnavailable.
    """
    await _append(redis, keys.control(worker), fields)


async def tell_gateway(redis: Redis, gateway: GatewayId, fields: Mapping[str, str]) -> None:
    """Append a reply to a gateway's stream. Raises: StoreUnavailable."""
    await _append(redis, keys.replies(gateway), fields)


async def _append(redis: Redis, stream: str, fields: Mapping[str, str]) -> None:
    flat = [part for pair in fields.items() for part in pair]
    answers = await redis.send_many(
        [
            ("XADD", stream, "MAXLEN", "~", keys.STREAM_LEN_MAX, "*", *flat),
            ("EXPIRE", stream, keys.STREAM_TTL_S),
        ]
    )
    if isinstance(answers[0], Exception):
        raise answers[0]
