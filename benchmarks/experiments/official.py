"""BOOST against the published code of CoLA and LORO, with the same initial weights and tokens, in one process on the CPU:

    git clone https://github.com/alvin-zyl/CoLA ../CoLA
    git clone https://github.com/mzf666/LORO-main ../LORO-main
    pip install 'transformers==4.48.*'  # CoLA's code does not run with transformers 5
    python -m benchmarks official

This executes the code in both folders; read it first. Writes benchmarks/official.json.

First, BOOST and the published code train in fp64, even where the published code converts to fp32 (RMSNorm, RoPE, LORO's exact
steps), with the optimizer settings of the 60M recipes at a constant learning rate. The loss of every step and the final weights
must agree; for LORO, the products B A instead of the factors, because an SVD does not determine signs. Then interleaved rounds
time CoLA's training step and LORO's updates.
"""

import argparse
import contextlib
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.commands import LEAST_ROUNDS, add_rounds, require_least
from benchmarks.experiments.contest import Call, Ratio, in_words, ratio, take_turns
from benchmarks.experiments.peers import of_family
from benchmarks.experiments.plain import PlainStep, mean_loss
from benchmarks.experiments.results import Facts, MeasurementError, write_numbers
from benchmarks.experiments.single import LEAST_S, sizes
from boost.config import Config, load
from boost.config.architecture import IGNORED, parameters
from boost.config.optimizers import LOROConfig
from boost.convert.formats import config_json, entries
from boost.errors import ConfigError
from boost.measure import steps
from boost.measure.exactness import ByName, TrainedModel, made_up_batches, mean_error, weights
from boost.measure.steps import Stepper, shape
from boost.models.init import initial_value
from boost.parallel.mesh import Mesh
from boost.train.rundir import environment

RESULT = Path("benchmarks/official.json")
STEPS, EXACT_EVERY = 20, 5
"""Number of compared training steps. One LORO step in EXACT_EVERY is exact."""
OURS, THEIRS = "BOOST", "published"

_SMALL = ["--run.device=cpu", "--train.param_dtype=float64", "--train.compute_dtype=float64"]
_SMALL += shape(128, 2, 352, 4, tp=1, vocab_size=512, seq_len=64, micro_batch=4, global_batch=8)
RECIPES = {
    "CoLA without clipping": ("cola-60m", [*_SMALL, "--optim.clip=0"], 1e-10),
    "CoLA": ("cola-60m", _SMALL, 1e-6),  # clip_grad_norm_ divides by norm + 1e-6
    "LORO": ("loro-60m", [*_SMALL, f"--optim.exact_every={EXACT_EVERY}", "--optim.schedule=constant"], 1e-10),
}
"""Preset, overrides and maximum relative difference of losses and weights."""


@dataclass(frozen=True)
class Published:
    """A published model with our initial weights, and its optimizer."""

    module: nn.Module
    update: Callable[[int], Any]
    """Updates the weights in step n (0-based)."""
    names: dict[str, tuple[str, bool]]
    """(name in the module, whether it is transposed there) by our name for each parameter."""

    def weights(self) -> ByName:
        """The weights under our names, with our shapes."""
        state = self.module.state_dict()
        return {ours: state[name].T if turned else state[name] for ours, (name, turned) in self.names.items()}

    def step(self, config: Config, number: int) -> float:
        """Trains on the batches of step `number`. Returns the loss before the update."""
        batches, total = made_up_batches(config, number), 0.0
        count = sum(int((batch.targets != IGNORED).sum()) for batch in batches)
        for batch in batches:
            logits = self.module(input_ids=torch.from_numpy(batch.tokens), use_cache=False).logits
            targets = torch.from_numpy(batch.targets).flatten()
            loss = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORED, reduction="sum") / count
            loss.backward()
            total += loss.item()
        if config.optim.clip:
            nn.utils.clip_grad_norm_(self.module.parameters(), config.optim.clip)
        self.update(number)
        self.module.zero_grad(set_to_none=True)
        return total


def published(config: Config) -> Published:
    """CoLA's class with AdamW or, if optim.name is 'loro', transformers' LLaMA with LORO's linears and optimizer."""
    return _loro(config, config.optim) if isinstance(config.optim, LOROConfig) else _cola(config)


def _cola(config: Config) -> Published:
    package, optim = importlib.import_module("cola"), config.optim
    module = package.ColaForCausalLM(package.ColaConfig(**_fields(config, "cola")))
    names = {each.parameters[0].name: (each.name, each.transposed) for each in entries(config.model, "cola")}
    _fill(module, names, config)
    betas = (optim.beta1, optim.beta2)
    adamw = torch.optim.AdamW(module.parameters(), optim.lr, betas, optim.eps, optim.weight_decay)
    return Published(module, lambda number: adamw.step(), names)


def _loro(config: Config, optim: LOROConfig) -> Published:
    from transformers import LlamaConfig, LlamaForCausalLM

    package, model = importlib.import_module("loro_torch.lowrank_module"), config.model
    llama = LlamaConfig(**_fields(config, "llama"))
    module = LlamaForCausalLM(llama)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        package.apply_lowrank_param(module, llama, "llama", "all", model.rank, model.rank, "xavier", verbose=False)
    names = {}
    for each in entries(model, "boost"):
        linear, _, factor = each.name.removesuffix(".weight").rpartition(".")
        theirs = {"A": f"{linear}.weight_in", "B": f"{linear}.weight_out"}.get(factor, each.name)
        names[each.parameters[0].name] = (theirs, factor == "A")
    _fill(module, names, config)
    optimizer = importlib.import_module("loro_torch.loro_optim").LOROAdamW(
        package.get_lowrank_param(module, llama, -1),  # -1: scales the factors' learning rate by r / d
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        loro_type="loro",
        model=module,
        no_deprecation_warning=True,
    )

    def update(number: int) -> None:  # as in LORO's training script
        exact = optim.is_exact(number)
        optimizer.step(use_exact_loro=exact)
        if exact:
            optimizer.refresh_states("all")

    return Published(module, update, names)


def _fields(config: Config, form: Literal["cola", "llama"]) -> dict[str, Any]:
    """The fields of config.json."""
    return config_json(config.model, form, config.train.param_dtype, config.train.seq_len, None, None)


def _fill(module: nn.Module, names: Mapping[str, tuple[str, bool]], config: Config) -> None:
    """Loads our initial weights and sets the dtype."""
    values = {each.name: initial_value(each, config.model, config.train.seed) for each in parameters(config.model)}
    module.load_state_dict({name: values[ours].T if turned else values[ours] for ours, (name, turned) in names.items()})
    module.to(getattr(torch, config.train.param_dtype)).train()


def compare(config: Config) -> dict[str, float]:
    """Trains BOOST and the published code for STEPS steps. Returns the largest relative difference of their losses, and the norm of
    the difference of their weights, relative to the norm of the weights."""
    ours = TrainedModel(config, Mesh(torch.device("cpu")), STEPS, config.train.seed)
    with _fp64():
        theirs = published(config)
        losses = [theirs.step(config, number) for number in range(STEPS)]
    trained = [weights(ours.model), theirs.weights()]
    trained = [_products(each) for each in trained] if isinstance(config.optim, LOROConfig) else trained
    return {
        "loss": max(abs(mine - loss) / loss for (mine, _), loss in zip(ours.numbers, losses, strict=True)),
        "weights": mean_error(*trained),
    }


@contextlib.contextmanager
def _fp64() -> Iterator[None]:
    """Context manager that turns conversions to fp32 into conversions to fp64."""
    usual: Any = torch.Tensor.to

    def to(x: Tensor, *words: Any, **named: Any) -> Tensor:
        wide = [torch.float64 if each is torch.float32 else each for each in (*words, *named.values())]
        return usual(x, *wide[: len(words)], **dict(zip(named, wide[len(words) :], strict=True)))

    with mock.patch.multiple(torch.Tensor, to=to, float=torch.Tensor.double):
        yield


def _products(named: ByName) -> ByName:
    """Replaces the factors of each linear by B A."""
    linears = [name.removesuffix(".A") for name in named if name.endswith(".A")]
    products = {name: named[f"{name}.B"] @ named[f"{name}.A"] for name in linears}
    return products | {name: value for name, value in named.items() if name.rpartition(".")[0] not in linears}


def time_steps(config: Config, rounds: int, words: str) -> Facts:
    """Times whole training steps, after checking that their losses agree."""
    mesh, module = Mesh(torch.device("cpu")), published(config).module

    def passes(tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        loss = mean_loss(module(input_ids=tokens_BS, use_cache=False).logits, targets_BS)
        loss.backward()
        return loss.detach()

    ours, theirs = Stepper(config, mesh).step, PlainStep(module, passes, config, mesh.device)
    if not abs((loss := ours()[0].item()) - (other := theirs()[0].item())) <= 1e-4 * other:
        raise MeasurementError(f"{words}: loss {loss} in BOOST and {other} in the published code")
    return _timed({OURS: ours, THEIRS: theirs}, mesh, rounds, words)


def time_updates(config: Config, number: int, rounds: int, words: str) -> Facts:
    """Times the update of step `number` alone, from gradients of the same batch."""
    mesh, other = Mesh(torch.device("cpu")), published(config)
    stepper = Stepper(config, mesh)
    stepper.step()  # leaves gradients
    batch = steps.made_up_batches(config)[0]
    tokens, targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)
    mean_loss(other.module(input_ids=tokens, use_cache=False).logits, targets).backward()
    gradients = [(parameter, parameter.grad) for parameter in other.module.parameters()]

    def ours() -> list[Tensor]:
        stepper.optimizer.step(number, config.optim.lr)
        return [fused.tensor for fused in stepper.fused_params]

    def theirs() -> list[Tensor]:
        for parameter, gradient in gradients:  # the published optimizer replaces gradients with directions
            parameter.grad = gradient
        other.update(number)
        return [parameter for parameter, _ in gradients]

    return _timed({OURS: ours, THEIRS: theirs}, mesh, rounds, words)


def _timed(calls: Mapping[str, Call], mesh: Mesh, rounds: int, words: str) -> Facts:
    seconds = take_turns(calls, mesh, rounds, least_s=LEAST_S, words=words).seconds
    return {"seconds": seconds, "speedup": asdict(ratio(seconds[THEIRS], seconds[OURS]))}


def arguments(parser: argparse.ArgumentParser) -> None:
    for name, clone in (("CoLA", "../CoLA"), ("LORO", "../LORO-main")):
        words = f"clone of {name} (default {clone})"
        parser.add_argument(f"--{name.lower()}", type=Path, default=Path(clone), metavar="DIR", help=words)
    parser.add_argument("--out", type=Path, default=RESULT, metavar="PATH", help=f"default {RESULT}")
    add_rounds(parser, 15)


def run(args: argparse.Namespace) -> int:
    """Runs all comparisons and writes the result. Raises ConfigError if the published code cannot be imported, and MeasurementError
    if its results differ from BOOST's."""
    require_least("--rounds", [args.rounds], LEAST_ROUNDS)
    git, commits = ("describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"), {}
    for name, folder, package in (("cola", args.cola, "cola"), ("loro", args.loro, "loro_torch")):
        if not (folder / package).is_dir():
            raise ConfigError(f"--{name} = '{folder}' has no folder '{package}'; clone the repository there")
        sys.path.insert(0, str(folder.resolve()))
        commits[name] = subprocess.run(["git", "-C", folder, *git], capture_output=True, text=True).stdout.strip()
    try:
        transformers, *_ = map(importlib.import_module, ("transformers", "cola", "loro_torch.loro_optim"))
    except ImportError as error:
        raise ConfigError(
            f"the published code cannot be imported ({error}); pip install 'transformers==4.48.*'"
        ) from None
    transformers.logging.set_verbosity_error()
    equal, timed = {}, {}
    for name, (preset, words, limit) in RECIPES.items():
        found = equal[name] = compare(load(preset, words))
        print(f"{name}: losses differ by {found['loss']:.1e}, weights by {found['weights']:.1e}", flush=True)
        if not all(value <= limit for value in found.values()):
            raise MeasurementError(f"{name}: BOOST and the published code differ by more than {limit}: {found}")
    for size, config in sizes(None, ["--run.device=cpu"]).items():
        timed[f"CoLA, training step, {size}"] = time_steps(of_family(config, "cola"), args.rounds, f"CoLA, {size}")
        recipe = {"name": "loro", "exact_every": EXACT_EVERY, "weight_decay": 0.0, "beta2": 0.999, "eps": 1e-6}
        loro = of_family(config, "svd").changed(optim=recipe)
        for kind, number in (("approximate update", 0), ("exact update", EXACT_EVERY - 1)):
            name = f"LORO, {kind}, {size}"
            timed[name] = time_updates(loro, number, args.rounds, name)
        wide, name = {"param_dtype": "float64", "compute_dtype": "float64"}, f"LORO, exact update in fp64, {size}"
        with _fp64():
            timed[name] = time_updates(loro.changed(train=wide), EXACT_EVERY - 1, args.rounds, name)
    for name, facts in timed.items():
        print(f"{name}: {in_words(Ratio(**facts['speedup']))} times as fast as the published code", flush=True)
    whole = {"environment": environment(load("demo", ["--parallel.tp=1"])), "published": commits}
    whole |= {"transformers": transformers.__version__, "rounds": args.rounds, "equal": equal, "timed": timed}
    write_numbers(args.out, whole)
    return 0
