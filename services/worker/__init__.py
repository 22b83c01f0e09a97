"""The worker: holds users' WebSockets and delivers their jobs."""
