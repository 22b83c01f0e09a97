"""What goes over the wire, as values (PURE): frames, API bodies, events, SSE."""
