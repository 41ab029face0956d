"""Implementation of the experiments and of the report."""
