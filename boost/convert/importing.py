"""Streams Hugging Face weights into a checkpoint at step 0, and optionally factorizes dense weights into a low-rank model."""

import json
import math
import shlex
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from boost.config import Config
from boost.config.architecture import Parameter, parameter_count, parameters
from boost.config.load import from_tree
from boost.config.schema import ModelConfig
from boost.convert.compress import CompressedWeights, Compression
from boost.convert.formats import entries, read_folder
from boost.convert.spectrum import Factorizer, Truncation
from boost.convert.tensors import TensorFolder, TensorWriter, Weights, dtype_name
from boost.convert.vocabulary import (
    BOS,
    Vocabulary,
    end_tokens,
    is_unused,
    read_generation_settings,
    read_vocabulary,
)
from boost.data.tokenizer import parse_tokenizer
from boost.errors import ConfigError
from boost.files import new_folder, require_free
from boost.models.init import require_index
from boost.text import JsonObject
from boost.train.checkpoint import (
    HUB,
    PREFIX,
    Checkpoint,
    WeightReader,
    finish_weights,
    read_checkpoint,
)
from boost.train.progress import progress

MAX_SEQ_LEN = 2048
"""Maximum sequence length for evaluation if the model has a longer context. Training runs set train.seq_len."""


class FolderWeights:
    """Weights of a Hugging Face folder."""

    def __init__(self, path: Path, untie: bool = False) -> None:
        """Validates the names and shapes of all tensors. `untie`: reads a tied table as two tensors. Raises ConfigError,
        CheckpointError."""
        folder = read_folder(path)
        self.context, self.eos = folder.context, folder.eos
        self.start, self.starts_as_tokenizer = None if folder.bos == folder.eos else folder.bos, True
        self._tensors = TensorFolder(path)
        self.notes = [*self._tensors.notes]
        if folder.unused:
            self.notes.append(f"import does not use these fields of config.json: {', '.join(folder.unused)}")
        if folder.model.layers > len(self._tensors.shapes):  # checked before iterating over that many layers
            raise ConfigError(
                f"num_hidden_layers = {folder.model.layers} in '{path}/config.json' requires more tensors than the "
                f"{len(self._tensors.shapes)} in the folder's weights; check that config.json belongs to these weights"
            )
        # config.json alone does not determine the form: transformers and peft may save CoLA's factors under its module names.
        form = "boost" if "model.layers.0.self_attn.q_proj.A.weight" in self._tensors.shapes else folder.form
        apart = folder.model.model_copy(update={"tied": False})
        self._entries = {entry.parameters[0].name: entry for entry in entries(apart, form)}
        embed, head = self._entries["embed"].name, self._entries["head"].name
        self._tensors.check(self._entries.values(), frozenset({head} if folder.model.tied else ()))
        tied = folder.model.tied
        # A stored head that differs from the embedding is used, as in transformers.
        if tied and head in self._tensors.shapes:
            embedding = self._tensors.read(embed)
            tied = torch.equal(embedding, self._tensors.read(head).to(embedding.dtype))
            if not tied:
                self.notes.append(
                    f"config.json ties the head to the embedding, but {head} differs: two tensors are imported"
                )
        self.model = folder.model if tied and not untie else apart
        self._head = "embed" if tied else "head"
        self.untied = apart.vocab_size * apart.dim if tied and untie else 0
        names = {entry.name for entry in self._entries.values() if not entry.parameters[0].is_index}
        self.dtype = self._tensors.dtype(name for name in self._tensors.shapes if name in names)
        self.tokenizer = path if (path / "tokenizer.json").is_file() else None
        self.hub = {BOS: folder.bos, **read_generation_settings(path)}
        settings = self.hub.get("generation", {}).items()
        if penalties := [f"{name} = {json.dumps(value)[:60]}" for name, value in settings if is_unused(name, value)]:
            self.notes.append(f"boost generate ignores these fields of generation_config.json: {', '.join(penalties)}")

    def read(self, parameter: Parameter) -> Tensor:
        entry = self._entries[self._head if parameter.name == "head" else parameter.name]
        tensor = self._tensors.read(entry.name)
        return tensor.T if entry.transposed else tensor


class CheckpointWeights:
    """Weights of a boost checkpoint."""

    def __init__(self, checkpoint: Checkpoint, untie: bool = False) -> None:
        """`untie`: as for a folder."""
        stored = checkpoint.config.model
        self.model = stored.model_copy(update={"tied": False}) if untie else stored
        self._head = "embed" if stored.tied else "head"
        self.untied = stored.vocab_size * stored.dim if stored.tied and untie else 0
        self.context = checkpoint.context
        self.eos, self.start = checkpoint.data.get("eos"), checkpoint.data.get("bos")
        self.starts_as_tokenizer = False  # a run from scratch has learned no start token even if its tokenizer adds one
        self.tokenizer = checkpoint.tokenizer if checkpoint.tokenizer.is_file() else None
        self.hub = checkpoint.data.get(HUB) or {}
        self.notes: list[str] = []
        self._reader = WeightReader(checkpoint)
        self.dtype = self._reader.dtype("embed")

    def read(self, parameter: Parameter) -> Tensor:
        return self._reader.read(self._head if parameter.name == "head" else parameter.name)


@dataclass(frozen=True)
class Imported:
    """Result of an import."""

    path: Path
    model: ModelConfig
    dtype: str
    bytes: int
    tokenizer: bool
    untied: int
    """Parameters added by untying the embedding and head."""
    report: JsonObject | None
    """Report on the factorization; None if the weights were not factorized."""
    notes: list[str]
    """What the source has and the import does not use, and what will go wrong later."""


def import_weights(
    source: Path,
    out: Path,
    dtype: str | None,
    tokenizer: Path | None,
    how: Truncation | Compression | None,
    file_bytes: int,
    untie: bool = False,
    nonfinite: bool = False,
) -> Imported:
    """Writes the checkpoint `out`, which must be empty or not exist. `how`: how to factorize dense weights, if not None.

    `dtype`: None keeps the stored dtype, or one that represents all stored dtypes exactly. However, float16 becomes float32, and
    factors are float32 or wider.
    `tokenizer`: a tokenizer.json or its folder, instead of the one next to the weights. `untie`: import a tied embedding
    and head as two tensors. `nonfinite`: import NaN and infinite values, too. Writes to a temporary folder and renames it once
    complete. Raises BoostError.
    """
    require_free(out, "--out")
    if not source.is_dir():
        raise ConfigError(f"there is no folder at '{source}'; pass a Hugging Face folder with safetensors weights")

    rest = source, out, dtype, tokenizer, how, file_bytes, nonfinite
    names = ("state.json", "manifest.json", "checkpoints", "config.toml")
    is_ours = any((source / name).exists() for name in names) or any(source.glob("step-*"))
    if (source / "config.json").is_file() or not is_ours:
        return _convert(FolderWeights(source, untie), *rest)
    if how is None:
        raise ConfigError(
            f"'{source}' is already a boost checkpoint; start a run from it with: boost train --start-from "
            f"{shlex.quote(str(source))}, or factorize it with --rank, --energy or --budget"
        )
    return read_checkpoint(source, lambda checkpoint: _convert(CheckpointWeights(checkpoint, untie), *rest))


def _convert(
    weights: Weights,
    source: Path,
    out: Path,
    dtype: str | None,
    tokenizer: Path | None,
    how: Truncation | Compression | None,
    file_bytes: int,
    nonfinite: bool,
) -> Imported:
    if how is not None and weights.model.low_rank:
        raise ConfigError(
            f"--rank, --energy and --budget factorize dense weights, but '{source}' has model.family = "
            f"'{weights.model.family}'; remove these flags"
        )
    untied = weights.untied
    before = parameter_count(weights.model) - untied
    if tokenizer is not None and not tokenizer.exists():
        raise ConfigError(f"--tokenizer = '{tokenizer}' does not exist; pass a tokenizer.json or its folder")
    vocabulary = None
    if (path := tokenizer or weights.tokenizer) is not None:
        vocabulary = read_vocabulary(path)
    notes = [*weights.notes, *vocabulary_notes(vocabulary, weights)]
    stored = weights.dtype
    if stored not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ConfigError(
            f"the weights have unsupported dtype {dtype_name(stored)}; import the original weights in a floating-point dtype"
        )
    # Runs do not support float16, and factors are meant to be trained.
    wide = torch.float32 if stored == torch.float16 or (how is not None and stored == torch.bfloat16) else stored
    target = getattr(torch, dtype) if dtype else wide
    factorizer, report = None, None
    if isinstance(how, Compression):
        weights = compressed = CompressedWeights(weights, how, vocabulary.fingerprint if vocabulary else None)
        report = compressed.report
    elif how is not None:
        factorizer = Factorizer(weights.model, how)
    with new_folder(out, "--out") as temporary:
        writer, broken = TensorWriter(temporary / "tensors", "weights", file_bytes), dict[str, int]()
        for parameter in progress(list(parameters(weights.model)), "factorizing" if factorizer else "importing"):
            if factorizer and parameter.role.endswith(".weight"):
                for name, factor in factorizer.factor(parameter, weights.read(parameter), target):
                    writer.add(f"{PREFIX}{name}", factor)
            else:
                value = weights.read(parameter)
                if parameter.is_index:
                    require_index(value, parameter, weights.model)
                else:
                    value = value.to(target)
                # isfinite would hold copies of the tensor. NaN propagates to both ends.
                if not all(end.isfinite() for end in torch.aminmax(value)):
                    broken[parameter.name] = value.numel() - int(value.isfinite().count_nonzero())
                writer.add(f"{PREFIX}{parameter.name}", value)
        if broken:
            problem = (
                f"{sum(broken.values()):,} of {parameter_count(weights.model):,} weights are NaN or infinite in "
                f"{dtype_name(target)}, in {len(broken)} tensors, such as {next(iter(broken))}"
            )
            if not nonfinite:
                raise ConfigError(f"{problem}; repair '{source}', or import them with --allow-nonfinite")
            notes.append(problem)
        writer.close()
        table = factorizer.model() if factorizer else weights.model.model_dump()
        config = weights_config(table, dtype_name(target), weights.context)
        report = factorizer.report() if factorizer else report
        if report:
            counts = {"before": before, "after": parameter_count(config.model), "untied": untied}
            report["parameters"] = {**report.get("parameters", {}), **counts}
        texts = [("report.json", json.dumps(report, indent=2))] if report else []
        texts += [("tokenizer.json", vocabulary.json)] if vocabulary else []
        finish_weights(temporary, out.resolve(), config, tokenizer_data(weights, vocabulary), texts)
    return Imported(
        out, config.model, dtype_name(target), writer.total_bytes, vocabulary is not None, untied, report, notes
    )


def vocabulary_notes(vocabulary: Vocabulary | None, weights: Weights) -> list[str]:
    """How the tokenizer differs from what transformers makes of it, from the embedding, and from the tokens that end a text."""
    if vocabulary is None:
        return []
    rows, notes = weights.model.vocab_size, [*vocabulary.notes]
    if (largest := max(parse_tokenizer(vocabulary.json).get_vocab().values(), default=0)) >= rows:
        notes.append(
            f"the tokenizer has token ids up to {largest}, but the embedding has {rows} rows, so text with the tokens from "
            f"{rows} on cannot be used; add rows in transformers and import again: "
            f"model.resize_token_embeddings({largest + 1}); model.save_pretrained(PATH)"
        )
    ends = end_tokens({"eos": weights.eos, HUB: weights.hub})
    named = "eos_token" in vocabulary.hub.get("tokenizer", {})  # else, it is a guess
    if named and ends and vocabulary.eos not in (None, *ends):
        notes.append(
            f"the tokenizer's end token has id {vocabulary.eos}, but generation ends only at {', '.join(map(str, ends))}, as in "
            f"transformers; to end at both, add {vocabulary.eos} to eos_token_id in generation_config.json"
        )
    return notes


def tokenizer_data(weights: Weights, vocabulary: Vocabulary | None) -> JsonObject:
    """Returns the tokenizer metadata of a checkpoint, which generation, evaluation and --start-from read."""
    eos, start, hub = weights.eos, weights.start, weights.hub
    if vocabulary is not None:
        eos, hub = vocabulary.eos if eos is None else eos, {**hub, **vocabulary.hub}
        start = vocabulary.start if weights.starts_as_tokenizer else start
    return {
        "tokenizer": vocabulary.fingerprint if vocabulary else None,
        "content": None,
        "eos": eos,
        "bos": start,
        "context": weights.context,
        HUB: hub,
    }


def weights_config(model: JsonObject, dtype: str, context: int) -> Config:
    """Returns a one-process configuration for a model, with a sequence length and micro-batch suited to evaluation."""
    length = min(context, MAX_SEQ_LEN)
    micro = max(1, min(8, math.floor(8 * 256 / length)))
    train = {"param_dtype": dtype, "compute_dtype": dtype, "seq_len": length, "micro_batch": micro}
    return from_tree({"model": model, "parallel": {"layout": "single"}, "train": train})
