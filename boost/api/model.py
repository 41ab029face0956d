"""`Model`: a language model with its tokenizer, from a preset, a checkpoint, or a Hugging Face folder."""

import contextlib
import functools
import shutil
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from boost.api.sharding import fill, restore, spec_of, traits_of
from boost.config import Config
from boost.config.architecture import Parameter
from boost.config.load import as_config, change, from_tree, read_source
from boost.convert.export import export
from boost.convert.importing import CheckpointWeights, FolderWeights, tokenizer_data, vocabulary_notes, weights_config
from boost.convert.tensors import TensorWriter, Weights, dtype_name
from boost.convert.vocabulary import end_tokens, read_vocabulary
from boost.data.tokenizer import PlainText, continuation, parse_tokenizer
from boost.errors import ConfigError
from boost.files import new_folder, require_free
from boost.nn import Decoder
from boost.nn.weights import whole_weight
from boost.text import JsonObject
from boost.train.checkpoint import (
    HUB,
    PREFIX,
    TRAITS,
    find_checkpoint,
    finish_weights,
    open_checkpoint,
    read_checkpoint,
)
from boost.train.generate import generate
from boost.train.sampling import Sampling, beyond_context

FILE_BYTES = 5 * 10**9
"""Maximum size of a weight file."""


class Model(nn.Module):
    """A decoder with its tokenizer.

        model = boost.Model.from_pretrained("runs/demo")
        print(model.generate("def main():"))
        loss = model(tokens, targets)

    `decoder` is the `boost.nn.Decoder`, an ordinary module; `config` is the configuration of the model's run or preset.
    """

    def __init__(self, decoder: Decoder, config: Config, data: JsonObject | None = None, tokenizer: str = "") -> None:
        """`data`: what a checkpoint records about its tokenizer (eos, bos, context, fingerprint); `tokenizer`: its JSON."""
        super().__init__()
        self.decoder, self.config = decoder, config
        self._data, self._tokenizer_json = dict(data or {}), tokenizer
        self._context = int(self._data.get("context") or config.train.seq_len)

    @classmethod
    def from_preset(cls, name: str, overrides: Mapping[str, object] | None = None, **options: object) -> "Model":
        """Builds a model with initial weights from a preset (`boost config` lists them) or a TOML file.

        `overrides`: values by dotted key, such as {"model.rank": 64}; `options`: arguments of `boost.nn.Spec`, such as mesh or
        layout. Raises ConfigError.
        """
        tree = read_source(name)
        change(tree, overrides or {})
        return cls.from_config(from_tree(tree), **options)

    @classmethod
    def from_config(cls, config: Config | Mapping[str, object] | str | Path, **options: object) -> "Model":
        """Builds a new model from a configuration: an object, a nested dict, or a TOML file. `options` as in `from_preset`."""
        config = as_config(config)
        return cls(Decoder(spec_of(config.model, {"seed": config.train.seed, **options})), config)

    @classmethod
    def from_pretrained(cls, path: str | Path, *, untie: bool = False, **options: Any) -> "Model":
        """Loads a run directory (its newest checkpoint), a checkpoint, or a Hugging Face folder (as `boost import`).

        `untie`: load tied parameters, such as the embedding and the head, as separate tensors. `options`: arguments of
        `boost.nn.Spec`, such as mesh and layout, which determine each process's shards. dtype defaults to that of the weights;
        float16 becomes float32. Raises BoostError.
        """
        path = Path(path)
        if not path.is_dir():
            raise ConfigError(
                f"path = '{path}' is not a folder; pass a run directory, a checkpoint, or a Hugging Face folder"
            )
        if (path / "config.json").is_file():
            return cls._of(FolderWeights(path, untie), options)
        path = _common_checkpoint(path, options.get("mesh"))

        def load(checkpoint: Any) -> Model:
            model = cls._of(CheckpointWeights(checkpoint, untie), dict(options))
            restore(model.decoder, checkpoint.data.get(TRAITS) or {}, tied=not untie)
            return model

        return read_checkpoint(path, load)

    @classmethod
    def _of(cls, weights: Weights, options: dict[str, Any]) -> "Model":
        dtype = options.pop("dtype", None) or weights.dtype
        dtype = torch.float32 if dtype == torch.float16 else dtype
        spec = spec_of(weights.model, {"dtype": dtype, **options})
        decoder = Decoder(spec, initialized=False)
        broken: list[str] = []

        def read(parameter: Parameter) -> Tensor:
            value = weights.read(parameter)
            broken.extend([parameter.name] * (not bool(value.isfinite().all())))
            return value

        fill(decoder, read)
        vocabulary = read_vocabulary(weights.tokenizer) if weights.tokenizer is not None else None
        nonfinite = [f"{len(broken)} tensors have NaN or infinite values, such as {broken[0]}"] if broken else []
        for note in (*weights.notes, *nonfinite, *vocabulary_notes(vocabulary, weights)):
            warnings.warn(note, stacklevel=3)
        data = tokenizer_data(weights, vocabulary)
        config = weights_config(weights.model.model_dump(), dtype_name(dtype), weights.context)
        return cls(decoder, config, data, vocabulary.json if vocabulary else "")

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer`; None for a new model."""
        return parse_tokenizer(self._tokenizer_json) if self._tokenizer_json else None

    def forward(self, tokens: Tensor, targets: Tensor | None = None, *rest: object, **options: object) -> Tensor:
        """Returns logits [B, S, V] for tokens [B, S], or, with targets, the mean loss in nats per token. Takes all arguments of
        `boost.nn.Decoder.forward`."""
        return cast(Tensor, self.decoder(tokens, targets, *rest, **options))

    def generate(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 128,
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        on_token: Callable[[int], None] | None = None,
    ) -> Any:
        """Continues a prompt. Returns text for a text prompt, and token ids for token ids. temperature = 0 means greedy decoding.
        The default is as in an imported generation_config.json that samples, or else temperature = 0.8 and top_p = 0.95.

        `on_token` is called with each token as it is generated. Collective under TP. Raises ConfigError.
        """
        is_text = isinstance(prompt, str)
        if is_text and self.tokenizer is None:
            raise ConfigError("prompt is text, but this model has no tokenizer; pass token ids")
        eos, bos = self._data.get("eos"), self._data.get("bos")
        ids = PlainText(self.tokenizer, eos).encode(prompt) if isinstance(prompt, str) else list(prompt)
        ids = ([bos] if is_text and bos is not None else []) + ids or ([eos] if eos is not None else [])
        if not ids:
            raise ConfigError("prompt is empty, and this model's start-of-document token is unknown; pass some tokens")
        if max(ids) >= self.decoder.model.vocab_size or min(ids) < 0:
            raise ConfigError(
                f"prompt has token ids from {min(ids)} to {max(ids)}, but only 0 to {self.decoder.model.vocab_size - 1} are valid"
            )
        sampling = Sampling.of((self._data.get(HUB) or {}).get("generation", {}), temperature, top_k, top_p, seed)
        sampling.check()
        new = []
        for token in generate(self.decoder, ids, max_tokens, sampling, end_tokens(self._data)):
            new.append(token)
            if on_token is not None:
                on_token(token)
        if warning := beyond_context(len(ids) + len(new), self._context):
            warnings.warn(warning, stacklevel=2)
        return continuation(self.tokenizer, ids, new) if is_text else new

    def save(self, path: str | Path) -> Path:
        """Writes weights and tokenizer as a checkpoint for `boost train --start-from`, `eval`, `generate`, `export` and
        `from_pretrained`, which freezes and ties the same parameters. Collective under TP; rank 0 writes. Raises ConfigError if the
        folder exists, or if the model has more than weights, such as adapters; or StorageError.
        """
        path, is_writer, named = Path(path), self._is_writer, self.decoder.stored_parameters()
        traits, sizes = traits_of(named), {**self.decoder.model.model_dump(), "tied": self.decoder.is_tied}
        tied = [name for names in traits["tied"] for name in names]
        require_free(path, "path")  # on all ranks, so that none waits for a rank that raised an error
        self._barrier()
        with new_folder(path, "path") if is_writer else contextlib.nullcontext() as temporary:
            writer = TensorWriter(temporary / "tensors", "weights", FILE_BYTES) if temporary else None
            for name, parameter in named.items():
                tensor = whole_weight(parameter.detach())
                if writer:  # safetensors accepts no tensors that share memory
                    writer.add(f"{PREFIX}{name}", (tensor.clone() if name in tied else tensor).cpu())
            if writer and temporary:
                writer.close()
                texts = [("tokenizer.json", self._tokenizer_json)] if self._tokenizer_json else []
                data = {"tokenizer": None, "content": None, "eos": None, "bos": None, "context": None, **self._data}
                data[TRAITS] = traits
                sections = weights_config(sizes, dtype_name(next(iter(named.values())).dtype), self._context)
                finish_weights(temporary, path.resolve(), sections, data, texts)
        self._barrier()
        return path

    def export(self, path: str | Path, *, dtype: str | None = None, merge: bool = True) -> Path:
        """Writes a Hugging Face folder, like `boost export`. `dtype`: dtype of the weights; `merge`: for svd, write W = B A.

        Collective under TP; rank 0 writes. Raises ConfigError if the folder exists, or StorageError.
        """
        path, is_writer = Path(path), self._is_writer
        scratch = path.resolve().with_name(f".{path.resolve().name}.{uuid.uuid4().hex[:8]}.weights")
        require_free(path, "path")
        self._barrier()
        self.save(scratch)
        if is_writer:
            try:
                for note in export(open_checkpoint(scratch), path, dtype, merge, FILE_BYTES).notes:
                    warnings.warn(note, stacklevel=2)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        self._barrier()
        return path

    @property
    def _mesh(self) -> DeviceMesh | None:
        """The mesh over which weights are sharded: TP, and dp under FSDP2."""
        meshes = [weight.device_mesh for weight in self.decoder.parameters() if isinstance(weight, DTensor)]
        return max(meshes, key=lambda mesh: mesh.ndim, default=None)

    @property
    def _is_writer(self) -> bool:
        return self._mesh is None or not any(self._mesh.get_coordinate() or ())

    def _barrier(self) -> None:
        """Waits for the other ranks, so that none reads a file before rank 0 has written it."""
        for group in () if self._mesh is None else self._mesh.get_all_groups():
            dist.barrier(group=group)


def _common_checkpoint(path: Path, mesh: DeviceMesh | dist.ProcessGroup | None) -> Path:
    """On a mesh, the checkpoint that all ranks read: a live run may save a newer one before the last rank looks."""
    if mesh is None or (found := find_checkpoint(path)) == path:
        return path
    for group in mesh.get_all_groups() if isinstance(mesh, DeviceMesh) else [mesh]:
        names = [found.name] * group.size()
        dist.all_gather_object(names, found.name, group=group)
        found = found.with_name(min(names))
    return found
