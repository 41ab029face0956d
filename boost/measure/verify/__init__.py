"""`boost verify`: checks that training works correctly on these machines.

report.py        checks, verdicts, console output, JSON report
process.py       runs the sections on each process of the mesh
devices.py       devices, drivers, network interfaces
collectives.py   every collective, against plain arithmetic; bandwidth and latency, against a hardware profile
layouts.py       every layout: losses, gradients and updates against one process
step.py          a timed step against its prediction
runs.py          full runs: determinism, kills, hangs, signals, resuming on another mesh
"""
