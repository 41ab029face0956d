"""Measurements: memory of a step, speed of a machine, predicted versus measured steps."""
