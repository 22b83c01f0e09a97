"""Benches: this product beside simpler systems on the same machine, in the same run.

`jobs` holds the rows, `peers` and `ours` what is measured, `load` the load generator, `figures` the arithmetic.
"""
