"""Soak: randomised, reproducible runs on real processes, whose whole history is held against the promises G1-G6.

One seed decides every submission, retry, cancel, read, run, watcher and fault beforehand (`plan`). `load`, `following`
and `nemesis` carry them out, `witness` collects what machines, workers and stores say, everything goes into one file of
JSON lines (`history`), and the checker, which is pure and can be run again on that file, finds what broke a promise.
"""
