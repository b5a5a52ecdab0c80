"""Measuring how fast a model runs: what to measure, the timed loops, and their statistics."""
