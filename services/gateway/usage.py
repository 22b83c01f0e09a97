"""Usage over HTTP: what turns have cost, by thread, agent and day."""

from datetime import date

from common.ids import AgentId, ThreadId, is_uuid
from common.store.usage import Usage, UsageRow
from gateway import paging, problems
from gateway.auth import Auth
from gateway.http import Answer
from gateway.problems import Refusal
from gateway.request import Request
from gateway.threads import reached_users
from towline.wire import ids, json
from towline.wire import threads as wire
from towline.wire.api import timestamp


class UsageRoutes:
    """The handler of usage."""

    def __init__(self, *, auth: Auth, usage: Usage) -> None:
        self._auth = auth
        self._usage = usage

    async def list_usage(self, request: Request) -> Answer:
        """`GET /v1/usage`."""
        key = await self._auth.require(request, "threads")
        thread, agent = request.query("thread"), request.query("agent")
        if thread is not None and not is_uuid(thread):
            raise Refusal(problems.INVALID_REQUEST, "the query parameter thread is no thread id")
        if agent is not None and not ids.is_id(agent):
            raise Refusal(problems.INVALID_REQUEST, "the query parameter agent is no id")
        day = _day(request)
        size = paging.limit(request)
        rows = await self._usage.list_page(
            users=reached_users(key),
            thread=None if thread is None else ThreadId(thread),
            agent=None if agent is None else AgentId(agent),
            day=day,
            before=paging.before_usage(request),
            limit=size + 1,
        )
        return Answer(200, json.dumps(paging.page_of_usage(rows, size, _view)))


def _day(request: Request) -> date | None:
    text = request.query("day")
    if text is None:
        return None
    try:
        day = date.fromisoformat(text)
    except ValueError:
        day = None
    if day is None or text != day.isoformat():
        raise Refusal(problems.INVALID_REQUEST, "the query parameter day is no day such as 2026-01-31")
    return day


def _view(row: UsageRow) -> wire.Usage:
    return wire.Usage(
        turn=row.turn,
        thread=row.thread,
        agent=row.agent,
        user=row.user,
        seam=row.seam,
        model=row.model,
        input_tokens=row.input_tokens,
        output_tokens=row.output_tokens,
        model_calls=row.model_calls,
        tool_calls=row.tool_calls,
        seconds=row.seconds,
        ended_at=timestamp(row.at_ms),
    )
