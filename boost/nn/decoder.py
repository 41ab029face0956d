"""`Decoder`: a LLaMA-style language model with low-rank linears, as an ordinary module.

Legend: B sequences, S tokens per sequence, V vocabulary size.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from boost.config import architecture
from boost.config.architecture import IGNORED
from boost.config.stages import whole
from boost.errors import ConfigError
from boost.models import decoder
from boost.models.attention import KVCache
from boost.models.block import interleave
from boost.models.fused import FusedModule
from boost.models.init import initialize
from boost.models.interface import Flow
from boost.nn.plain import EMBEDDING, call, difference, is_read, stored_parameters
from boost.nn.spec import Spec, autocast_resolved
from boost.nn.sublayers import Block, LowRankAttention, WrappedBlock, add_norm, as_spec, uninitialized_linear
from boost.nn.weights import local_weight, once_differentiable, shard_weights, whole_weight


class Decoder(decoder.Decoder):
    """An embedding, `layers` `Block` modules, a final norm and a head.

        model = boost.nn.Decoder(vocab_size=32000, dim=512, heads=8, layers=8)        # CoLA, rank 128
        logits = model(tokens)                    # [B, S, V]
        model(tokens, targets).backward()         # mean cross-entropy, nats per token

    Under a layout (`mesh`), all TP ranks call the module with the same tokens; logits and losses are whole and equal on all ranks,
    and gradients are complete after `backward`. Weights depend only on (seed, parameter name), so they are equal on every mesh.
    """

    embedding: nn.Embedding
    layers: nn.ModuleList
    norm: nn.RMSNorm
    lm_head: nn.Linear

    def __init__(self, spec: Spec | None = None, *, initialized: bool = True, **sizes: object) -> None:
        """Built from a `Spec`, or from its arguments. With `initialized` = False, weights are left uninitialized, to be loaded.
        Raises ConfigError if the arguments are invalid."""
        FusedModule.__init__(self)
        self.spec = spec = as_spec(spec, sizes)
        self.model, self.layout = spec.model, spec.layout
        self.stage = whole(spec.model)
        self._autocast_dtype: torch.dtype | None = None
        self._batch = 1
        """Number of sequences; generation packs them into one."""
        table, head = architecture.embedding(spec.model), architecture.head(spec.model)
        with spec.allocation():
            self.embedding = nn.Embedding.from_pretrained(torch.empty(spec.local_shape(table)), freeze=False)
            self.describe_child("embedding.weight", table, spec.layout)
            self.layers = nn.ModuleList(Block(spec, n, _alone=False) for n in range(spec.model.layers))
            add_norm(self, spec, architecture.final_norm(spec.model))
            self.lm_head = uninitialized_linear(spec, head)
            if not spec.model.tied:
                self.describe_child("lm_head.weight", head, spec.layout)
        if initialized and spec.device.type != "meta":
            initialize(self, spec.seed)
        self._sums = shard_weights(self, spec)
        self.register_load_state_dict_pre_hook(_require_one_table)
        self.register_load_state_dict_post_hook(_tie)
        self._ties_after_load = False
        if spec.model.tied:
            self.lm_head.weight = self.embedding.weight
            if "gradient_sums" in vars(self.embedding):
                vars(self.lm_head)["gradient_sums"] = vars(self.embedding)["gradient_sums"]

    # A training run's decoder stores these as fused parameters.

    @property
    def blocks(self) -> list[Block | WrappedBlock]:  # type: ignore[override]
        return [block if isinstance(block, Block) else WrappedBlock(block) for block in self.layers]

    @property
    def embed(self) -> Tensor:  # type: ignore[override]
        return self._weight("embedding", nn.Embedding, EMBEDDING)

    @property
    def final_norm(self) -> Tensor:  # type: ignore[override]
        return self._weight("norm", nn.RMSNorm, {"eps": self.model.norm_eps})

    @property
    def head(self) -> Tensor:  # type: ignore[override]
        return self._weight("lm_head", nn.Linear, {})

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding, as built or made so afterwards."""
        return self.lm_head._parameters.get("weight") is self.embedding._parameters.get("weight", 0)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As of any module, such as for `to_empty`, which makes two parameters of one that modules share."""
        is_tied = self.is_tied
        super()._apply(fn, recurse)
        if is_tied:
            self.lm_head.weight = self.embedding.weight
        return self

    def _weight(self, name: str, kind: type[nn.Module], options: dict[str, Any]) -> Any:
        """The weight of a plain module, or else, for `OneProcess`, a function that calls the module."""
        module = cast(nn.Module, self._modules[name])
        what = difference(module, kind, **options)
        if is_read(what and f"{name} {what}", self.spec.tp.size):
            return local_weight(module)
        return functools.partial(call, module, batch=self._batch)

    @property
    def compute_dtype(self) -> torch.dtype:  # type: ignore[override]
        """Dtype of activations: autocast's in its context, else the spec's or, if it has none, that of the weights."""
        if known := self._autocast_dtype or self.spec.compute_dtype:
            return known
        weight: Tensor | None = getattr(self.embedding, "weight", None)
        return next(self.parameters()).dtype if weight is None else weight.dtype

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
            document_ids: [B, S] int; a token attends only to earlier tokens in its own document, a run of equal ids.
            reduction: "mean" over targets, or "sum". Micro-batches with unequal numbers of targets need the sum: divide each loss
                by the number of targets, `(targets != -100).sum()`, over all micro-batches and replicas in the step, and multiply
                it by the number of replicas, over which DDP and FSDP2 average gradients.

        Returns:
            Logits [B, S, V] in compute_dtype, or the cross-entropy, a scalar in fp32 or wider, nats (per token). Under
            `torch.autocast`, its dtype replaces compute_dtype.

        Raises ConfigError if the layout shards tokens and TP does not divide their number, or if something attached to a module
        has no meaning over TP ranks; IndexError for targets outside the vocabulary (on GPUs and in compiled code, an assertion).
        """
        if reduction not in ("mean", "sum"):
            raise ConfigError(f"reduction = '{reduction}' is unknown; valid values: mean, sum")
        if self.spec.tp.size > 1 and self.is_tied != self.model.tied:
            raise ConfigError(
                f"lm_head.weight {'is' if self.is_tied else 'is not'} embedding.weight, but the decoder was built with tied = "
                f"{self.model.tied}, and layouts shard them differently over TP ranks; build it with tied = {self.is_tied}"
            )
        for name, given in (("targets", targets), ("document_ids", document_ids)):
            if given is not None and given.shape != tokens.shape:
                raise ConfigError(
                    f"{name} has shape {list(given.shape)}, but tokens has {list(tokens.shape)}; pass one for each token"
                )
        if targets is not None:
            _check_targets(targets, self.model.vocab_size)
        self._batch = tokens.shape[0]
        with autocast_resolved(tokens.device, self.compute_dtype) as self._autocast_dtype:
            try:
                if targets is not None:
                    total: Tensor = super().forward(tokens, targets, document_ids)
                    loss = total if reduction == "sum" else total / (targets != IGNORED).sum().clamp_min(1)
                    return once_differentiable(loss)
                (part,) = self._parts(tokens, document_ids, (), False)
                (stream,) = self._run_blocks(self.layout, [part])
                flow = Flow(stream.x)
                interleave([self.layout.head_input(flow, self.final_norm)])
                return once_differentiable(self.layout.all_logits(flow.x, self.head).view(*tokens.shape, -1))
            finally:
                self._autocast_dtype, self._batch = None, 1  # generation reads them

    def _parts(self, tokens_BS: Tensor, document_ids_BS: Tensor | None, received: Any, halves: bool) -> Any:
        count, size = tokens_BS.numel(), self.spec.tp.size
        if self.layout.spec.residual == "tokens" and count % size:
            raise ConfigError(
                f"tokens = {' x '.join(map(str, tokens_BS.shape))}: layout {self.spec.parallel.layout} cannot shard {count} tokens "
                f"evenly over {size} TP ranks; nearest valid number of tokens: {max(round(count / size), 1) * size}"
            )
        return super()._parts(tokens_BS, document_ids_BS, received, halves)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this context do not sum partial gradients over TP; leaving it sums them once. For gradient
        accumulation, use it for all micro-batches in a step except the last. If the block raises, gradients are discarded,
        because other ranks may not reach a collective."""
        before, self._sums.is_deferred = self._sums.is_deferred, True
        try:
            yield
        except BaseException:
            self.zero_grad()
            raise
        finally:
            self._sums.is_deferred = before
        for parameter in self.parameters() if not before else ():
            if isinstance(gradient := parameter.grad, DTensor) and isinstance(parameter, DTensor):
                parameter.grad = gradient.redistribute(placements=parameter.placements)  # a no-op if nothing is partial

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name in a checkpoint, unsharded tensor) for every parameter. Collective under TP and FSDP2: all ranks must
        iterate. Raises ConfigError if weights alone do not tell what this module computes, such as with adapters."""
        for name, parameter in self.stored_parameters().items():
            yield name, whole_weight(parameter.detach())

    def stored_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by name in a checkpoint. One that modules share has several. Raises ConfigError as `whole_parameters`."""
        spec = copy.copy(self.spec)
        spec.device, spec.model = torch.device("meta"), spec.model.model_copy(update={"tied": self.is_tied})
        return stored_parameters(self, Decoder(spec), is_copy=False)

    def make_caches(self, batch: int, capacity: int) -> tuple[KVCache, ...]:
        parts = self.layers.named_modules(remove_duplicate=False)
        numbers = [part.layer for _, part in parts if isinstance(part, LowRankAttention)]
        if sorted(numbers) != list(range(len(self.layers))):  # blocks or attn were shared, added or removed
            raise ConfigError(
                f"attn.layer of the layers is {numbers}, but each needs a cache for generation; copy shared modules, and set "
                "attn.layer to the index in layers"
            )
        return super().make_caches(batch, capacity)


def _require_one_table(module: Decoder, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Refuses to load two tables into a tied decoder: only the head's would stay."""
    module._ties_after_load = module.is_tied
    tables: list[Any] = [state.get(f"{prefix}{name}.weight") for name in ("embedding", "lm_head")]
    is_plain = all(isinstance(x, Tensor) and not isinstance(x, DTensor) and not x.is_meta for x in tables)
    if module.is_tied and is_plain and not torch.equal(*tables):
        rest[-1].append(
            "embedding.weight and lm_head.weight differ, but the decoder is tied; build it with tied = False"
        )


def _tie(module: Decoder, _: object) -> None:
    """After `load_state_dict(assign=True)`, which makes two parameters of one that modules share."""
    if module._ties_after_load:
        module.lm_head.weight = module.embedding.weight


def _check_targets(targets: Tensor, vocabulary: int) -> None:
    """Raises IndexError as `F.cross_entropy` does or, where the host would have to wait for the values, asserts on the device."""
    said = f"is out of bounds: valid are 0 to {vocabulary - 1}, and {IGNORED}"
    wrong = (targets >= vocabulary) | ((targets < 0) & (targets != IGNORED))
    if type(targets) is Tensor and targets.device.type == "cpu" and not torch.compiler.is_compiling():
        if wrong.any():
            raise IndexError(f"target {int(targets[wrong][0])} {said}")
    else:
        torch._assert_async(~wrong.any(), f"a target {said}")
