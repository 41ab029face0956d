"""Reproduces the paper's tables and figures and builds a report of all results. Not installed: run it from a checkout.

`python -m benchmarks` lists the experiments. Each has a command-line file in this folder and its code in experiments/.
The other files are standalone scripts: soak tests (soak, recovery), checkpoint stalls (save_stall), bare collectives
(collectives), `boost.nn` overhead (library), and fitting the planner (fit_record).
"""
