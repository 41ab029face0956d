"""`Decoder`: a LLaMA-style language model with low-rank linears, as an ordinary module.

Legend: B sequences, S tokens per sequence, V vocabulary size.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from boost.config import architecture
from boost.config.architecture import IGNORED
from boost.config.stages import whole
from boost.errors import ConfigError
from boost.models import decoder
from boost.models.block import interleave
from boost.models.fused import FusedModule, fused_params
from boost.models.group import Flow
from boost.models.init import initialize
from boost.nn.spec import Spec, autocast_resolved
from boost.nn.sublayers import Block, Weight, add_weight, as_spec
from boost.nn.weights import local_weight, no_sync, shard_weights, whole_weight


class Decoder(decoder.Decoder):
    """An embedding, `layers` `Block` modules, a final norm and a head.

        model = boost.nn.Decoder(vocab_size=32000, dim=512, heads=8, layers=8)        # CoLA, rank 128
        logits = model(tokens)                    # [B, S, V]
        model(tokens, targets).backward()         # mean cross-entropy, nats per token

    Under a layout (`mesh`), all TP ranks call the module with the same tokens; logits and losses are whole and equal on all ranks,
    and gradients are complete after `backward`. Weights depend only on (seed, parameter name), so they are equal on every mesh.
    """

    embedding: Weight
    layers: nn.ModuleList
    norm: Weight
    lm_head: Weight

    def __init__(self, spec: Spec | None = None, *, initialized: bool = True, **sizes: Any) -> None:
        """Built from a `Spec`, or from its arguments. With `initialized` = False, weights are left uninitialized, to be loaded.
        Raises ConfigError if the arguments are invalid."""
        FusedModule.__init__(self)
        self.spec = spec = as_spec(spec, sizes)
        self.model, self.layout, self.compute_dtype = spec.model, spec.layout, spec.compute_dtype
        self.stage = whole(spec.model)
        with spec.allocation():
            add_weight(self, spec, "embedding", architecture.embedding(spec.model))
            self.layers = nn.ModuleList(Block(spec, n, _alone=False) for n in range(spec.model.layers))
            add_weight(self, spec, "norm", architecture.final_norm(spec.model))
            add_weight(self, spec, "lm_head", architecture.head(spec.model))
        if initialized and spec.device.type != "meta":
            initialize(self, spec.seed)
        self._sums = shard_weights(self, spec)

    # A training run's decoder stores these as fused parameters.

    @property
    def blocks(self) -> nn.ModuleList:  # type: ignore[override]
        return self.layers

    @property
    def embed(self) -> Tensor:  # type: ignore[override]
        return local_weight(self.embedding)

    @property
    def final_norm(self) -> Tensor:  # type: ignore[override]
        return local_weight(self.norm)

    @property
    def head(self) -> Tensor:  # type: ignore[override]
        return local_weight(self.lm_head)

    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        document_ids: Tensor | None = None,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Tensor:
        """Logits, or the loss.

        Args:
            tokens: [B, S] int64.
            targets: [B, S] int64, the token that follows each token; -100 excludes a position from the loss. None: returns logits.
            document_ids: [B, S] int; a token attends only to earlier tokens in its own document.
            reduction: "mean" over targets, or "sum". Micro-batches with unequal numbers of targets need the sum: divide each loss
                by the number of targets, `(targets != -100).sum()`, over all micro-batches and replicas in the step.

        Returns:
            Logits [B, S, V] in compute_dtype, or the cross-entropy, a scalar in fp32 or wider, nats (per token). Under
            `torch.autocast`, its dtype replaces compute_dtype.

        Raises ConfigError if the layout shards tokens and TP does not divide their number.
        """
        if reduction not in ("mean", "sum"):
            raise ConfigError(f"reduction = '{reduction}' is unknown; valid values: mean, sum")
        with autocast_resolved(tokens.device, self.spec.compute_dtype) as self.compute_dtype:
            try:
                if targets is not None:
                    total: Tensor = super().forward(tokens, targets, document_ids)
                    return total if reduction == "sum" else total / (targets != IGNORED).sum().clamp_min(1)
                (part,) = self._parts(tokens, document_ids, (), False)
                (stream,) = self._run_blocks(self.layout, [part])
                flow = Flow(stream.x)
                interleave([self.layout.head_input(flow, self.final_norm)])
                return self.layout.all_logits(flow.x, self.head).view(*tokens.shape, -1)
            finally:
                self.compute_dtype = self.spec.compute_dtype  # generation reads it, outside of autocast

    def _parts(self, tokens_BS: Tensor, document_ids_BS: Tensor | None, received: Any, halves: bool) -> Any:
        count, size = tokens_BS.numel(), self.spec.tp.size
        if self.layout.spec.residual == "tokens" and count % size:
            raise ConfigError(
                f"tokens = {' x '.join(map(str, tokens_BS.shape))}: layout {self.spec.parallel.layout} cannot shard {count} tokens "
                f"evenly over {size} TP ranks; nearest valid number of tokens: {max(round(count / size), 1) * size}"
            )
        return super()._parts(tokens_BS, document_ids_BS, received, halves)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in this context do not sum partial gradients over TP; leaving it sums them once. For gradient
        accumulation, use it for all micro-batches in a step except the last. If the block raises, gradients are discarded."""
        return no_sync(self, self._sums)

    @torch.no_grad()
    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name in a checkpoint, unsharded tensor) for every parameter. Collective under TP and FSDP2: all ranks must
        iterate."""
        for fused in fused_params(self):
            (only,) = fused.slices
            yield only.parameter.name, whole_weight(fused.parameter.detach())
