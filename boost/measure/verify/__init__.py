"""`boost verify`: is it right, here, on these machines?

report.py        a check, its verdict, the table on the console, the report as JSON
process.py       what each process of the mesh does, check by check
devices.py       devices, drivers, interfaces: which process has which GPU
arithmetic.py    every collective function, forward and backward, against plain arithmetic
links.py         bandwidth and latency of every collective, against a hardware profile
layouts.py       every layout: losses, gradients and updates against one process
step.py          a timed step against its prediction
runs.py          whole runs: determinism, kills, hangs, signals, other meshes
"""
