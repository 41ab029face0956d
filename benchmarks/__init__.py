"""The evaluation: the paper's tables and figures, rerun, and a report of all results. It is not installed; run it in a checkout.

`python -m benchmarks` lists the experiments, whose command lines are the files in this folder and whose code is in experiments/.
The other files are scripts: soak tests (soak, recovery), saves (save_stall), collectives, the planner's fit (fit_record).
"""
