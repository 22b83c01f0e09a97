"""Drills: cut an installation where it can be cut, prove that it was cut, and count what came of it.

Each scenario is a function of a `Scene` and stands once: `towline drill` and `tests/recovery/test_drills.py` both play
it. Scenarios speak to the installation through `target.Target`, so that they run wherever an adapter exists.
"""
