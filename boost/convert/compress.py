"""Factorizes a dense model so that its function on calibration text changes little.

1. Computes second moments of the inputs and output gradients of every linear in one pass over the text
   (`boost.convert.calibration`).
2. Chooses the ranks of all linears under one budget, by how much each direction affects the loss (`allot`).
3. Truncates the SVD of each linear, block by block (`Twins`), in the norm of these moments. Uses the inputs that the preceding
   factorized blocks produce, and corrects W toward the dense model's outputs as far as the text supports it (`corrected`).
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from boost.config.architecture import Parameter, Slot, groups, parameter_count
from boost.config.load import from_tree
from boost.config.schema import ModelConfig
from boost.convert.calibration import (
    BATCH_TOKENS,
    InputMoments,
    ObservedLayout,
    Twins,
    collect,
    group_name,
    moment_bytes,
    read_batches,
)
from boost.convert.spectrum import (
    FactoredLinear,
    MomentRoot,
    factorize_weighted,
    low_rank_table,
    moment_root,
    slot_rows,
    solve_right,
    weighted_values,
)
from boost.convert.tensors import Weights
from boost.data.store import TokenStore
from boost.errors import ConfigError
from boost.format import format_bytes
from boost.models.decoder import Decoder
from boost.models.fused import fused_params
from boost.models.kernels import STATISTIC_DTYPE
from boost.parallel.mesh import Mesh
from boost.text import JsonObject
from boost.train.evaluate import evaluate
from boost.train.hardware import total_memory
from boost.train.progress import progress

HELDOUT_TOKENS = 16384
"""Held-out tokens on which the dense and the factorized model are compared."""
MAX_SEQ_LEN = 1024
"""Maximum length of calibration sequences."""


@dataclass(frozen=True)
class Compression:
    """Requirements for the low-rank model."""

    budget: float
    """Parameters of all factors as a fraction of the parameters that they replace (embedding, head and norms are not counted)."""
    store: str
    """Token store with the calibration text (its training split)."""
    tokens: int = 1 << 18
    """Calibration tokens."""
    multiple: int = 8
    """Ranks are multiples of this."""
    device: str = "cpu"
    """Device for both models and all moments."""

    def check(self, dense: ModelConfig) -> None:
        """Raises ConfigError naming the flag, its value and the nearest valid one."""
        if not 0 < self.budget <= 1:
            raise ConfigError(f"--budget = {self.budget} must be in (0, 1]; typical value: 0.6")
        if self.tokens < 1:
            raise ConfigError(f"--calibrate-tokens = {self.tokens} is too small; typical value: {1 << 18}")
        narrow = min(min(slot.d_in, slot.d_out) for slot in _slots(dense))
        if not 1 <= self.multiple <= narrow:
            nearest = 1 if self.multiple < 1 else narrow
            raise ConfigError(
                f"--multiple = {self.multiple} is out of range (1 to {narrow}, the width of the narrowest linear); nearest valid "
                f"value: {nearest}"
            )
        smallest = self.multiple * sum(slot.d_in + slot.d_out for slot in _slots(dense))
        if self.room(dense) < smallest:
            nearest_budget = math.ceil(1000 * smallest / linear_parameters(dense)) / 1000
            raise ConfigError(
                f"--budget = {self.budget} is too small for factors of rank {self.multiple} (--multiple) in every linear; smallest "
                f"valid value: {nearest_budget}, or use a smaller --multiple"
            )
        streams = 4 * self.tokens * (2 * dense.dim + sum(len(groups(dense, n)) for n in range(dense.layers)))
        needed = 2 * moment_bytes(dense) + 8 * 2 * parameter_count(dense) + streams
        available = total_memory(torch.device(self.device))
        if needed > available:
            raise ConfigError(
                f"--calibrate needs about {format_bytes(needed)} for both models, the second moments of all linears and the "
                f"residual streams of {self.tokens} tokens, but the device has {format_bytes(available)}; use a device with more "
                "memory (--device cpu), fewer --calibrate-tokens, or --energy without calibration"
            )

    def room(self, dense: ModelConfig) -> int:
        """Maximum number of parameters in all factors."""
        return int(self.budget * linear_parameters(dense))


def _slots(model: ModelConfig) -> list[Slot]:
    return [slot for layer in range(model.layers) for group in groups(model, layer) for slot in group.slots]


def linear_parameters(dense: ModelConfig) -> int:
    """Number of parameters in the linears of all blocks."""
    return sum(slot.d_in * slot.d_out for slot in _slots(dense))


class CompressedWeights:
    """Weights of the low-rank model, in the form that the importer reads."""

    def __init__(self, dense: Weights, compression: Compression, tokenizer: str | None) -> None:
        """Calibrates, chooses ranks and factorizes. `tokenizer`: fingerprint of the tokenizer, if known. Raises BoostError."""
        compression.check(dense.model)
        self.context, self.eos = dense.context, dense.eos
        self.start, self.starts_as_tokenizer = dense.start, dense.starts_as_tokenizer
        self.tokenizer, self.hub, self.dtype = dense.tokenizer, dense.hub, dense.dtype
        self.notes, self.untied = dense.notes, dense.untied
        store = TokenStore.open(compression.store)
        if tokenizer is not None:
            store.require_tokenizer(tokenizer, "the model")
        if store.largest_token >= dense.model.vocab_size:
            raise ConfigError(
                f"--calibrate = '{compression.store}' has token ids up to {store.largest_token}, but model.vocab_size = "
                f"{dense.model.vocab_size}; prepare the text with the model's tokenizer"
            )
        decoder = dense_decoder(dense, torch.device(compression.device))
        low, self.report = compress(decoder, store, compression, min(dense.context, MAX_SEQ_LEN))
        self.model, self._slices = low.model, slices_by_name(low)

    def read(self, parameter: Parameter) -> Tensor:
        return self._slices[parameter.name].cpu()


def dense_decoder(weights: Weights, device: torch.device) -> Decoder:
    """Returns the model to factorize, in one process and in fp32 or wider. Raises ConfigError if a weight is not finite."""
    dtype = STATISTIC_DTYPE[weights.dtype]
    decoder = new_decoder(weights.model, dtype, device)
    with torch.no_grad():
        for fused in progress(list(fused_params(decoder)), "read weights"):
            for param_slice in fused.slices:
                value = weights.read(param_slice.parameter)
                if not bool(torch.isfinite(value).all()):
                    name = param_slice.parameter.name
                    raise ConfigError(f"{name} contains non-finite values, so it has no SVD; fix the weights")
                param_slice.view(fused.parameter).copy_(value)
    return decoder


def compress(decoder: Decoder, store: TokenStore, compression: Compression, seq_len: int) -> tuple[Decoder, JsonObject]:
    """Factorizes a decoder with an `ObservedLayout` without changing it. Returns the factorized decoder and a report."""
    dense = decoder.model
    batches = read_batches(store, compression.tokens, seq_len, decoder.device)
    moments, weights = collect(decoder, batches), dense_weights(decoder)
    inputs = {group: moment_root(of_group.inputs) for group, of_group in moments.items()}
    outputs = {
        f"{group.rpartition('.')[0]}.{slot}": moment_root(moment)
        for group, of_group in moments.items()
        for slot, moment in of_group.outputs.items()
    }
    importance = {group: of_group.importance for group, of_group in moments.items()}
    del moments  # they take as much memory as several models

    candidates = {}
    for layer in progress(range(dense.layers), "spectra"):
        for group in groups(dense, layer):
            for slot in group.slots:
                name = f"layers.{layer}.{slot.name}"
                values = weighted_values(weights[name], outputs[name], inputs[group_name(layer, group.name)])
                even = max(slot.d_in * slot.d_out // (slot.d_in + slot.d_out), 1)  # above this rank, A and B outsize W
                candidates[name] = Candidate(values.square()[:even] / 2, slot.d_in + slot.d_out)
    ranks = allot(candidates, compression.room(dense), compression.multiple)
    default = max(set(ranks.values()), key=list(ranks.values()).count)
    model = from_tree({"model": low_rank_table(dense, default, ranks)}).model
    low = new_decoder(model, decoder.compute_dtype, decoder.device)
    rows = _fill(Twins(decoder, low, batches), outputs, importance, ranks)

    split, sequences = store.split("heldout"), max(BATCH_TOKENS // seq_len, 1)
    heldout = {
        name: evaluate(trained, split, seq_len, sequences, False, Mesh(trained.device), HELDOUT_TOKENS).loss
        for name, trained in (("dense", decoder), ("factorized", low))
    }
    report = {
        "asked": {name: value for name, value in asdict(compression).items() if name != "device"},
        "calibration": {"tokens": sum(tokens_BS.numel() for tokens_BS in batches), "sequence": seq_len},
        "parameters": {
            "factors": sum(rank * candidates[name].size for name, rank in ranks.items()),
            "linears": linear_parameters(dense),
        },
        "heldout": heldout,
        "slots": slot_rows(rows),
        "linears": [asdict(row) for row in rows],
    }
    return low, report


@dataclass(frozen=True)
class Candidate:
    """One linear: the gain from each direction, and the cost of each rank."""

    gains: Tensor
    """[R] fp64, descending: drop in the loss from each additional rank, up to the largest useful rank."""
    size: int
    """Parameters per rank: O + I."""


def allot(candidates: Mapping[str, Candidate], budget: int, multiple: int = 1) -> dict[str, int]:
    """Returns the ranks that reduce the loss the most within `budget` parameters. They are multiples of `multiple`, or a linear's
    largest useful rank if that is smaller.

    Greedy by gain per parameter, which is optimal up to the last step because gains descend. Each linear gets at least one
    step. If the best next step does not fit, cheaper steps still may.
    """
    ranks: dict[str, int] = {}
    queue: list[tuple[float, str, int]] = []
    left = budget

    def push(name: str) -> None:
        gains, rank = candidates[name].gains, ranks[name]
        step = min(multiple, len(gains) // multiple * multiple - rank)
        if step > 0:
            heapq.heappush(
                queue, (-float(gains[rank : rank + step].sum()) / (step * candidates[name].size), name, step)
            )

    for name, candidate in candidates.items():
        ranks[name] = min(multiple, len(candidate.gains))
        left -= ranks[name] * candidate.size
        push(name)
    while queue:
        _, name, step = heapq.heappop(queue)
        if step * candidates[name].size > left:
            continue
        ranks[name] += step
        left -= step * candidates[name].size
        push(name)
    return ranks


@torch.no_grad()
def _fill(
    twins: Twins,
    outputs: Mapping[str, MomentRoot],
    importance: Mapping[str, Sequence[Tensor]],
    ranks: Mapping[str, int],
) -> list[FactoredLinear]:
    """Fills in the factorized weights and returns the result for every linear, in forward order."""
    dense = twins.dense
    weights, slices = dense_weights(dense), slices_by_name(twins.low)
    for name, tensor in slices_by_name(dense).items():
        if name in slices:  # embedding, norms, head
            slices[name].copy_(tensor)
    rows = list[FactoredLinear]()
    for layer in progress(range(dense.model.layers), "factorize"):
        for index, group in enumerate(groups(dense.model, layer)):
            halves = twins.moments(index, importance[group_name(layer, group.name)])
            root = moment_root((halves[0] + halves[1]).low)
            for slot in group.slots:
                name = f"layers.{layer}.{slot.name}"
                target_OI, share = corrected(weights[name], halves, outputs[name])
                factors = factorize_weighted(target_OI, ranks[name], outputs[name], root)
                squares, w_OI = factors.values.square(), weights[name]
                lost = float(squares[factors.rank :].sum())
                energy = 1 - lost / float(squares.sum().clamp_min(torch.finfo(squares.dtype).tiny))
                error = float((w_OI - factors.b_OR @ factors.a_RI).norm() / w_OI.norm())
                rows.append(
                    FactoredLinear(name, slot.d_out, slot.d_in, factors.rank, energy, error, lost / 2, correction=share)
                )
                slices[f"{name}.A"].copy_(factors.a_RI)
                slices[f"{name}.B"].copy_(factors.b_OR)
        twins.advance()
    return rows


def corrected(w_OI: Tensor, halves: Sequence[InputMoments], output: MomentRoot) -> tuple[Tensor, float]:
    """Returns a weight whose outputs for the factorized model's inputs x' approximate W x, and the share of its correction to W.

    W E[x x'^T] E[x' x'^T]^-1 fits the calibration text best, but most of its difference from W may be noise, which accumulates over
    the blocks. So only a share of this difference, the correction, is added. It is the share with which a correction fitted on one
    half of the text comes closest on the other half, in the norm of the outputs' gradients, and vice versa. A correction fitted on
    the whole text has half the noise of one fitted on half of it, so a share a for the half becomes 2 a / (1 + a) for the whole.
    """

    def correction(of: InputMoments) -> Tensor:
        return solve_right(w_OI @ (of.cross - of.low), of.low)

    gained = possible = 0.0
    for fitted, held in (halves, halves[::-1]):
        error_OI = output.root.T @ correction(fitted)
        gained += float(((output.root.T @ (w_OI @ (held.cross - held.low))) * error_OI).sum())
        possible += float(((error_OI @ held.low) * error_OI).sum())
    half = min(max(gained / possible, 0.0), 1.0) if possible > 0 else 0.0
    share = 2 * half / (1 + half)
    return w_OI + share * correction(halves[0] + halves[1]), share


def dense_weights(decoder: Decoder) -> dict[str, Tensor]:
    """Every linear of a dense decoder in fp64, by name, such as layers.3.attn.q."""
    return {name.removesuffix(".W"): w.double() for name, w in slices_by_name(decoder).items() if name.endswith(".W")}


def slices_by_name(decoder: Decoder) -> dict[str, Tensor]:
    """Views of all parameters, by name."""
    return {
        param_slice.parameter.name: param_slice.view(fused.parameter.detach())
        for fused in fused_params(decoder)
        for param_slice in fused.slices
    }


def new_decoder(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> Decoder:
    """An uninitialized decoder with an `ObservedLayout`."""
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            layout = ObservedLayout(model, device)
            return Decoder(model, layout, dtype)
    finally:
        torch.set_default_dtype(default_dtype)
