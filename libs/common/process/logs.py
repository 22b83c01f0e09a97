"""Logs: one line per event, JSON for collectors or text for people, our own and the libraries' alike.

Owns:     how a log line is made. A gateway binds `request_id` to every line of a request (structlog's context
          variables); the other ids (`user`, `job`, `traceparent`) are given by the lines that have them.
Promises: a log call never raises. Nothing here writes credentials, query strings or payloads: callers do not pass
          them, and what slips through under a telling name, or inside a URL, is cut out.
"""

import logging
import re
import sys
from collections.abc import MutableMapping
from functools import lru_cache
from typing import Any, BinaryIO, Literal

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from common.ids import new_id

REQUEST_ID_CHARACTERS_MAX = 128
REDACTED = "[redacted]"

# The net under the rule "callers do not pass them". Compared with the words of a field's name: `db_password` is
# caught, `token_id` is an id and is not.
_SECRET_WORDS = frozenset(
    {"authorization", "password", "passwd", "secret", "cookie", "token", "credential", "credentials"}
)
_SECRET_NAMES = frozenset(
    {
        "api_key",
        "access_token",
        "headers",
        "query",
        "query_string",
        "body",
        "args",
        "result",
        "payload",
        "database_url",
        "redis_url",
    }
)
_URL_USERINFO = re.compile(r"(?<=://)[^/?#\s@]*@")
_URL_QUERY = re.compile(r"(://[^\s?#\"']*)\?[^\s#\"']*")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[^\s\"',]+")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:@=+/-]+")

# Below these levels libraries write headers, frames and URLs: never, whatever the setting.
_LIBRARY_LEVELS = dict.fromkeys(("httpx", "httpcore", "hypercorn", "websockets"), logging.WARNING)

_encoder = msgspec.json.Encoder(enc_hook=repr)


def configure(*, service: str, level: str, log_format: Literal["json", "text"], stream: BinaryIO | None = None) -> None:
    """Set up logging of the whole process; call once, before anything logs.

    Args:
        service: stands in every line.
        level: least severe level of our own lines (`debug` to `error`); libraries never go below `info`.
        stream: where lines go, whole ones only; standard output by default.
    """
    threshold = getattr(logging, level.upper())
    sink = structlog.BytesLoggerFactory(stream or sys.stdout.buffer)

    def add_service(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event.setdefault("service", service)
        return event

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
        add_service,
    ]
    render: list[Processor] = [
        structlog.processors.format_exc_info,
        redact,
        to_json if log_format == "json" else to_text,
    ]
    structlog.configure(
        processors=[*shared, *render],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=sink,
        cache_logger_on_first_use=True,
    )

    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, _add_logger_name],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render[:-1], _decoded(render[-1])],
    )
    handler = _SinkHandler(sink())
    handler.setFormatter(formatter)
    handler.addFilter(_is_incident)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(threshold, logging.INFO))
    for name, least in _LIBRARY_LEVELS.items():
        logging.getLogger(name).setLevel(max(threshold, least))
    logging.captureWarnings(True)


def request_id(given: str | None) -> str:
    """The id of a request: the caller's `X-Request-Id` where it is fit for logs and headers, else a fresh one."""
    if given and len(given) <= REQUEST_ID_CHARACTERS_MAX and _REQUEST_ID.fullmatch(given):
        return given
    return new_id()


def redact(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Cut out what must not be written; nested mappings included."""
    return {name: _redacted(name, value) for name, value in event.items()}


def to_json(_logger: WrappedLogger, _method: str, event: EventDict) -> bytes:
    """Render one line of JSON; what JSON cannot carry is written as its `repr`."""
    try:
        return _encoder.encode(event)
    except (TypeError, ValueError, RecursionError):
        return _encoder.encode({ascii(name)[1:-1]: ascii(value) for name, value in event.items()})


def to_text(_logger: WrappedLogger, _method: str, event: EventDict) -> bytes:
    """Render one line for people: time, level, event, then `name=value`; a traceback follows on its own lines."""
    event = dict(event)
    event.pop("service", None)
    head = f"{event.pop('ts', '')} {event.pop('level', ''):<7} {_one_line(str(event.pop('event', '')))}"
    trace = event.pop("exception", None)
    fields = "".join(f" {name}={_word(value)}" for name, value in event.items())
    return (head + fields + (f"\n{trace}" if trace else "")).encode(errors="backslashreplace")


def _one_line(text: str) -> str:
    return text if text.isprintable() else repr(text)


def _word(value: object) -> str:
    return value if isinstance(value, str) and value.isprintable() and value and " " not in value else repr(value)


def _redacted(name: object, value: Any) -> Any:
    if isinstance(name, str) and _is_secret(name):
        return REDACTED
    if isinstance(value, str):
        # Most values are ids and words: they take neither path.
        if "://" in value:
            value = _URL_QUERY.sub(rf"\1?{REDACTED}", _URL_USERINFO.sub("", value))
        return _BEARER.sub(rf"\1 {REDACTED}", value) if " " in value else value
    if isinstance(value, MutableMapping):
        return {key: _redacted(key, member) for key, member in value.items()}
    return value


@lru_cache(maxsize=1024)  # names of fields are few
def _is_secret(name: str) -> bool:
    return name in _SECRET_NAMES or name.rsplit("_", 1)[-1] in _SECRET_WORDS


def _is_incident(record: logging.LogRecord) -> bool:
    # A connection that the kernel gave up (http_server.DEAD_PEER_TIMEOUT_MS) ends the server's task with an OSError,
    # which asyncio reports as unhandled. Laptops vanish all day; that is no error.
    vanished = record.name == "asyncio" and record.exc_info and isinstance(record.exc_info[1], OSError)
    return not (vanished and "client_connected_cb" in record.getMessage())


def _add_logger_name(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    event["logger"] = event["_record"].name
    return event


def _decoded(render: Processor) -> Processor:
    def rendered(logger: WrappedLogger, method: str, event: EventDict) -> str:
        line = render(logger, method, event)
        assert isinstance(line, bytes)
        return line.decode()

    return rendered


class _SinkHandler(logging.Handler):
    """Hands lines of the standard library's loggers to the writer that our own lines go through."""

    def __init__(self, sink: structlog.BytesLogger) -> None:
        super().__init__()
        self._sink = sink

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._sink.msg(self.format(record).encode())
        except Exception:  # logging's own contract: a log call never raises
            self.handleError(record)
