"""Reproduces the paper's tables and figures and builds a report of all results. It is not installed; run it from a checkout.

`python -m benchmarks` lists the experiments, which are in experiments/. The other files are standalone scripts: soak tests (soak,
recovery) and tasks from held-out text (local_tasks).
"""
