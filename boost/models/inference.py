"""Weights of a decoder on one process, stored as generation reads them fastest. The decoder knows nothing of it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from boost.models.decoder import Decoder
from boost.models.group import FusedLinearGroup


@torch.no_grad()
def prepare_inference(decoder: Decoder, batch: int) -> None:
    """Stores the weights of a model on one process as generation of `batch` sequences reads them fastest.

    Weights can then neither be trained nor saved. Matrices are cast to the activations' dtype, to which every forward pass would
    cast them; vectors (gains, biases) keep theirs, because they multiply in a wider one. On a CPU, weights of linears are packed,
    or, for single tokens in fp32, stored by columns where this is faster.
    """
    dtype = decoder.compute_dtype
    for parameter in decoder.parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.data.to(dtype)
    if not PackedWeight.is_supported(decoder.device, dtype) or not decoder.layout.grouping:
        return
    groups = [module for module in decoder.modules() if isinstance(module, FusedLinearGroup)]
    for module, name in [*((group, name) for group in groups for name in group.slices), (decoder, "head")]:
        weight = module.get_parameter(name)
        if batch > 1 or dtype != torch.float32:
            del module._parameters[name]
            setattr(module, name, PackedWeight(weight))
        elif name == "head" or name.startswith("B"):
            # The product with one token then adds O numbers at a time. A row-wise product of short rows, such as the r numbers of
            # a row of B, reaches half of the memory bandwidth of a CPU in fp32.
            weight.data = weight.data.t().contiguous().t()


class PackedWeight:
    """A copy of a weight [O, I] in the order in which oneDNN reads it on a CPU. To `F.linear`, it is a tensor.

    torch's own products take weights as they are, which takes 1.5 to 1.9 times as long for 16 tokens, and in bf16 also for one.
    """

    def __init__(self, weight: Tensor) -> None:
        self.shape, self.dtype = weight.shape, weight.dtype
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)

    @staticmethod
    def is_supported(device: torch.device, dtype: torch.dtype) -> bool:
        """Whether this build of torch and this machine can multiply packed weights."""
        if device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        return dtype in (torch.float32, torch.bfloat16) and hasattr(torch.ops.mkldnn, "_linear_pointwise")

    def to(self, dtype: torch.dtype) -> "PackedWeight":
        """Itself: a packed weight has the dtype of the activations."""
        assert dtype == self.dtype, "a packed weight has the dtype of the activations"
        return self

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Sequence[type], args: Sequence[Any], kwargs: Any = None
    ) -> Tensor:
        x, weight, *_ = args
        assert function is F.linear, "a packed weight can only be multiplied"
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight._packed, None, "none", [], "")
        return y
