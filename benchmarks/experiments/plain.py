"""Dense and low-rank decoders in plain PyTorch modules for one process, without layout machinery.

Linears with the same input share a GEMM, as in BOOST. Latent crossing is not implemented. The decoders compute the same function
as `boost.models` without using its layers; tests check that the two agree.

Legend: B sequences, S tokens per sequence, D hidden width, R latent width, O output width, E head width, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from boost.config import Config, architecture
from boost.config.architecture import Parameter, Slot
from boost.config.schema import ModelConfig
from boost.measure.steps import made_up_batches
from boost.models.init import initial_value
from boost.optim.adamw import fused_adamw

Passes = Callable[[Tensor, Tensor], Tensor]
"""Forward and backward pass: (tokens [B, S], targets [B, S]) -> mean loss. Accumulates the gradients of that loss."""


EAGER, COMPILED, BLOCKS = FORMS = ("plain", "plain, compiled", "plain, compiled blocks")
"""PyTorch modules as they are, under one torch.compile with the loss, or with each block compiled."""


class PlainLinear(nn.Linear):
    """W x without bias, in the dtype of x. `fill` sets the weight."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__(d_in, d_out, bias=False)

    def reset_parameters(self) -> None:
        """Does nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class PlainEmbedding(nn.Embedding):
    """An embedding. `fill` sets the weight."""

    def reset_parameters(self) -> None:
        """Does nothing."""


class PlainRMSNorm(nn.Module):
    """torch's rms_norm, in the dtype of x."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class PlainLinears(nn.Module):
    """Linears with the same input, dense or low-rank, that share the first GEMM."""

    def __init__(self, model: ModelConfig, slots: Sequence[Slot]) -> None:
        super().__init__()
        self.slots, self.has_activation = slots, model.latent_act == "silu"
        self.ranks = [slot.linear.up_width for slot in slots if slot.linear.outer]
        self.outputs = [slot.d_out for slot in slots]
        if self.ranks:
            self.A = PlainLinear(slots[0].d_in, sum(self.ranks))
            self.B = nn.ModuleList(PlainLinear(r, o) for r, o in zip(self.ranks, self.outputs, strict=True))
        else:
            self.W = PlainLinear(slots[0].d_in, sum(self.outputs))

    def forward(self, x_BSD: Tensor) -> list[Tensor]:
        """Returns one [B, S, O] per linear."""
        if not self.ranks:
            y_BSO = self.W(x_BSD)
            return [y_BSO] if len(self.slots) == 1 else list(y_BSO.split(self.outputs, dim=-1))
        h_BSR = self.A(x_BSD)
        if self.has_activation:
            h_BSR = F.silu(h_BSR)
        latents = [h_BSR] if len(self.slots) == 1 else h_BSR.split(self.ranks, dim=-1)
        return [b(h) for b, h in zip(self.B, latents, strict=True)]

    def stored(self, prefix: str) -> Iterator[tuple[Tensor, tuple[Parameter, ...]]]:
        """Yields each weight and the parameters stacked in it."""

        def of(kind: architecture.MapKind) -> tuple[Parameter, ...]:
            return architecture.GroupSpec("", "", tuple(self.slots)).maps(prefix, kind)

        if not self.ranks:
            yield self.W.weight, of("weight")
            return
        yield self.A.weight, of("inner")
        for b, parameter in zip(self.B, of("outer"), strict=True):
            assert isinstance(b, PlainLinear)
            yield b.weight, (parameter,)


class PlainBlock(nn.Module):
    """Attention and gated MLP."""

    def __init__(self, model: ModelConfig, layer: int) -> None:
        super().__init__()
        self.head_dim, self.mlp_silu = model.head_dim, model.mlp_silu
        self.attn_norm, self.mlp_norm = PlainRMSNorm(model.dim, model.norm_eps), PlainRMSNorm(model.dim, model.norm_eps)
        shapes = architecture.groups(model, layer)
        self.qkv, self.o, self.gate_up, self.down = (PlainLinears(model, shape.slots) for shape in shapes)

    def forward(self, x_BSD: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
        q, k, v = (self._heads(y_BSO) for y_BSO in self.qkv(self.attn_norm(x_BSD)))
        q, k = _rotate(q, cos_SE, sin_SE), _rotate(k, cos_SE, sin_SE)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        x_BSD = x_BSD + self.o(a.transpose(1, 2).flatten(2))[0]
        gate, up = self.gate_up(self.mlp_norm(x_BSD))
        return x_BSD + self.down((F.silu(gate) if self.mlp_silu else gate) * up)[0]

    def _heads(self, y_BSO: Tensor) -> Tensor:
        return y_BSO.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class PlainDecoder(nn.Module):
    """Embedding, blocks, final norm, head: tokens [B, S] -> logits [B, S, V]. `fill` sets the weights."""

    cos_SE: Tensor
    sin_SE: Tensor

    def __init__(self, model: ModelConfig, seq_len: int, dtype: torch.dtype) -> None:
        """Computes in `dtype` on sequences of up to `seq_len` tokens. Raises ValueError for a family with other mathematics."""
        super().__init__()
        if not architecture.is_usual(model):
            raise ValueError("only usual linears are implemented in plain modules; use model.family dense, svd or cola")
        self.model, self.dtype = model, dtype
        self.embed = PlainEmbedding(model.vocab_size, model.dim)
        self.blocks = nn.ModuleList(PlainBlock(model, layer) for layer in range(model.layers))
        self.final_norm = PlainRMSNorm(model.dim, model.norm_eps)
        self.head = PlainLinear(model.dim, model.vocab_size)
        half = torch.arange(0, model.head_dim, 2, dtype=torch.float64) / model.head_dim
        angles_SE = torch.outer(torch.arange(seq_len, dtype=torch.float64), model.rope_theta**-half).repeat(1, 2)
        self.register_buffer("cos_SE", angles_SE.cos().to(dtype), persistent=False)
        self.register_buffer("sin_SE", angles_SE.sin().to(dtype), persistent=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return self.head(self.hidden(tokens_BS))

    def hidden(self, tokens_BS: Tensor) -> Tensor:
        """The input of the head, [B, S, D]."""
        x_BSD = self.embed(tokens_BS).to(self.dtype)
        length = tokens_BS.shape[1]
        cos_SE, sin_SE = self.cos_SE[:length], self.sin_SE[:length]
        for block in self.blocks:
            x_BSD = block(x_BSD, cos_SE, sin_SE)
        return self.final_norm(x_BSD)

    def stored(self) -> Iterator[tuple[Tensor, tuple[Parameter, ...]]]:
        """Yields each weight and the model parameters stacked in it along dim 0."""
        yield self.embed.weight, (architecture.embedding(self.model),)
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, PlainBlock)
            for name in ("attn_norm", "mlp_norm"):
                parameter = Parameter(f"layers.{layer}.{name}", (self.model.dim,), "norm")
                yield getattr(block, name).weight, (parameter,)
            for group in (block.qkv, block.o, block.gate_up, block.down):
                yield from group.stored(f"layers.{layer}")
        yield self.final_norm.weight, (architecture.final_norm(self.model),)
        yield self.head.weight, (architecture.head(self.model),)


def build_plain(config: Config, device: torch.device) -> PlainDecoder:
    """A plain decoder with BOOST's initial weights in train.param_dtype, computing in train.compute_dtype."""
    train = config.train
    usual = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, train.param_dtype))
    try:
        with device:
            module = PlainDecoder(config.model, train.seq_len, getattr(torch, train.compute_dtype))
    finally:
        torch.set_default_dtype(usual)
    fill(module, train.seed)
    return module


@torch.no_grad()
def fill(module: PlainDecoder, seed: int) -> None:
    """Sets every weight to its initial value in `boost.models.init`."""
    for weight, parameters in module.stored():
        values = [initial_value(parameter, module.model, seed) for parameter in parameters]
        weight.copy_(torch.cat(values))


class PlainStep:
    """An optimizer step of a plain training loop, on the same tokens as `steps.Stepper`: forward and backward passes over
    micro-batches, clipping by global norm, and PyTorch's fused AdamW."""

    def __init__(self, module: nn.Module, passes: Passes, config: Config, device: torch.device) -> None:
        self.module, self.passes, self.limit = module, passes, config.optim.clip
        self.batches = [
            (torch.from_numpy(batch.tokens).to(device), torch.from_numpy(batch.targets).to(device))
            for batch in made_up_batches(config)
        ]
        # Sharded and replicated weights cannot share a fused kernel or norm computation.
        self.kinds = [kind for kind in _by_kind(module.named_parameters()) if kind]
        groups = [
            {"params": group, "weight_decay": decay}
            for kind in self.kinds
            for group, decay in _by_decay(kind, config)
            if group
        ]
        self.optimizer = fused_adamw(groups, config.optim)

    def __call__(self) -> list[Tensor]:
        """Runs one step. Returns the mean loss before it and the global gradient norm before clipping."""
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        for tokens_BS, targets_BS in self.batches:
            losses.append(self.passes(tokens_BS, targets_BS))
        parameters = [[weight for _, weight in kind] for kind in self.kinds]
        norms = []
        for weights in parameters:
            gradients = [weight.grad for weight in weights if weight.grad is not None]
            if len(self.batches) > 1:
                torch._foreach_div_(gradients, len(self.batches))
            norms.append(whole(nn.utils.get_total_norm(gradients)))
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if self.limit:
            for weights in parameters:
                nn.utils.clip_grads_with_norm_(weights, self.limit, norm)
        self.optimizer.step()
        return [torch.stack(losses).mean(), norm]


def plain_step(config: Config, device: torch.device, form: str = EAGER) -> PlainStep:
    """The training step of a plain decoder on one process, in one of `FORMS`. The compiled forms fuse the loss with the head."""
    module = build_plain(config, device)

    def loss_of(tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        if form == EAGER:
            return mean_loss(module(tokens_BS), targets_BS)
        return fused_loss(module.hidden(tokens_BS), module.head.weight, targets_BS)

    if form == BLOCKS:
        for block in module.blocks:
            block.compile()
    compiled: Passes = torch.compile(loss_of) if form == COMPILED else loss_of

    def passes(tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        loss = compiled(tokens_BS, targets_BS)
        loss.backward()
        return loss.detach()

    return PlainStep(module, passes, config, device)


def fused_loss(x_BSD: Tensor, weight_VD: Tensor, targets_BS: Tensor) -> Tensor:
    """Mean cross-entropy in nats in the dtype of x, without all logits in memory. Its gradients are as good as in fp32."""
    x_TD, targets_T, weight_VD = x_BSD.flatten(0, 1), targets_BS.flatten(), weight_VD.to(x_BSD.dtype)
    options = torch.nn.LinearCrossEntropyOptions()
    loss: Tensor = F.linear_cross_entropy(x_TD, weight_VD, targets_T, options=options)
    return loss


def mean_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Mean cross-entropy in nats, computed in fp32 (fp64 for fp64 logits)."""
    acc_dtype = torch.promote_types(logits_BSV.dtype, torch.float32)
    return F.cross_entropy(logits_BSV.flatten(0, 1).to(acc_dtype), targets_BS.flatten())


def whole(x: Tensor) -> Tensor:
    """The full tensor of a DTensor; other tensors unchanged."""
    return x.full_tensor() if isinstance(x, DTensor) else x


ENDS = ("embed", "embed_tokens", "head", "lm_head")
"""Modules outside the blocks, here and in transformers."""

Named = list[tuple[str, nn.Parameter]]


def _by_kind(named: Iterator[tuple[str, nn.Parameter]]) -> tuple[Named, Named]:
    """(sharded parameters, other parameters)."""
    everything = list(named)
    return [n for n in everything if isinstance(n[1], DTensor)], [
        n for n in everything if not isinstance(n[1], DTensor)
    ]


def _by_decay(kind: Named, config: Config) -> Iterator[tuple[list[nn.Parameter], float]]:
    """Yields parameters with weight decay (matrices of the blocks, or all), then those without."""

    def decays(name: str, weight: nn.Parameter) -> bool:
        return config.optim.decay_on == "all" or (weight.ndim == 2 and name.split(".")[-2] not in ENDS)

    yield [w for name, w in kind if decays(name, w)], config.optim.weight_decay
    yield [w for name, w in kind if not decays(name, w)], 0.0


def _rotate(x_BHSE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
    """Rotary embedding in the rotate-half form."""
    first, second = x_BHSE.chunk(2, dim=-1)
    return x_BHSE * cos_SE + torch.cat((-second, first), dim=-1) * sin_SE
