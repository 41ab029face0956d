"""`Decoder`: a LLaMA-style language model of low-rank linears as an ordinary module.

Legend: B sequences, S tokens of each, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from boost.config import architecture
from boost.config.architecture import IGNORED, Parameter
from boost.config.stages import whole
from boost.models import decoder
from boost.models.fused import FusedModule, fused_params
from boost.models.init import initialize
from boost.models.interface import interleave
from boost.nn.gradients import reduce_partial_gradients
from boost.nn.spec import Spec
from boost.nn.sublayers import Block, Norm, add_norm, as_spec
from boost.parallel import collectives


class Table(nn.Module):
    """A weight of V rows, or of this process's: the embedding, or the head."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.weight.shape))


class Decoder(decoder.Decoder):
    """Embedding, `layers` of `Block`, final norm and head.

        model = boost.nn.Decoder(vocab_size=32000, dim=512, heads=8, layers=8)        # CoLA, rank 128
        logits = model(tokens)                    # [B, S, V]
        model(tokens, targets).backward()         # mean cross-entropy, nats per token

    Under a layout (`mesh`), all TP ranks call it with the same tokens; logits and losses are whole and equal on all of them, and
    gradients are complete after `backward`. Weights are a function of (seed, parameter name): the same on every mesh.
    """

    embedding: Table
    layers: nn.ModuleList
    norm: Norm
    lm_head: Table

    def __init__(self, spec: Spec | None = None, *, initialized: bool = True, **sizes: Any) -> None:
        """From a `Spec`, or from what `Spec` takes. `initialized` = False leaves the weights to be loaded. Raises ConfigError."""
        FusedModule.__init__(self)
        self.spec = spec = as_spec(spec, sizes)
        self.model, self.layout, self.compute_dtype = spec.model, spec.layout, spec.compute_dtype
        self.stage = whole(spec.model)
        with spec.allocation():
            self._add_table("embedding", architecture.embedding(spec.model))
            self.layers = nn.ModuleList(Block(spec, n, _alone=False) for n in range(spec.model.layers))
            add_norm(self, spec, "norm", architecture.final_norm(spec.model))
            self._add_table("lm_head", architecture.head(spec.model))
        if initialized and spec.device.type != "meta":
            initialize(self, spec.seed)
        self._partial = reduce_partial_gradients(self, spec.tp)

    def _add_table(self, attribute: str, parameter: Parameter) -> None:
        self.add_module(attribute, Table(self.spec.local_shape(parameter)))
        self.describe_child(f"{attribute}.weight", parameter, self.layout)

    # What the decoder of a run has as fused parameters.

    @property
    def blocks(self) -> nn.ModuleList:  # type: ignore[override]
        return self.layers

    @property
    def embed(self) -> Tensor:  # type: ignore[override]
        return self.embedding.weight

    @property
    def final_norm(self) -> Tensor:  # type: ignore[override]
        return self.norm.weight

    @property
    def head(self) -> Tensor:  # type: ignore[override]
        return self.lm_head.weight

    def forward(  # type: ignore[override]
        self, tokens: Tensor, targets: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        """Logits, or the mean loss.

        Args:
            tokens: [B, S] int64.
            targets: [B, S] int64, the token that follows each; -100 where there is no loss. None: returns logits.
            document_ids: [B, S] int; a token then attends to earlier tokens of its own document only.

        Returns:
            Logits [B, S, V] in compute_dtype, or the mean cross-entropy over targets, a scalar in fp32 or wider, nats per token.
        """
        if targets is not None:
            total: Tensor = super().forward(tokens, targets, document_ids)
            return total / (targets != IGNORED).sum().clamp_min(1)
        (part,) = self._parts(tokens, document_ids, (), False)
        (stream,) = self._run_blocks(self.layout, [part])
        (logits_TV,) = interleave([self.layout.all_logits(stream.x, self.final_norm, self.head)])
        return logits_TV.view(*tokens.shape, -1)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in this context do not sum partial gradients over TP; the next one outside of it does, for all of them.
        For gradient accumulation: all micro-batches of a step but the last."""
        return self._partial.deferred() if self._partial is not None else nullcontext()

    @torch.no_grad()
    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of every parameter, unsharded, by its name in a checkpoint. Collective under TP: all ranks iterate."""
        for fused in fused_params(self):
            dim = fused.placement.dim
            for each in fused.slices:
                own = each.view(fused.parameter).detach()
                if dim is None or self.spec.tp.size == 1:
                    yield each.parameter.name, own
                    continue
                gathered = collectives.all_gather(own, self.spec.tp)
                yield each.parameter.name, torch.cat(gathered.chunk(self.spec.tp.size), dim=dim)
