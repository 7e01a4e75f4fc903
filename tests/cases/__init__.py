"""Faults that others have met in MoE software, grouped by kind.

Each test says in one sentence what went wrong elsewhere. The compiled block must do what the eager
block does, whether moeflex takes it or leaves it alone.
"""
