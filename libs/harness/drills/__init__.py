"""Drills: cut an installation where it can be cut, prove that it was cut, and count what came of it.

Each scenario is a function of a `Scene` and stands once: `towline drill` and the tests in `tests/recovery` play it, and
it speaks to the installation through `target.Target`, so that it runs wherever an adapter exists.
"""
