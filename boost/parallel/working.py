"""Working copies: weights in the dtype of activations, which replace the modules' parameters during forward and backward
passes."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from boost.config import Config
from boost.layouts import spec_of
from boost.models.fused import FusedModule


class WorkingCopies:
    """Casts weights once per step, and accumulates gradients of the copies into those of the weights:

        reducer.begin(micro_batches)
        with copies.in_use():
            for each micro-batch:
                loss.backward()
        reducer.finish()

    Copies are leaves, so autograd accumulates the gradients of all uses within one pass in the dtype of activations. Gradients
    of micro-batches are accumulated in the dtype of the weights.
    """

    def __init__(self, model: nn.Module, config: Config, accumulated: Callable[[nn.Parameter], None]) -> None:
        """Selects the parameters of a model, or of its pipeline stages, that get a copy under `config`.

        `accumulated` is called whenever the gradient of a pass has been added to that of a parameter, because autograd does not
        call the parameter's own hooks.
        """
        self._dtype, self._accumulated = getattr(torch, config.train.compute_dtype), accumulated
        self._places = [
            (module, name)
            for module in (model.modules() if config.has_working_copies else ())
            if isinstance(module, FusedModule)
            for name, slices in module.slices.items()
            if spec_of(config.parallel).may_have_copy(slices[0].parameter.role)
        ]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context in which modules hold copies of the current weights, for forward and backward passes including recomputation."""
        weights = [module.get_parameter(name) for module, name in self._places]
        copies = [nn.Parameter(torch.empty_like(w, dtype=self._dtype), w.requires_grad) for w in weights]
        if copies:
            with torch.no_grad():
                torch._foreach_copy_(list[Tensor](copies), list[Tensor](weights))
        for weight, copy in zip(weights, copies, strict=True):
            if weight.requires_grad:
                copy.register_post_accumulate_grad_hook(functools.partial(self._add_gradient, weight))
        try:
            self._put(copies)
            yield
        finally:
            self._put(weights)

    def _put(self, parameters: list[nn.Parameter]) -> None:
        for (module, name), parameter in zip(self._places, parameters, strict=True):
            setattr(module, name, parameter)

    @torch.no_grad()
    def _add_gradient(self, weight: nn.Parameter, copy: Tensor) -> None:
        assert copy.grad is not None
        if weight.grad is None:
            weight.grad = copy.grad.to(weight.dtype)
        else:
            weight.grad.add_(copy.grad)  # mixed dtypes, in one kernel
        copy.grad = None
        self._accumulated(weight)
