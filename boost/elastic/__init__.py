"""In-step recovery (run.recovery = "in-step"): the run survives the loss of a replica, which rejoins after a restart.

session.py     how one process takes part in such a run; `boost.train.run` chooses it
recovery.py    collective operations, and recovery when replicas are lost or rejoin
membership.py  the protocol by which replicas agree on the membership, through a store
groups.py      process groups whose collectives can be abandoned
mesh.py        a mesh whose replicas change
step.py        the step: gradients that can be summed again; optimizer.py, hooks.py
beats.py       tracks which processes respond; supervise.py: the launcher's part

No code outside this package depends on it, except where run.recovery is read. docs/recovery.md explains the design.
"""
