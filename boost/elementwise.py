"""Which functions of torch are element-wise: what the planner must be told about a family's own activation.

It imports nothing, so that a plugin that declares one does not load the planner.
"""

from typing import Any

ELEMENTWISE: dict[str, bool] = {}
"""By name, so that `F.relu`, `torch.relu` and `x.relu()` are one: whether autograd saves the result instead of the input."""


def elementwise_rule(function: Any, backward: Any = None, saves_result: bool = False) -> None:
    """Tells the planner that a function of torch works on each element: one pass over memory, as fast as SiLU's. Its gradient is
    another pass, for which autograd saves its input, or if `saves_result` its result (relu, sigmoid, tanh, exp).

    `backward`: the function that a hand-written backward pass calls, such as `torch.ops.aten.gelu_backward`.
    """
    ELEMENTWISE[function.__name__] = saves_result
    if backward is not None:
        ELEMENTWISE[backward.__name__] = False
