"""The worker: holds users' WebSockets, delivers their jobs, and runs turns."""
