"""The relay: reads the event streams of followed runs, each from one process at a time, into the event log."""
