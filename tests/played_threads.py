"""A gateway with one thread and one turn, played: each address has its own answers, one after the other.

The real one does not lose the end of a turn, or begin an attempt again, on demand.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from played_gateway import PlayedGateway, Request, Step

from towline.wire import events, sse
from towline.wire.runs import EventData
from towline.wire.threads import ThreadGap

THREAD = "01981c2e-0000-7000-8000-000000000001"
TURN = "01981c2e-0000-7000-8000-000000000002"
OTHER_TURN = "01981c2e-0000-7000-8000-000000000003"
ENTRY = "01981c2e-0000-7000-8000-000000000004"
REPLY = "01981c2e-0000-7000-8000-000000000005"
AT = "2026-01-02T03:04:05.000Z"

EVENTS = f"GET /v1/threads/{THREAD}/events"
TURNS = f"GET /v1/turns/{TURN}"
VIEW = f"GET /v1/threads/{THREAD}"
POST = f"POST /v1/threads/{THREAD}/entries"


@dataclass
class Route:
    """The answers at one address: method and path, such as `GET /v1/threads`; the last answer is for ever."""

    address: str
    answers: Sequence[Sequence[Step]]
    asked: int = 0


def route(address: str, *answers: Sequence[Step]) -> Any:
    return Route(address, answers)


@dataclass
class PlayedThreads(PlayedGateway):
    """Start it with routes; another address is an error of the test, and cuts the connection."""

    unknown: list[Request] = field(default_factory=list)

    def to(self, address: str) -> list[Request]:
        """The requests to one address, in order."""
        return [request for request in self.requests if _address(request) == address]

    def _answer(self, request: Request) -> Sequence[Step]:
        for each in self.answers:
            assert isinstance(each, Route)
            if each.address == _address(request):
                each.asked += 1
                return each.answers[min(each.asked, len(each.answers)) - 1]
        self.unknown.append(request)
        return []


def _address(request: Request) -> str:
    return f"{request.method} {request.target.partition('?')[0]}"


def turn(state: str = "running", **members: Any) -> dict[str, Any]:
    """A turn's document."""
    outcome = {
        "completed": {"outcome": {"entry": REPLY, "text": "four, of course"}},
        "failed": {"outcome": {"error": {"code": "model-unknown", "message": "no such model"}}},
        "cancelled": {"outcome": {"error": {"code": "cancelled", "message": "the turn was cancelled"}}},
    }.get(state, {})
    return {
        "turn": TURN,
        "thread": THREAD,
        "entry": ENTRY,
        "agent": "helper",
        "state": state,
        "attempts": 1,
        "replays": 0,
        "cancel_requested": False,
        "replayed": False,
        "accepted_at": AT,
        "started_at": AT,
        "ended_at": AT if outcome else None,
        **outcome,
        **members,
    }


def entry(position: int = 1, role: str = "user", text: str = "2 + 2?", of: str = TURN) -> dict[str, Any]:
    """An entry's document."""
    return {
        "entry": ENTRY if role == "user" else REPLY,
        "thread": THREAD,
        "position": position,
        "role": role,
        "text": text,
        "turn": of,
        "created_at": AT,
    }


def thread(**members: Any) -> dict[str, Any]:
    """A thread's document."""
    return {
        "thread": THREAD,
        "agent": "helper",
        "user": "alice",
        "model": None,
        "created_at": AT,
        "used_at": AT,
        **members,
    }


def event(n: int, event_type: str, /, *, of: str = TURN, **data: Any) -> bytes:
    """An event's frame; its data names the turn by itself."""
    text = json.dumps({"turn": of, **data})
    head = EventData(of, f"u{n}", 1764000000000 + n, event_type, text)
    return sse.encode(f"7-{n}", event_type, msgspec.json.encode(head))


def delta(n: int, number: int, text: str, *, attempt: int = 1) -> bytes:
    return event(n, events.MESSAGE_DELTA, attempt=attempt, n=number, text=text)


def gap() -> bytes:
    return sse.encode(None, events.GAP, msgspec.json.encode(ThreadGap(THREAD, "7-1", "7-9")))
