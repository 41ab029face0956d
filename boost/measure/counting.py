"""Records the collectives that run, at the dispatcher, for tests and inspection. The collective table lists the expected
collectives."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from boost.config.traffic import Collective

KINDS = {
    "_c10d_functional::all_reduce": "all-reduce",
    "_c10d_functional::all_reduce_": "all-reduce",
    "_c10d_functional::all_gather_into_tensor": "all-gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce-scatter",
    "_c10d_functional::all_to_all_single": "all-to-all",
    "boost::all_reduce": "all-reduce",
    "boost::all_gather": "all-gather",
    "boost::reduce_scatter": "reduce-scatter",
    "boost::all_to_all": "all-to-all",
}
"""Kind of each functional collective in torch and in `boost.parallel.collectives`."""

_PLAIN = {"_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter"}
"""Kind of each non-functional collective that fully_shard issues."""


class CollectiveCounter(TorchDispatchMode):
    """Records every collective and send issued while it is active, in both passes. Set `phase` to label later records.

    Collectives on the groups named in `step_groups` belong to the optimizer step, even if they run during a backward pass.
    """

    def __init__(self, step_groups: Sequence[str] = ()) -> None:
        super().__init__()
        self.phase = "forward"
        self.step_groups = step_groups
        self.collectives: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = func._schema.name
        namespace, _, name = operation.partition("::")
        if operation in KINDS:
            tensor, group_name = args[0], args[-1]
            processes = torch.distributed.distributed_c10d._resolve_process_group(group_name).size()
            gathered = (processes,) if KINDS[operation] == "all-gather" else ()
            phase = "step" if group_name in self.step_groups else self.phase
            self._record(phase, KINDS[operation], (*gathered, *tensor.shape), tensor, processes)
        elif namespace == "c10d" and name in _PLAIN:
            whole, part = sorted((args[0], args[1]), key=torch.Tensor.numel, reverse=True)
            if whole.numel() > part.numel():  # skip groups with one process
                self._record(self.phase, _PLAIN[name], whole.shape, whole, whole.numel() // part.numel())
        elif namespace == "c10d" and name == "send":
            self._record(self.phase, "send", args[0][0].shape, args[0][0], 2)
        return func(*args, **(kwargs or {}))

    def _record(self, phase: str, kind: str, shape: Sequence[int], tensor: torch.Tensor, processes: int) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.collectives.append(Collective(phase, kind, tuple(shape), dtype, processes))
