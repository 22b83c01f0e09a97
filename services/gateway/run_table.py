"""The part of the route table (`routes`) that is about runs, and about the events of runs and threads."""

from gateway import paging, problems
from gateway.http import Parameter, Route
from gateway.runs import RunRoutes
from gateway.stream import StreamRoutes
from gateway.stream_token_routes import StreamTokenRoutes
from towline.wire import api
from towline.wire import runs as wire
from towline.wire.ids import ID_PATTERN
from towline.wire.threads import ThreadEventsPage


def routes_of_runs(runs: RunRoutes) -> list[Route]:
    """Following runs."""
    unbound = "The key must not be bound to users: runs belong to none."
    return [
        Route(
            "PUT",
            "/v1/runs/{run}",
            runs.follow,
            "Follow a run",
            scope="runs",
            description="From now on its sources are followed until the run ends. The same body again changes nothing,"
            f" but for `headers`, of which the newest count. {unbound}",
            body=wire.RunFollow,
            answers={
                201: (wire.Run, "The run is recorded, and will be followed."),
                200: (wire.Run, "It is followed already, as the body says."),
            },
            problems=(problems.RUN_DIFFERS, problems.RUN_ENDED, problems.EGRESS_REFUSED, problems.NOT_CONFIGURED),
            locates=True,
        ),
        Route(
            "GET",
            "/v1/runs/{run}",
            runs.read_run,
            "Read a run",
            scope="runs",
            description=unbound,
            answers={200: (wire.Run, "Its state, who follows it, and what is known of each source.")},
        ),
        Route(
            "DELETE",
            "/v1/runs/{run}",
            runs.stop_run,
            "Stop following a run",
            scope="runs",
            description=f"Its relay ends it, and its streams. Stopping twice is no error. {unbound}",
            answers={
                200: (wire.Run, "It has ended already."),
                202: (wire.Run, "Its relay has been told."),
            },
        ),
        Route(
            "GET",
            "/v1/runs",
            runs.list_runs,
            "List runs, newest first",
            scope="runs",
            description=unbound,
            parameters=(
                Parameter("state", {"type": "string", "enum": list(wire.RUN_STATES)}, "only runs in this state"),
                *paging.PARAMETERS_OF_RUNS,
            ),
            answers={200: (api.Page[wire.Run], "One page.")},
        ),
    ]


def routes_of_streams(streams: StreamRoutes, stream_tokens: StreamTokenRoutes) -> list[Route]:
    """Reading events."""
    resume = (
        "`Last-Event-ID` (header, or query where that cannot be set; the header counts) resumes after an event;"
        " without it the history comes first. Each frame's data is `{source, uid, ts, type, data}`. Frames without id:"
        " `towline.gap` where something is missing (events may repeat after it, with their `uid`), `towline.end` before"
        " the response ends; comments in between are signs of life. A reader who has seen the end gets 204, after which"
        " an EventSource stays away."
    )
    pages = "With `Accept: application/json` the same stream comes in pages, oldest first."
    last_event_id = Parameter(
        "last_event_id",
        {"type": "string", "pattern": "^[1-9][0-9]{0,18}-(0|[1-9][0-9]{0,18})$"},
        "as the header Last-Event-ID",
    )
    page_size = Parameter(
        "limit",
        {"type": "integer", "minimum": 1, "maximum": wire.EVENTS_PAGE_MAX, "default": wire.EVENTS_PAGE_DEFAULT},
        "of pages: most events on one",
    )
    live = Parameter("from", {"type": "string", "enum": ["live"]}, "without a last event id, leave out the history")
    token = Parameter("access_token", {"type": "string"}, "a stream token, where no header can be set")
    seen_end = (None, "The run has ended, and the last event id is that of its last event.")
    return [
        Route(
            "GET",
            "/v1/runs/{run}/events",
            streams.events,
            "Stream a run's events, or read them in pages",
            scope="runs",
            description=f"{resume} {pages}",
            parameters=(last_event_id, live, token, page_size),
            answers={200: (wire.EventsPage, "The stream, or one page."), 204: seen_end},
            streams=True,
        ),
        Route(
            "GET",
            "/v1/threads/{thread}/events",
            streams.thread_events,
            "Stream what happens in a thread, or read it in pages",
            scope="threads",
            description=f"What was said, the turns that answer it and how they end, answers as they come. {resume}"
            f" A thread's stream has no end. `source` is the turn, `data` JSON. {pages}",
            parameters=(last_event_id, live, token, page_size),
            answers={200: (ThreadEventsPage, "The stream, or one page.")},
            streams=True,
        ),
        Route(
            "GET",
            "/v1/events",
            streams.many_events,
            "Stream the events of several runs over one connection",
            scope="runs",
            description=f"{resume} Here it has `run` as well, and an id stands for a place in all of these runs.",
            parameters=(
                Parameter(
                    "runs",
                    {"type": "string", "pattern": f"^{ID_PATTERN}(,{ID_PATTERN}){{0,{wire.STREAM_RUNS_MAX - 1}}}$"},
                    f"ids of at most {wire.STREAM_RUNS_MAX} runs, with commas between",
                    required=True,
                ),
                Parameter("last_event_id", {"type": "string"}, "as the header Last-Event-ID"),
                live,
                token,
            ),
            answers={200: (None, "The stream."), 204: seen_end},
            problems=(problems.NOT_FOUND,),
            streams=True,
        ),
        Route(
            "POST",
            "/v1/stream-tokens",
            stream_tokens.mint_token,
            "Mint a stream token for a browser",
            scope=("runs", "threads"),
            description="It opens the events of exactly these runs, which need not exist yet, and of these threads, and"
            " nothing else; it cannot be taken back, only left to expire. A stream that it opened goes on. Where runs"
            " are named the key must not be bound to users: runs belong to none.",
            body=wire.StreamTokenCreate,
            answers={201: (wire.StreamToken, "The token, which is shown this once.")},
            problems=(problems.NOT_CONFIGURED, problems.NOT_FOUND),
        ),
    ]
