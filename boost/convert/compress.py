"""Low-rank factors of a dense model that keep its function on calibration text.

1. One forward and backward pass over the text: second moments of the inputs and output gradients of every linear
   (`boost.convert.calibration`).
2. Ranks of all linears under one budget, by what each direction costs the loss (`boost.convert.allotment`).
3. Block by block, group by group (`boost.convert.twins`): truncated SVD in the norm of these moments, with the inputs that the
   factorized blocks before it produce, towards the outputs of the dense model as far as the text supports it (`corrected`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from boost.config.architecture import Parameter, Slot, groups, parameter_count
from boost.config.layouts import layout_names, layout_spec
from boost.config.load import from_tree
from boost.config.schema import ModelConfig, ParallelConfig
from boost.convert.allotment import Candidate, allot
from boost.convert.calibration import (
    BATCH_TOKENS,
    ObservedLayout,
    collect,
    group_name,
    moment_bytes,
    read_batches,
)
from boost.convert.spectrum import FactoredLinear, Truncation, low_rank_table, summaries
from boost.convert.twins import InputMoments, Twins
from boost.data.store import TokenStore
from boost.errors import ConfigError
from boost.format import format_bytes
from boost.models.decoder import Decoder
from boost.models.factorize import (
    Factorization,
    MomentRoot,
    factorize_weighted,
    moment_root,
    solve_right,
    weighted_values,
)
from boost.models.fused import fused_params
from boost.parallel.mesh import Mesh
from boost.train.console import progress
from boost.train.evaluate import evaluate
from boost.train.hardware import total_memory

if TYPE_CHECKING:
    from boost.convert.importing import Weights

LATENT_RMS = 0.1
"""cola: root mean square of the latents before SiLU."""
HELDOUT_TOKENS = 16384
"""Held-out tokens on which the dense and the factorized model are compared."""
SPECTRUM_POINTS = 128
MAX_SEQ_LEN = 1024
"""Maximum length of calibration sequences."""


@dataclass(frozen=True)
class Compression:
    """What the low-rank model must be."""

    budget: float
    """Parameters of all factors as a fraction of those of the linears that they replace (embedding, head and norms stay)."""
    store: str
    """Token store with the calibration text (its training split)."""
    family: str = "svd"
    """svd or cola."""
    tokens: int = 1 << 18
    """Calibration tokens."""
    multiple: int = 8
    """Ranks are multiples of this."""
    meshes: tuple[str, ...] = ()
    """Layouts and TP sizes that the ranks must fit, such as vanilla:4."""
    device: str = "cpu"
    """Device of both models and of all moments."""

    def check(self, dense: ModelConfig) -> None:
        """Raises ConfigError naming the flag, its value and the nearest valid one."""
        if not 0 < self.budget <= 1:
            raise ConfigError(f"--budget = {self.budget} must be in (0, 1]; typical value: 0.6")
        if self.tokens < 1:
            raise ConfigError(f"--calibrate-tokens = {self.tokens} is too small; typical value: {1 << 18}")
        narrow = min(min(slot.d_in, slot.d_out) for group in groups(dense, 0) for slot in group.slots)
        if not 1 <= self.multiple <= narrow:
            nearest = 1 if self.multiple < 1 else narrow
            raise ConfigError(
                f"--multiple = {self.multiple} is out of range (1 to {narrow}, the width of the narrowest linear); nearest valid "
                f"value: {nearest}"
            )
        step = self.step()
        if step > narrow:
            raise ConfigError(
                f"--multiple = {self.multiple} and --mesh {' '.join(self.meshes)} make ranks multiples of {step}, but the "
                f"narrowest linear is {narrow} wide; set --multiple 1, or a smaller TP size"
            )
        for parallel in self._parallels():
            from_tree(
                {"model": {**low_rank_table(dense, self.family), "rank": step}, "parallel": parallel.model_dump()}
            )
        smallest = step * sum(slot.d_in + slot.d_out for slot in _slots(dense))
        if self.room(dense) < smallest:
            nearest_budget = math.ceil(1000 * smallest / linear_parameters(dense)) / 1000
            raise ConfigError(
                f"--budget = {self.budget} is too small for factors of rank {step} (--multiple) in every linear; smallest valid "
                f"value: {nearest_budget}, or use a smaller --multiple"
            )

    def step(self) -> int:
        """The number that must divide every rank: `multiple`, and TP sizes of layouts that shard along the rank."""
        sizes = [p.tp for p in self._parallels() if layout_spec(p.layout).shards_rank]
        return math.lcm(self.multiple, *sizes)

    def room(self, dense: ModelConfig) -> int:
        """Parameters that all factors may have."""
        return int(self.budget * linear_parameters(dense))

    def _parallels(self) -> list[ParallelConfig]:
        found = []
        for text in self.meshes:
            layout, _, size = text.partition(":")
            if layout not in layout_names() or not size.isdecimal() or int(size) < 1:
                raise ConfigError(
                    f"--mesh = '{text}' is not LAYOUT:TP, such as vanilla:4; layouts: {', '.join(layout_names())}"
                )
            found.append(ParallelConfig(layout=layout, tp=int(size)))
        return found


def _slots(model: ModelConfig) -> list[Slot]:
    return [slot for layer in range(model.layers) for group in groups(model, layer) for slot in group.slots]


def linear_parameters(dense: ModelConfig) -> int:
    """Parameters of all linears of the blocks."""
    return sum(slot.d_in * slot.d_out for slot in _slots(dense))


class CompressedWeights:
    """Weights of the low-rank model, in the form in which the importer reads any weights."""

    def __init__(self, dense: "Weights", compression: Compression, tokenizer: str | None) -> None:
        """Calibrates, allots ranks and factorizes. `tokenizer`: fingerprint of the model's, if known. Raises BoostError."""
        compression.check(dense.model)
        self.context, self.eos, self.bos = dense.context, dense.eos, dense.bos
        self.tokenizer, self.hub, self._dtype = dense.tokenizer, dense.hub, dense.dtype()
        store = TokenStore.open(compression.store)
        if tokenizer is not None:
            store.require_tokenizer(tokenizer, "the model")
        if store.largest_token >= dense.model.vocab_size:
            raise ConfigError(
                f"--calibrate = '{compression.store}' has token ids up to {store.largest_token}, but the model has "
                f"{dense.model.vocab_size}; prepare the text with the model's tokenizer"
            )
        _require_memory(dense.model, compression)
        decoder = dense_decoder(dense, torch.device(compression.device))
        done = compress(decoder, store, compression, min(dense.context, MAX_SEQ_LEN))
        self.model, self.report = done.decoder.model, done.report
        self._slices = _slices(done.decoder)

    def dtype(self) -> torch.dtype:
        return self._dtype

    def read(self, parameter: Parameter) -> Tensor:
        return self._slices[parameter.name].cpu()


@dataclass(frozen=True)
class Method:
    """Parts of the method, each of which may be left out."""

    gradients: bool = True
    """Weight output errors and tokens by the moments of gradients. False: all alike, as SVD-LLM (arXiv 2403.07378)."""
    allot: bool = True
    """Ranks by cost. False: the same fraction of parameters in every linear."""
    sequential: bool = True
    """Inputs of the factorized model, towards outputs of the dense one. False: inputs of the dense model."""
    shrink: bool = True
    """Correct weights as far as the text supports it. False: fully, as if it were all text that the model will see."""


@dataclass(frozen=True)
class Compressed:
    """A factorized model and how it was made."""

    decoder: Decoder
    report: dict[str, Any]


def dense_decoder(weights: "Weights", device: torch.device) -> Decoder:
    """The model to factorize on one process, in fp32 or wider. Raises ConfigError if a weight is not finite."""
    model = weights.model
    dtype = torch.float64 if weights.dtype() == torch.float64 else torch.float32
    decoder = new_decoder(model, dtype, device)
    with torch.no_grad():
        for fused in progress(list(fused_params(decoder)), "read weights"):
            for each in fused.slices:
                value = weights.read(each.parameter)
                if not bool(torch.isfinite(value).all()):
                    raise ConfigError(
                        f"{each.parameter.name} contains non-finite values, so it has no SVD; fix the weights"
                    )
                each.view(fused.parameter).copy_(value)
    return decoder


def compress(
    decoder: Decoder, store: TokenStore, compression: Compression, seq_len: int, method: Method = Method()
) -> Compressed:
    """Factorizes a dense decoder (with an `ObservedLayout`) as `compression` says; it is not changed. Raises BoostError."""
    dense, device = decoder.model, decoder.device
    batches = read_batches(store, compression.tokens, seq_len, device)
    moments, weights = collect(decoder, batches, weighted=method.gradients), dense_weights(decoder)
    where = {
        f"layers.{n}.{s.name}": group_name(n, g.name)
        for n in range(dense.layers)
        for g in groups(dense, n)
        for s in g.slots
    }
    inputs = {name: moment_root(each.inputs) for name, each in moments.items()}
    outputs = {
        name: moment_root(moments[group].outputs[name.split(".", 2)[2]])
        if method.gradients
        else moment_root(torch.eye(len(weights[name]), device=device))
        for name, group in where.items()
    }
    importance = {name: each.importance for name, each in moments.items()}
    del moments
    values = {
        name: weighted_values(w_OI, outputs[name], inputs[where[name]])
        for name, w_OI in progress(list(weights.items()), "spectra")
    }
    if method.allot:
        candidates = {name: Candidate(values[name].square() / 2, sum(w.shape)) for name, w in weights.items()}
        ranks = allot(candidates, compression.room(dense), compression.step())
    else:
        same = Truncation(budget=compression.budget, multiple=compression.step())
        ranks = {name: same.rank_of(tuple(w.shape)) or 1 for name, w in weights.items()}
    default = max(set(ranks.values()), key=list(ranks.values()).count)
    model = from_tree({"model": low_rank_table(dense, compression.family, default, ranks)}).model
    low = new_decoder(model, decoder.compute_dtype, device)
    rows = _fill(Twins(decoder, low, batches), outputs, importance, ranks, method)
    report = {
        "asked": {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(compression).items()
            if name != "device"
        },
        "calibration": {"tokens": sum(b.tokens.numel() for b in batches), "sequence": seq_len},
        "parameters": {
            "factors": sum(ranks[name] * sum(w.shape) for name, w in weights.items()),
            "linears": linear_parameters(dense),
        },
        "heldout": heldout_losses({"dense": decoder, "factorized": low}, store, seq_len),
        "slots": [asdict(summary) for summary in summaries(rows)],
        "linears": [asdict(row) for row in rows],
        "spectra": {name: _sampled_spectrum(values[name]) for name in ranks},
    }
    return Compressed(low, report)


@torch.no_grad()
def _fill(
    twins: Twins,
    outputs: Mapping[str, MomentRoot],
    importance: Mapping[str, Sequence[Tensor]],
    ranks: Mapping[str, int],
    method: Method,
) -> list[FactoredLinear]:
    """Fills the factorized model and returns what was done to every linear, in forward order."""
    dense, low = twins.dense, twins.low
    weights, slices = dense_weights(dense), _slices(low)
    for name, tensor in _slices(dense).items():
        if name in slices:  # embedding, norms, head
            slices[name].copy_(tensor)
    rows = list[FactoredLinear]()
    for layer in progress(range(dense.model.layers), "factorize"):
        for index, group in enumerate(groups(dense.model, layer)):
            s = importance[group_name(layer, group.name)]
            halves = twins.moments(index, s, method.sequential)
            root = moment_root((halves[0] + halves[1]).low)
            found = {}
            for slot in group.slots:
                name = f"layers.{layer}.{slot.name}"
                target_OI, share = corrected(weights[name], halves, outputs[name], method.shrink)
                found[name] = target_OI, share, factorize_weighted(target_OI, ranks[name], outputs[name], root)
            for name, (target_OI, share, factors) in found.items():
                a_RI, b_OR = factors.a_RI, factors.b_OR
                rows.append(_row(name, weights[name], factors, share))
                if low.model.latent_act == "silu":
                    a_RI = a_RI * (LATENT_RMS / ((a_RI @ root.root).square().sum(1).sqrt()))[:, None]
                    latents_RR, cross_IR = twins.latent_moments(index, a_RI, s, method.sequential)
                    # B is the least-squares solution for the latents after SiLU, which is nearly linear at this scale.
                    b_OR = solve_right(target_OI @ cross_IR, latents_RR)
                slices[f"{name}.A"].copy_(a_RI)
                slices[f"{name}.B"].copy_(b_OR)
        twins.advance()
    return rows


def corrected(
    w_OI: Tensor, halves: Sequence[InputMoments], output: MomentRoot, shrink: bool = True
) -> tuple[Tensor, float]:
    """The weight whose outputs for inputs x' of the factorized model come close to W x, and the share of the correction in it.

    W E[x x'^T] E[x' x'^T]^-1 is closest on the calibration text, but most of what it adds to W may be noise, which builds up over
    the blocks. Hence only a share of it is added: the share with which a correction fitted on one half of the text is closest on
    the other half, in the norm of the outputs' gradients, both ways. The correction of the whole text has half the noise of that
    of a half, so share a of the latter becomes 2 a / (1 + a) of the former. Not `shrink`: all of it.
    """

    def correction(of: InputMoments) -> Tensor:
        return solve_right(w_OI @ (of.cross - of.low), of.low)

    whole_OI = correction(halves[0] + halves[1])
    if not shrink:
        return w_OI + whole_OI, 1.0
    gained = possible = 0.0
    for fitted, held in (halves, halves[::-1]):
        error_OI = output.root.T @ correction(fitted)
        gained += float(((output.root.T @ (w_OI @ (held.cross - held.low))) * error_OI).sum())
        possible += float(((error_OI @ held.low) * error_OI).sum())
    half = min(max(gained / possible, 0.0), 1.0) if possible > 0 else 0.0
    share = 2 * half / (1 + half)
    return w_OI + share * whole_OI, share


def _row(name: str, w_OI: Tensor, found: Factorization, correction: float) -> FactoredLinear:
    squares, rank = found.values.square(), found.rank
    lost = float(squares[rank:].sum())
    energy = 1 - lost / float(squares.sum().clamp_min(torch.finfo(squares.dtype).tiny))
    error = float((w_OI - found.b_OR @ found.a_RI).norm() / w_OI.norm())
    return FactoredLinear(name, w_OI.shape[0], w_OI.shape[1], rank, energy, error, lost / 2, correction)


def _sampled_spectrum(values: Tensor) -> dict[str, Any]:
    """At most `SPECTRUM_POINTS` of the costs of a linear's directions (half of the squared weighted singular values)."""
    every = -(-len(values) // SPECTRUM_POINTS)
    return {"every": every, "costs": [float(f"{cost:.4g}") for cost in (values.square() / 2)[::every].tolist()]}


def heldout_losses(models: Mapping[str, Decoder], store: TokenStore, seq_len: int) -> dict[str, float]:
    """Held-out loss of each model on `HELDOUT_TOKENS` tokens, nats per token."""
    split, rows = store.split("heldout"), max(BATCH_TOKENS // seq_len, 1)
    return {
        name: evaluate(model, split, seq_len, rows, False, Mesh(model.device), HELDOUT_TOKENS).loss
        for name, model in models.items()
    }


def dense_weights(decoder: Decoder) -> dict[str, Tensor]:
    """Every linear of a dense decoder in fp64, by name, such as layers.3.attn.q."""
    return {name.removesuffix(".W"): w.double() for name, w in _slices(decoder).items() if name.endswith(".W")}


def _slices(decoder: Decoder) -> dict[str, Tensor]:
    """Views of all parameters, by name."""
    return {each.parameter.name: each.view(f.parameter.detach()) for f in fused_params(decoder) for each in f.slices}


def new_decoder(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> Decoder:
    """An uninitialized decoder with an `ObservedLayout`."""
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            layout: Any = ObservedLayout(model, device)
            return Decoder(model, layout, dtype)
    finally:
        torch.set_default_dtype(default_dtype)


def _require_memory(dense: ModelConfig, compression: Compression) -> None:
    """Raises ConfigError if both models and all moments exceed the memory of the device."""
    streams = 4 * compression.tokens * (2 * dense.dim + sum(len(groups(dense, n)) for n in range(dense.layers)))
    needed = 2 * moment_bytes(dense) + 8 * 2 * parameter_count(dense) + streams
    available = total_memory(torch.device(compression.device))
    if needed > available:
        raise ConfigError(
            f"--calibrate needs about {format_bytes(needed)} for both models, the second moments of all linears and the residual "
            f"streams of {compression.tokens} tokens, but the device has {format_bytes(available)}; use a device with more memory "
            "(--device cpu), fewer --calibrate-tokens, or --energy without calibration"
        )
