"""What collectives really ran, seen at the dispatcher. For tests and inspection: the table says what ought to."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from boost.config.traffic import Collective

_KINDS = {
    "all_reduce": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "all-to-all",
}


class CollectiveCounter(TorchDispatchMode):
    """Records every functional collective issued while it is active, forward and backward. Set `phase` to label them."""

    def __init__(self, phase: str = "forward") -> None:
        super().__init__()
        self.phase = phase
        self.collectives: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "_c10d_functional" and name in _KINDS:
            tensor, group_name = args[0], args[-1]
            processes = torch.distributed.distributed_c10d._resolve_process_group(group_name).size()
            elements = tensor.numel() * (processes if name == "all_gather_into_tensor" else 1)
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.collectives.append(Collective(self.phase, _KINDS[name], elements, dtype, processes))
        return func(*args, **(kwargs or {}))
