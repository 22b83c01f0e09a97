"""Turns: how the answer to an entry comes along, and what it used.

Promises: `follow_turn` ends with the turn's record, also where the stream lost the turn's end.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from datetime import date

from towline.client.calls import in_path, wait_for
from towline.client.threads import ThreadCalls, ThreadEvent
from towline.stream import LATER, Break
from towline.transport import ApiProblem, GatewayUnreachable
from towline.wire import events
from towline.wire.api import Page
from towline.wire.threads import ThreadGap, Turn, Usage

# A turn's end is announced right after it is in the record; where the record alone knows it so long, Redis lost it.
ANNOUNCED_WITHIN_S = 3.0
# As long as it takes: a turn ends at its cap at the latest.
NO_LIMIT_S = float("inf")
# Before the end is waited for anew, where there was no answer.
AGAIN_S = 2.0


class TurnCalls(ThreadCalls):
    """The calls about turns and usage; see `towline.client.Client`."""

    async def read_turn(self, turn: str, *, wait_s: float = 0.0) -> Turn:
        """Read a turn, waiting for its end up to `wait_s`, over as many requests as it takes."""
        until = time.monotonic() + wait_s
        return await wait_for(
            await self._read_turn_once(turn, until),
            lambda found: found.terminal,
            lambda: self._read_turn_once(turn, until),
            until=until,
        )

    async def cancel_turn(self, turn: str) -> Turn:
        """Cancel a turn: at once if nobody runs it, else it is told to stop; wait for the end with `read_turn`."""
        return await self._call(Turn, "DELETE", f"/v1/turns/{in_path(turn, 'turn')}")

    async def follow_turn(
        self, turn: Turn, *, on_break: Callable[[Break], None] | None = None
    ) -> AsyncGenerator[ThreadEvent | ThreadGap | Turn, None]:
        """Bring what happens in one turn as it happens, over lost connections and outages, until it has ended.

        If you leave before the end, close the iterator (`contextlib.aclosing`); the turn goes on.

        Args:
            turn: as `post_entry` or `read_turn` gave it.
            on_break: told of each break of the stream, before the pause.

        Yields:
            ThreadEvent: of this turn, in order, from its start as far as the stream still has it.
            ThreadGap: events may be missing here.
            Turn: the last item, and the only one of a turn that had ended: how it ended.
        """
        if turn.terminal:
            yield turn
            return
        loop = asyncio.get_running_loop()
        async with contextlib.aclosing(self.thread_events(turn.thread, on_break=on_break)) as stream:
            ended = loop.create_task(self._wait_for_end(turn.turn), name=f"end of {turn.turn}")
            coming: asyncio.Task[ThreadEvent | ThreadGap] | None = None
            announced_until: float | None = None
            try:
                while announced_until is None or loop.time() < announced_until:
                    coming = coming or loop.create_task(_take(stream), name=f"events of {turn.turn}")
                    if announced_until is None:
                        await asyncio.wait({coming, ended}, return_when=asyncio.FIRST_COMPLETED)
                    else:
                        await asyncio.wait({coming}, timeout=announced_until - loop.time())
                    if ended.done() and announced_until is None:
                        announced_until = loop.time() + ANNOUNCED_WITHIN_S
                    if not coming.done():
                        continue
                    try:
                        item, coming = coming.result(), None
                    except (ApiProblem, GatewayUnreachable) as error:
                        if _is_final(error):
                            raise
                        # Redis may be away, and Postgres there: the record alone tells the end then.
                        yield ThreadGap(turn.thread, after=None, first_available=None)
                        break
                    if isinstance(item, ThreadEvent) and item.turn != turn.turn:
                        continue
                    yield item
                    if isinstance(item, ThreadEvent) and item.type in events.TURN_ENDS:
                        break
                yield await ended
            finally:
                tasks = [task for task in (ended, coming) if task is not None]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def usage(
        self,
        *,
        thread: str | None = None,
        agent: str | None = None,
        day: date | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[Usage]:
        """Go through what ended turns used, newest first; at most `limit` rows.

        Args:
            day: of one day in UTC.
        """
        params = {"thread": thread, "agent": agent, "day": None if day is None else day.isoformat()}
        async for row in self._list(Page[Usage], "/v1/usage", params, limit):
            yield row

    async def _wait_for_end(self, turn: str) -> Turn:
        while True:
            try:
                return await self.read_turn(turn, wait_s=NO_LIMIT_S)
            except (ApiProblem, GatewayUnreachable) as error:
                if _is_final(error):
                    raise
            # The stream goes on over an outage of any length, so this does.
            await asyncio.sleep(random.uniform(AGAIN_S / 2, AGAIN_S))  # noqa: S311 (spread, no secret)

    async def _read_turn_once(self, turn: str, until: float) -> Turn:
        return await self._call(Turn, "GET", f"/v1/turns/{in_path(turn, 'turn')}", wait_until=until)


def _is_final(error: ApiProblem | GatewayUnreachable) -> bool:
    """Whether the same call would be refused again."""
    return isinstance(error, ApiProblem) and error.status < 500 and error.status not in LATER


async def _take(stream: AsyncGenerator[ThreadEvent | ThreadGap, None]) -> ThreadEvent | ThreadGap:
    return await anext(stream)
