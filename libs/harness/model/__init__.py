"""A stand-in for what we do not own: a model behind the OpenAI chat completions API, well behaved or not."""

from harness.model.server import Model, ModelRequest, repeated

__all__ = ["Model", "ModelRequest", "repeated"]
