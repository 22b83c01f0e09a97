"""The laptop's side: dial out, run tools, remember what was run. Embed it with `Sidecar` and `tool`."""

from towline.sidecar.app import ConfigurationError, Sidecar
from towline.sidecar.state import StateUnusable
from towline.sidecar.tools import ToolError, tool

__all__ = ["ConfigurationError", "Sidecar", "StateUnusable", "ToolError", "tool"]
