"""`boost verify`: checks that training works correctly on these machines.

report.py        checks, verdicts, console output, JSON report
process.py       runs the sections on each process of the mesh
devices.py       devices, drivers, network interfaces
arithmetic.py    every collective, forward and backward, against plain arithmetic
links.py         bandwidth and latency of every collective, against a hardware profile
layouts.py       every layout: losses, gradients and updates against one process
step.py          a timed step against its prediction
runs.py          full runs: determinism, kills, hangs, signals, resuming on another mesh
"""
