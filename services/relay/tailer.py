"""One source's upstream, from the first request to the end of the source: open, read, come back.

Promises: each event is passed on once and in order, and what cannot be vouched for is said; the source ends once, with
          a reason; reading never waits for the log, only for room (`gathering`).
Used by:  relay.owner: a task per source, and `beat` once a second.

Every event passes through `_take`: what stands there is paid for each of them.
"""

import asyncio
import os
import random
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import httpx
import structlog

from common.ids import RunId
from common.process.egress import EgressRefused
from common.process.outbound import ANSWER_TIMEOUT_S, stream_bytes
from common.store.eventlog import NewEvent
from common.store.leases import Point
from common.store.runs import End, Source
from relay.gathering import Gathering
from relay.health import Pulse
from relay.metrics import RelayMetrics
from relay.policy import Accepted, Final, Pace, Refused, judge_answer
from relay.resume import REPLAY_QUIET_S, Item, Passed, Resume
from towline.wire import events, json
from towline.wire.sse import Oversized, Parser

logger = structlog.get_logger(__name__)

# Shown to whoever asks how the source is; an upstream may have a say in it.
FAILURE_CHARACTERS_MAX = 200


class SourceEnd(NamedTuple):
    """How a source ended. `reason` is a slug, `detail` says it in words."""

    state: End
    reason: str
    detail: str


class Tailer:
    """Follows one source.

    Attributes:
        pulse: the source's two heartbeats (monotonic seconds).
        is_connected: the upstream's answer is open.
        failure: why the last attempts have brought nothing, in words; empty once one has.
        end: how the source has ended; None before.
        headers: the caller's, for the next request.
    """

    def __init__(
        self,
        run: RunId,
        source: Source,
        headers: Mapping[str, str],
        *,
        resume: Resume,
        pulse: Pulse,
        progress_types: frozenset[str],
        gathering: Gathering,
        http: httpx.AsyncClient,
        metrics: RelayMetrics,
    ) -> None:
        self.source = source
        self.pulse = pulse
        self.is_connected = False
        self.failure = ""
        self.end: SourceEnd | None = None
        self._run = run
        self.headers = headers
        self._resume = resume
        self._progress_types = progress_types
        self._gathering = gathering
        self._http = http
        self._metrics = metrics
        self._pace = Pace()
        self._heard_at = time.monotonic()  # the last frame, or since when one is waited for
        self._items_at = self._heard_at
        self._reading: asyncio.Timeout | None = None
        self._has_left = False

    @property
    def point(self) -> Point:
        """Where the source resumes after all that was passed on."""
        return Point(self._resume.uid, self._resume.count)

    async def run(self) -> None:
        """Follow until the source has ended; `end` says how. Cancel it to leave: nothing is half passed on."""
        try:
            async with asyncio.timeout(None) as self._reading:
                while self.end is None:
                    pause_s = await self._visit()
                    if self.end is None:
                        await asyncio.sleep(pause_s)
        except TimeoutError:
            assert self.end is not None, "only `beat` interrupts, and only then"
        finally:
            self._has_left = True

    def beat(self, now: float) -> None:
        """Do what is due by time: end a silent source, release what a replay that has ended held back."""
        if self.end is not None or self._has_left:
            return  # a run that the log has refused is beaten once more, perhaps: what was read is the next owner's
        if self._gathering.is_full:
            self._heard_at = now  # the silence is ours
        elif self._resume.is_holding and now - self._items_at >= REPLAY_QUIET_S:
            self._pass_on(self._resume.settle())
        elif now - self._heard_at >= self.source.idle_timeout_s:
            idle_s = self.source.idle_timeout_s
            why = f" ({self.failure})" if self.failure else ""
            self._finish(SourceEnd("failed", "idle-timeout", f"the upstream sent nothing for {idle_s:g} s{why}"))
        if self.end is not None and self._reading is not None:
            self._reading.reschedule(asyncio.get_running_loop().time())

    # ---- one connection

    async def _visit(self) -> float:
        """Ask the upstream once and read what it answers; returns how long to wait before the next time."""
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store", **self.headers}
        last_event_id = self._resume.last_event_id
        if last_event_id:
            headers["Last-Event-ID"] = last_event_id
        request = self._http.build_request(
            "GET", self.source.url, headers=[(name.encode(), value.encode()) for name, value in headers.items()]
        )
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                response = await self._http.send(request, stream=True)
        except EgressRefused as error:
            self._finish(SourceEnd("failed", "egress-refused", str(error)))
            return 0.0
        except (httpx.LocalProtocolError, httpx.InvalidURL) as error:
            self._finish(SourceEnd("failed", "request-impossible", f"no request can be made of this: {error}"))
            return 0.0
        except (httpx.RequestError, TimeoutError) as error:
            return self._failed("no_answer", _in_words(error))
        try:
            told = response.headers
            verdict = judge_answer(
                response.status_code, told.get("content-type", ""), told.get("retry-after", ""), time.time()
            )
            match verdict:
                case Accepted():
                    return await self._read(response, last_event_id)
                case Refused(after_s):
                    return self._failed("refused", f"the upstream answered {response.status_code}", after_s)
                case Final(reason, detail):
                    self._finish(SourceEnd("failed", reason, detail))
                    return 0.0
        finally:
            await response.aclose()

    def _failed(self, why: str, detail: str, after_s: float | None = None) -> float:
        self.failure = detail[:FAILURE_CHARACTERS_MAX]
        pause_s = self._pace.after_failure(random.random(), after_s)  # noqa: S311 (spread, not secrecy)
        self._metrics.retries_total[why].inc()
        log = logger.info if self._pace.failures == 1 else logger.debug
        log("upstream_failed", run=self._run, source=self.source.source, reason=detail, retry_s=round(pause_s, 1))
        return pause_s

    async def _read(self, response: httpx.Response, last_event_id: str) -> float:
        """Read an open event stream until it ends or the source has."""
        if self._resume.open():
            self._say(events.DISCONTINUITY, {"source": self.source.source})
        parser = Parser(last_event_id=last_event_id)
        self.is_connected = True
        self._heard_at = time.monotonic()
        heard = False
        why = "the upstream closed the connection"
        try:
            async for chunk in stream_bytes(response):
                heard = True
                self.failure = ""
                self._heard_at = self.pulse.live_at = time.monotonic()
                if items := parser.feed(chunk):
                    self._items_at = self._heard_at
                    self._take(items)
                    if self.end is not None:
                        return 0.0
                    if self._gathering.is_full:
                        await self._gathering.wait_room()
        except httpx.RequestError as error:
            why = _in_words(error)
        finally:
            self.is_connected = False
        if not heard:
            return self._failed("closed", f"{why}, having sent nothing")
        self._pace.heard(parser.retry_ms)
        self._metrics.retries_total["closed"].inc()
        logger.debug("upstream_closed", run=self._run, source=self.source.source, reason=why)
        return self._pace.after_close(random.random())  # noqa: S311

    # ---- events

    def _take(self, items: Sequence[Item]) -> None:
        passed = self._resume.accept(items)
        if len(passed.items) < len(items):
            self._metrics.repeated_total.inc(len(items) - len(passed.items))
        if passed.items:
            self._pass_on(passed)

    def _pass_on(self, passed: Passed) -> None:
        source, run_types, progress_types = self.source.source, self._resume.terminal_types, self._progress_types
        if passed.missing_after is not None:
            self._say(events.SOURCE_GAP, {"source": source, "after": passed.missing_after})
        ts = time.time_ns() // 1_000_000
        batch: list[NewEvent] = []
        size = 0
        progressed = False
        ended = False
        for item in passed.items:
            kind = events.upstream_type(item.type)
            if type(item) is Oversized:
                self._metrics.too_large_total.inc()
                told = {"source": source, "type": kind, "size_bytes": item.size_bytes}
                data = json.dumps(told)
                batch.append(NewEvent(source, item.id or "", events.EVENT_TOO_LARGE, data, ts))
            else:
                mended = item.mended  # type: ignore[union-attr]  # the other kind of Item
                if mended:
                    self._metrics.mended_total.inc()
                data = item.data  # type: ignore[union-attr]
                batch.append(NewEvent(source, item.id or "", kind, data, ts, mended))
            size += len(data)
            progressed = progressed or kind in progress_types
            if kind in run_types:
                ended = True
                break  # what comes after a terminal event belongs to nobody
        if progressed:
            self.pulse.progress_at = self._heard_at
        if ended:
            self.end = SourceEnd("completed", "terminal-event", f"the upstream sent {kind!r}")
            batch.append(self._own(events.SOURCE_ENDED, {"source": source, **self.end._asdict()}))
        self._gathering.add(batch, size, progressed=progressed)

    def _finish(self, end: SourceEnd) -> None:
        self.end = end
        self._say(events.SOURCE_ENDED, {"source": self.source.source, **end._asdict()})

    def _say(self, kind: str, data: Mapping[str, object]) -> None:
        event = self._own(kind, data)
        self._gathering.add([event], len(event.data))

    def _own(self, kind: str, data: Mapping[str, object]) -> NewEvent:
        return NewEvent(self.source.source, "", kind, json.dumps(data), time.time_ns() // 1_000_000)


def _in_words(error: Exception) -> str:
    """Why there was no answer: what the system says of the socket, without addresses, or else what the client says."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno and not isinstance(cause, (ssl.SSLError, socket.gaierror)):
            return os.strerror(cause.errno)
        cause = cause.__cause__
    if type(error) is TimeoutError:
        return f"no answer within {ANSWER_TIMEOUT_S:g} s"
    return str(error) or type(error).__name__
