"""Reproduces the paper's tables and figures and reports all results. This package is not installed; run it from a checkout.

`python -m benchmarks` lists the experiments, which are in experiments/. There are also standalone scripts: soak tests (soak,
recovery) and GPU checks (gpu/).
"""
