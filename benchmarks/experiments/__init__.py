"""The code of the experiments and of the report."""
