"""Logs: one line per event whatever is in it, and no secret in any of them."""

import io
import json
import logging
import sys
from typing import Any

import pytest
import structlog
from structlog.contextvars import bound_contextvars

from common.ids import is_uuid
from common.process import logs


@pytest.fixture
def stream() -> Any:
    """Where lines go. Logging is put back as it was found: it belongs to the whole process."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    stream = io.BytesIO()
    yield stream
    logging.captureWarnings(False)
    structlog.reset_defaults()
    root.handlers, root.level = handlers, level


def lines(stream: io.BytesIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def fail(why: str) -> None:
    raise ValueError(why)


def test_a_line_carries_event_fields_and_bound_ids(stream: io.BytesIO) -> None:
    logs.configure(service="worker", level="info", log_format="json", stream=stream)
    with bound_contextvars(request_id="r-1", job="j-1"):
        structlog.get_logger().info("entry_reclaimed", idle_ms=12)
    structlog.get_logger().info("after")
    structlog.get_logger().debug("unseen")

    first, second = lines(stream)

    assert first.pop("ts").endswith("Z")
    ids = {"request_id": "r-1", "job": "j-1"}
    assert first == {"event": "entry_reclaimed", "level": "info", "service": "worker", "idle_ms": 12, **ids}
    assert "request_id" not in second


def test_lines_of_libraries_take_the_same_way(stream: io.BytesIO) -> None:
    logs.configure(service="gateway", level="debug", log_format="json", stream=stream)
    with bound_contextvars(request_id="r-1"):
        logging.getLogger("psycopg.pool").warning("connection %s lost", 7)
    # Their debug lines hold headers and frames.
    logging.getLogger("websockets.server").debug("< Authorization: Bearer hunter2")
    logging.getLogger("httpx").info("HTTP Request: GET http://a.example/?access_token=hunter2")

    (line,) = lines(stream)

    assert (line["event"], line["level"], line["logger"]) == ("connection 7 lost", "warning", "psycopg.pool")
    assert (line["service"], line["request_id"]) == ("gateway", "r-1")


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_no_secret_is_written(stream: io.BytesIO, log_format: Any) -> None:
    logs.configure(service="gateway", level="info", log_format=log_format, stream=stream)
    logger = structlog.get_logger()
    for name in ("token", "authorization", "db_password", "api_key", "headers", "query_string", "args", "redis_url"):
        logger.info("slip", **{name: "hunter2"})
    logger.info("slip", nested={"machine": "m-1", "access_token": "hunter2"})
    logger.info("slip", url="redis://user:hunter2@redis:6379/0")
    logger.info("slip", url="https://a.example/v1/runs?access_token=hunter2#x")
    logger.info("slip", detail="refused: Authorization: Bearer hunter2")
    try:
        fail("cannot reach postgresql://towline:hunter2@db/towline?password=hunter2")
    except ValueError:
        logger.exception("slip")
        logging.getLogger("psycopg").exception("cannot reach postgresql://towline:hunter2@db/towline")

    text = stream.getvalue().decode()

    assert text.count("slip") >= 12
    assert "hunter2" not in text
    assert "m-1" in text
    assert "redis:6379/0" in text


def test_ids_and_reasons_stay_readable(stream: io.BytesIO) -> None:
    """A net that cuts too much makes logs useless."""
    logs.configure(service="gateway", level="info", log_format="json", stream=stream)
    fields = {
        "token_id": "t-1",
        "job": "j-1",
        "user": "ann@example.com",
        "url": "https://a.example/v1/runs",
        "outcome": "failed",
    }
    structlog.get_logger().info("told", **fields)
    assert lines(stream)[0].items() >= fields.items()


@pytest.mark.parametrize(
    "value",
    [float("nan"), 2**70, "\ud800", b"\xff", object(), {("a",): 1}, {"s": {"\ud800"}}, RuntimeError("x")],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("log_format", ["json", "text"])
def test_any_value_makes_one_line(stream: io.BytesIO, log_format: Any, value: object) -> None:
    logs.configure(service="gateway", level="info", log_format=log_format, stream=stream)
    structlog.get_logger().info("odd", value=value)
    logging.getLogger("library").info("odd %s", value)
    assert stream.getvalue().count(b"\n") == 2
    if log_format == "json":
        assert all(line["event"].startswith("odd") for line in lines(stream) if "'" not in line["event"])


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_a_line_break_starts_no_line(stream: io.BytesIO, log_format: Any) -> None:
    """A caller's text must not look like a line of ours, whoever logs it."""
    logs.configure(service="gateway", level="info", log_format=log_format, stream=stream)
    structlog.get_logger().info("told", reason="x\nforged", name="\x1b[2J")
    logging.getLogger("library").info("bad header: %s", "x\nforged")
    assert stream.getvalue().count(b"\n") == 2
    assert b"\x1b" not in stream.getvalue()


def test_text_shows_the_traceback_below(stream: io.BytesIO) -> None:
    logs.configure(service="gateway", level="info", log_format="text", stream=stream)
    try:
        fail("why")
    except ValueError:
        structlog.get_logger().exception("failed", job="j-1")
    head, *rest = stream.getvalue().decode().splitlines()
    assert head.endswith("failed job=j-1")
    assert rest[0].startswith("Traceback")
    assert rest[-1] == "ValueError: why"


def test_a_client_that_vanished_is_no_error(stream: io.BytesIO) -> None:
    """The kernel gave a dead connection up: asyncio logs an unhandled error for what happens all day."""
    logs.configure(service="gateway", level="info", log_format="json", stream=stream)
    for error in (TimeoutError(110, "Connection timed out"), KeyError("a bug")):
        try:
            raise error
        except (OSError, KeyError):
            logging.getLogger("asyncio").error("Unhandled exception in client_connected_cb", exc_info=sys.exc_info())

    (line,) = lines(stream)
    assert "a bug" in line["exception"]


@pytest.mark.parametrize("given", ["r-1", "A" * 128, "0af7651916cd43dd8448eb211c80319c", "a/b+c=="])
def test_a_fit_request_id_is_kept(given: str) -> None:
    assert logs.request_id(given) == given


@pytest.mark.parametrize("given", [None, "", "A" * 129, "a b", "a\nb", "\u00e9", "<script>"])
def test_an_unfit_request_id_is_replaced(given: str | None) -> None:
    made = logs.request_id(given)
    assert is_uuid(made)
    assert made != logs.request_id(given)
