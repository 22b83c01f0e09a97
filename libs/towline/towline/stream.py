"""Streams: events as they come, over as many connections as it takes.

Owns:     where to go on after a break and when, and how long silence is taken for life; what the frames say is its
          callers' (`Reading`).
Promises: events arrive in order and none twice; what is missing is a gap, never silence. This leans on the gateway,
          which starts after the id that it is given.
Used by:  `towline.client`: `Client.events` and `Client.thread_events`.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from towline.transport import ApiProblem, GatewayUnreachable, Transport
from towline.wire import events
from towline.wire.sse import Event, Oversized, Parser

# Six characters for each byte of the largest event that a gateway lets through, several times over: no real event is
# refused, and a peer that is no gateway cannot fill our memory.
EVENT_BYTES_MAX = 16 * 1024 * 1024

# Silence of so many keep-alive intervals: two comments are missing, so it is not one that was late.
SILENT_INTERVALS_MAX = 2.5
# Until the stream has stated its own interval.
KEEPALIVE_DEFAULT_S = 15.0

# Before coming back, unless the stream said how long (`retry`); doubled with each try that brought nothing.
PAUSE_FIRST_S = 1.0
PAUSE_MAX_S = 30.0
# A gateway asks for seconds; less or more than this is no gateway's.
RETRY_MS_MIN = 50
RETRY_MS_MAX = 300_000
# On top, differently for each: those who were cut off together do not come back together.
PAUSE_SPREAD = 0.25
# Tries before the first answer; who never had one has the wrong address more often than bad luck.
FIRST_ATTEMPTS_MAX = 4

# Refusals that say "later", besides 5xx.
LATER = frozenset({408, 425, 429})

# So many ids are remembered, and their events left out if a proxy or an old cursor brings them again.
RECENT_IDS_MAX = 1000


class Break(msgspec.Struct, frozen=True):
    """The connection is gone; the stream goes on by itself after `pause_s`."""

    reason: str
    pause_s: float


T_co = TypeVar("T_co", covariant=True)


class Reading(Protocol[T_co]):
    """What the frames of one stream say, told in their order. A frame that it cannot read raises `DecodeError`."""

    def read_event(self, event_id: str, frame: Event) -> T_co:
        """Read an event of the log."""

    def read_frame(self, frame: Event) -> T_co | None:
        """Read a frame of the gateway's own, which has no id; None for one that only newer clients know."""

    def unknown_start(self) -> Iterable[T_co]:
        """Say that nobody knows what came before: the stream broke before it had said where it began."""

    def is_over(self) -> bool:
        """Whether what was read last was the end of all."""


class _NotThisApi(ValueError):
    """A frame that no gateway sends."""


@dataclass(slots=True)
class Retries:
    """When to come back, and whether (PURE).

    A connection counts as good once it has brought something, or has lasted; bad ones in a row are further and
    further apart. Once a stream was open it is never given up.
    """

    was_open: bool = False
    bad_in_a_row: int = 0
    retry_ms: int | None = None

    def note(self, *, brought: bool, lasted_s: float) -> None:
        """Take in how the last connection went."""
        self.bad_in_a_row = 0 if brought or lasted_s >= PAUSE_MAX_S else self.bad_in_a_row + 1

    def is_over(self) -> bool:
        """Whether to give up."""
        return not self.was_open and self.bad_in_a_row >= FIRST_ATTEMPTS_MAX

    def pause_s(self, *, asked_s: float | None, spread: float) -> float:
        """How long to wait, at least what was asked for.

        Args:
            asked_s: what `Retry-After` says.
            spread: 0 to 1, by chance.
        """
        first_s = PAUSE_FIRST_S if self.retry_ms is None else self.retry_ms / 1000
        # Capped in the exponent too: what never comes back doubles for days.
        doubled_s = max(first_s, min(PAUSE_MAX_S, first_s * 2.0 ** min(max(0, self.bad_in_a_row - 1), 16)))
        return max(doubled_s, asked_s or 0.0) * (1 + PAUSE_SPREAD * spread)


async def read_events(
    transport: Transport,
    path: str,
    reading: Reading[T_co],
    *,
    params: dict[str, str],
    last_event_id: str,
    live: bool,
    on_break: Callable[[Break], None] | None,
) -> AsyncGenerator[T_co, None]:
    """Yield what a stream brings until it is over; `Client.events` says what is raised.

    Args:
        live: begin with what comes next, where `last_event_id` is empty.
    """
    retries = Retries()
    recent_ids: dict[str, None] = {}
    cursor = last_event_id
    while True:
        parser = Parser(max_event_bytes=EVENT_BYTES_MAX, last_event_id=cursor)
        keepalive_s: float | None = None
        started = time.monotonic()
        brought = False
        asked_s: float | None = None
        failure: ApiProblem | GatewayUnreachable | None = None
        try:
            headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": cursor} if cursor else {})
            begin = {"from": "live"} if live and not cursor else {}
            async with transport.stream(path, params=params | begin, headers=headers) as answer:
                if answer.status == 204:
                    return
                if answer.media_type != "text/event-stream":
                    # As when nobody answers: a proxy may say so with a page.
                    raise GatewayUnreachable(  # noqa: TRY301
                        f"{transport.url} answers with {answer.media_type or 'nothing'} in place of an event stream"
                    )
                if retries.was_open and begin:
                    # Nothing had come to go on from, and nobody can say what came meanwhile.
                    for item in reading.unknown_start():
                        yield item
                retries.was_open = True
                while True:
                    silence_s = SILENT_INTERVALS_MAX * (keepalive_s or KEEPALIVE_DEFAULT_S)
                    async with asyncio.timeout(silence_s):
                        chunk = await anext(answer.chunks, None)
                    if chunk is None:
                        reason = "the gateway closed the stream"
                        break
                    for frame in parser.feed(chunk):
                        if isinstance(frame, Event) and frame.id is not None:
                            brought = True
                            if frame.id in recent_ids:
                                continue
                            recent_ids[frame.id] = None
                            if len(recent_ids) > RECENT_IDS_MAX:
                                del recent_ids[next(iter(recent_ids))]
                        found = _read(frame, reading)
                        if found is not None:
                            yield found
                        if reading.is_over():
                            return
                    cursor = parser.last_event_id
                    keepalive_s = keepalive_s or events.keepalive_s(parser.comment)
        except TimeoutError:
            reason = f"silent for {silence_s:g} s"
        except ApiProblem as problem:
            if problem.status < 500 and problem.status not in LATER:
                raise
            failure, reason, asked_s = problem, str(problem), problem.retry_after_s
        except GatewayUnreachable as error:
            failure, reason = error, str(error)
        except _NotThisApi as error:
            raise GatewayUnreachable(f"{transport.url} sent an event that is not this API's: {error}") from error
        retries.note(brought=brought, lasted_s=time.monotonic() - started)
        if failure is not None and retries.is_over():
            raise failure
        if parser.retry_ms is not None:
            retries.retry_ms = min(max(parser.retry_ms, RETRY_MS_MIN), RETRY_MS_MAX)
        pause_s = retries.pause_s(asked_s=asked_s, spread=random.random())  # noqa: S311 (spread, no secret)
        if on_break is not None:
            on_break(Break(reason, pause_s))
        await asyncio.sleep(pause_s)


def _read(frame: Event | Oversized, reading: Reading[T_co]) -> T_co | None:
    """Read one frame; None for one that only newer clients know.

    Raises:
        _NotThisApi: says why.
    """
    if isinstance(frame, Oversized):
        raise _NotThisApi(f"{frame.size_bytes} bytes")
    try:
        if frame.id is not None:
            return reading.read_event(frame.id, frame)
        if events.is_own(frame.type):
            return reading.read_frame(frame)
    except msgspec.DecodeError as error:
        raise _NotThisApi(str(error)) from error
    raise _NotThisApi("it has no id")
