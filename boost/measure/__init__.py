"""Measurements: memory of a step, the speed of a machine, predictions against measured steps."""
