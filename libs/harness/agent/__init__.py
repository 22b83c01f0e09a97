"""A stand-in for what we do not own: an upstream agent that speaks SSE, as well and as badly as real ones do."""

from harness.agent.server import Agent
from harness.agent.stream import Answer, Request, Script, Stream

__all__ = ["Agent", "Answer", "Request", "Script", "Stream"]
