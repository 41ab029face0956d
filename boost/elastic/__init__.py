"""In-step recovery (run.recovery = "in-step"): a run continues when it loses a replica, which rejoins once it is restarted.

session.py     one process's part in such a run; `boost.train.run` chooses it
recovery.py    operations, who trains, and what happens when that changes
membership.py  the protocol by which replicas agree on it, through a store
groups.py      process groups whose collectives can be abandoned
mesh.py        a mesh whose replicas change
trainer.py     the trainer with its gradients, steps and saves; optimizer.py, hooks.py
beats.py       who responds; supervise.py: the launcher's part

Nothing outside this package knows of it, except where run.recovery is read. docs/recovery.md explains the design.
"""
