"""Towline's published package: wire formats, HTTP client, laptop sidecar and command line."""

__version__ = "0.1.0"
