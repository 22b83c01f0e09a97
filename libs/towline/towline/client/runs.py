"""Runs: have a run's sources followed into one stream, and read that stream."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET

from towline.client.calls import Calls, checked_event_id, in_path
from towline.stream import Break, read_events
from towline.transport import InvalidRequest
from towline.wire import events
from towline.wire.api import Page
from towline.wire.events import PROGRESS_TYPES, TERMINAL_TYPES
from towline.wire.runs import STREAM_RUNS_MAX, End, EventData, Gap, Run, RunFollow, RunState, SourceFollow
from towline.wire.sse import Event


class RunEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event of a run.

    Attributes:
        id: opaque; pass it as `last_event_id` to go on after this event.
        source: the source that sent it; empty when it is about the run.
        uid: the upstream's own id of the event; empty when it has none. After a `Gap` events may repeat under a new
            `id` and their old `uid`.
        ts: when the relay had it, milliseconds since the Unix epoch.
        type: the upstream's word, or one of ours (`towline.wire.events`).
        data: the upstream's text, unchanged.
        mended: that text was no UTF-8, and what was wrong in it is U+FFFD now.
    """

    run: str
    id: str
    source: str
    uid: str
    ts: int
    type: str
    data: str
    mended: bool = False


RunItem = RunEvent | Gap | End


class RunCalls(Calls):
    """The calls about runs; see `towline.client.Client`."""

    async def follow_run(
        self,
        run: str,
        sources: Sequence[SourceFollow],
        *,
        progress_types: Sequence[str] = PROGRESS_TYPES,
        terminal_types: Sequence[str] = TERMINAL_TYPES,
        stall_after_s: float = 900.0,
        max_duration_s: float = 86_400.0,
    ) -> Run:
        """Have the product follow a run's sources into one stream; a second call with the same body changes nothing.

        `RunFollow` says what the arguments mean. Another body is refused (`run-differs`), and so is the id of a run
        that has ended (`run-ended`).
        """
        body = RunFollow(list(sources), list(progress_types), list(terminal_types), stall_after_s, max_duration_s)
        return await self._call(Run, "PUT", f"/v1/runs/{in_path(run, 'run')}", body=body)

    async def read_run(self, run: str) -> Run:
        """Read how a run and each of its sources are."""
        return await self._call(Run, "GET", f"/v1/runs/{in_path(run, 'run')}")

    async def stop_run(self, run: str) -> Run:
        """Stop following a run; it is `stopping` until its relay has written the end into the stream."""
        return await self._call(Run, "DELETE", f"/v1/runs/{in_path(run, 'run')}")

    async def list_runs(self, *, state: RunState | None = None, limit: int | None = None) -> AsyncIterator[Run]:
        """Go through all runs, newest first; at most `limit` of them."""
        async for run in self._list(Page[Run], "/v1/runs", {"state": state}, limit):
            yield run

    def events(
        self,
        run: str | Sequence[str],
        *,
        last_event_id: str | None = None,
        from_: Literal["start", "live"] = "start",
        on_break: Callable[[Break], None] | None = None,
    ) -> AsyncGenerator[RunItem, None]:
        """Follow the events of one run, or of up to 20 over one connection, until the runs have ended.

        Lost, silent and closed connections are replaced, each going on after the last event, for as long as it takes;
        only a first connection that never comes about is given up. If you leave before the end, close the iterator
        (`contextlib.aclosing`), and with it the connection.

        Args:
            run: an id, or a list of ids. The ids of a list's events are good for the same list only.
            last_event_id: `RunEvent.id` after which to go on; it wins over `from_`.
            from_: `start` brings what the buffer still has before what comes next, `live` does not.
            on_break: told of each break, before the pause.

        Yields:
            RunEvent: in each run's order, none twice.
            Gap: events are missing here; those that follow may repeat earlier ones, with their `uid`.
            End: the run has ended, and this was all of it.

        Raises:
            ApiProblem: refused for good: 400 (no such cursor), 401, 404.
        """
        runs = [run] if isinstance(run, str) else list(run)
        ids = [in_path(each, "run") for each in runs]
        if not 1 <= len(set(runs)) == len(runs) <= STREAM_RUNS_MAX:
            raise InvalidRequest(f"1 to {STREAM_RUNS_MAX} different runs can be followed at once")
        return read_events(
            self._transport,
            f"/v1/runs/{ids[0]}/events" if isinstance(run, str) else "/v1/events",
            _RunReading(runs),
            params={} if isinstance(run, str) else {"runs": ",".join(runs)},
            last_event_id=checked_event_id(last_event_id),
            live=from_ == "live",
            on_break=on_break,
        )


class _RunReading:
    """What the frames of some runs' stream say; frames without a run are those of the first."""

    def __init__(self, runs: Sequence[str]) -> None:
        self._runs = runs
        self._open = set(runs)

    def read_event(self, event_id: str, frame: Event) -> RunEvent:
        data = msgspec.json.decode(frame.data, type=EventData)
        run = self._runs[0] if data.run is UNSET else data.run
        return RunEvent(run, event_id, data.source, data.uid, data.ts, data.type, data.data, data.mended is True)

    def read_frame(self, frame: Event) -> RunItem | None:
        if frame.type == events.GAP:
            return msgspec.json.decode(frame.data, type=Gap)
        if frame.type == events.END:
            end = msgspec.json.decode(frame.data, type=End)
            self._open.discard(end.run)
            return end
        return None

    def unknown_start(self) -> Iterable[RunItem]:
        return [Gap(run=run, after=None, first_available=None) for run in self._runs]

    def is_over(self) -> bool:
        return not self._open
