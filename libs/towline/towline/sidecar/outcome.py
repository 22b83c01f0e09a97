"""PURE: how a job ended, as a value that can be kept, replayed and sent.

Owns:     the encoding of a tool's return value.
Promises: what comes out can be carried by every store and peer: text is mended, an unusable number or an oversized
          result becomes a failure with a name.
Used by:  sidecar.lane (makes them), sidecar.journal and sidecar.recent (keep them).
"""

import json as stdlib_json
import re
from typing import Any

import msgspec

from towline.wire import frames, json

# Longest text of an error message: a traceback pasted into an exception must not fill logs and records.
MESSAGE_CHARACTERS_MAX = 2000

# Ends the message of whatever is `unknown`.
UNCERTAIN = "it may or may not have had its effect"

# What msgspec writes without complaint and our rules do not carry, or may not: NaN (as null), U+0000, integers beyond
# 64 bit. A match is a suspicion; most results raise none and are not parsed again.
_SUSPECT = re.compile(rb"null|\\u0000|[0-9]{19}")

# The frame's own default, the very object: msgspec leaves a raw member out only then.
_NO_RESULT = frames.JobResult(outcome="failed").result


class JobOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """`result` when completed, else `error`; `mended` when text in the result had to be repaired."""

    outcome: frames.Outcome
    result: msgspec.Raw = _NO_RESULT
    error: frames.Failure | None = None
    mended: bool = False

    def frame(
        self, *, id_: str = "", job: str = "", replayed: bool = False, lane_busy: bool = False
    ) -> frames.JobResult:
        """The frame that tells it, in answer to the delivery `id_` or, unasked, about `job`."""
        return frames.JobResult(
            outcome=self.outcome,
            id=id_,
            job=job,
            result=self.result,
            error=self.error,
            replayed=replayed,
            lane_busy=lane_busy,
            mended=self.mended,
        )


def failed(code: str, message: str, *, retryable: bool = False) -> JobOutcome:
    """The tool said so, or it certainly did not run."""
    return JobOutcome("failed", error=frames.Failure(code, _text(message), retryable))


def unknown(code: str, message: str) -> JobOutcome:
    """It may or may not have run."""
    return JobOutcome("unknown", error=frames.Failure(code, _text(message)))


def completed(value: Any) -> JobOutcome:
    """The tool returned `value`: anything that msgspec encodes, structs and dataclasses included."""
    try:
        raw, mended = _encode(value)
    except json.JsonProblem as problem:
        return failed("result-unusable", f"the tool's result cannot be carried: {problem}")
    if len(raw) > frames.RESULT_BYTES_MAX:
        return failed(
            "result-too-large", f"the tool's result has {len(raw)} bytes, at most {frames.RESULT_BYTES_MAX} fit"
        )
    return JobOutcome("completed", result=msgspec.Raw(raw), mended=mended)


def raised(error: BaseException) -> JobOutcome:
    """The tool raised."""
    return failed("tool-error", f"{type(error).__name__}: {error}")


def _text(message: str) -> str:
    """Any text as text that can be encoded, of bounded length."""
    clean = message[:MESSAGE_CHARACTERS_MAX].replace("\x00", json.REPLACEMENT)
    return clean.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _encode(value: Any) -> tuple[bytes, bool]:
    try:
        # Keys become text: of those that are written alike, such as 1 and "1", the last one counts.
        plain = msgspec.to_builtins(value, str_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise json.JsonProblem("$", str(error)[:200]) from error
    try:
        raw = json.dumps(plain)
    except json.JsonProblem:
        return _encode_mended(plain)
    if _SUSPECT.search(raw) or raw.count(b"[") + raw.count(b"{") > json.NESTING_MAX:
        return _encode_mended(plain)
    return raw, False


def _encode_mended(plain: Any) -> tuple[bytes, bool]:
    try:
        # The standard library keeps NaN and lone surrogates visible, so that `mend` can name or repair them.
        text = stdlib_json.dumps(plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise json.JsonProblem("$", str(error)[:200]) from error
    value, mended = json.mend(text)
    return json.dumps(value), mended
