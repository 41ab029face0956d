"""`boost plan --worth`: a low-rank model against dense models of equal shape, parameters, FLOPs and time."""

import argparse
import bisect
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from boost.cli.plan_report import SCHEMA, TOKENS_PER_PARAMETER, as_json, asked_keys, asked_words, console
from boost.cli.terminal import new_table, print_table, searching
from boost.config.architecture import flops_per_token, parameter_count
from boost.config.load import dense_of
from boost.config.recipes import recipes, tokens_of
from boost.config.schema import Config, ModelConfig
from boost.errors import ConfigError
from boost.format import format_bytes, format_count, format_seconds
from boost.plan.candidates import Request
from boost.plan.collectives import step_collectives
from boost.plan.explain import choices, mesh
from boost.plan.search import Plan, Search

HEAD_STEP, FFN_STEP = 8, 64
"""Steps of the head dimension and of the MLP's width in which dense models are scaled, so that TP divides them."""

NOT_KNOWN = "not known"


@dataclass(frozen=True)
class Contestant:
    """A model with its fastest plan."""

    name: str
    plan: Plan
    tokens: float
    """Tokens that it trains on."""

    @property
    def model(self) -> ModelConfig:
        return self.plan.config.model

    @property
    def gpu_hours(self) -> float:
        return self.tokens / self.plan.time.tokens_per_second * self.plan.time.devices / 3600

    @property
    def sent_bytes(self) -> int:
        """Bytes that one process sends per step."""
        return sum(each.sent_bytes for each in step_collectives(self.plan.config, self.plan.pp_rank))

    @property
    def perplexity(self) -> str:
        """The published perplexity of this model, with its tokens and source; 'not known' if there is none."""
        for recipe in recipes().values():
            published = recipe.config()
            if recipe.perplexity and _shape(published.model) == _shape(self.model):
                return f"{recipe.perplexity} on C4 after {format_count(tokens_of(published))} tokens ({recipe.source})"
        return NOT_KNOWN


def _shape(model: ModelConfig) -> tuple[object, ...]:
    return model.family, model.dim, model.layers, model.heads, model.ffn_dim, model.rank, model.vocab_size


def print_worth(args: argparse.Namespace, request: Request) -> int:
    """Prints the comparison. Raises ConfigError if the model is dense or does not fit."""
    if not request.base.model.low_rank:
        raise ConfigError(
            f"--worth compares a low-rank model with dense ones; model.family = '{request.base.model.family}'"
        )
    with searching("dense models") as tick:
        every = list(contestants(args, request, tick))
    if args.json:
        answers = [
            {"name": each.name, "tokens": each.tokens, "gpu_hours": each.gpu_hours, "sent_bytes": each.sent_bytes}
            | {"perplexity": each.perplexity, **as_json(each.plan, request.hardware)}
            for each in every
        ]
        print(json.dumps({"schema": SCHEMA, "argv": asked_words(args), "answers": answers}, indent=2))
        return 0
    from rich.text import Text

    out, ours = console(), every[0]
    out.print(Text(f"{args.gpus} x {request.hardware.title}, {format_count(ours.tokens)} tokens"), soft_wrap=True)
    numbers = ("parameters", "FLOPs/token", "step", "GPU-hours", "memory", "sent")
    table = new_table(("model", *numbers, "configuration"), right=numbers)
    for each in every:
        time, config = each.plan.time, each.plan.config
        flops = flops_per_token(each.model, config.train.seq_len)
        words = f"d {each.model.dim}, {mesh(config.parallel)}; {choices(config)}\nperplexity: {each.perplexity}"
        table.add_row(
            each.name, format_count(parameter_count(each.model)), format_count(flops), format_seconds(time.seconds),
            f"{each.gpu_hours:,.4g}", format_bytes(each.plan.memory), format_bytes(each.sent_bytes), Text(words),
        )  # fmt: skip
    print_table(out, table)
    less = format_count(ours.tokens * ours.gpu_hours / every[1].gpu_hours)
    notes = (
        f"In the GPU-hours of the low-rank model, the dense model of its shape trains {less} tokens.",
        "Memory and bytes sent are per GPU; bytes are per step.",
        "Losses are not predicted. Perplexities are published ones of the same model (ours, at width 192: docs/families.md).",
    )
    out.print()
    for note in notes:
        out.print(Text(f"- {note}"))
    return 0


def contestants(args: argparse.Namespace, request: Request, tick: Callable[[int, int], None]) -> Iterator[Contestant]:
    """Yields the low-rank model, then dense models of its shape, and scaled to its parameters, its FLOPs and its step time."""
    base, model = request.base, request.base.model
    first = Search(request)
    ours = _fastest(args, first)
    tokens = TOKENS_PER_PARAMETER * parameter_count(model)
    if args.gpu_hours is not None:
        tokens = args.gpu_hours * 3600 / ours.time.devices * ours.time.tokens_per_second
    elif "train.steps" in asked_keys(args):
        tokens = tokens_of(base)
    yield Contestant(f"{model.family}, as asked", ours, tokens)
    # The layout and recomputation that the user fixed may not exist for dense models.
    fixed = request.fixed - {"parallel.layout", "train.recompute"}
    plans: dict[int, Plan] = {}
    models = list(scaled(base))

    def plan_of(place: int) -> Plan:
        if place not in plans:
            tick(len(plans), len(models).bit_length() + 2)
            found = Search(replace(request, base=models[place], fixed=fixed), known=first)
            plans[place] = found.fastest() or found.smallest() or ours
        return plans[place]

    def nearest(of: Callable[[ModelConfig], int]) -> int:
        return min(range(len(models)), key=lambda place: abs(of(models[place].model) - of(model)))

    def fits_in_time(place: int) -> bool:
        plan = plan_of(place)
        return plan.shortfall <= 0 and plan.time.seconds <= ours.time.seconds

    yield Contestant("dense, equal shape", plan_of(len(models) - 1), tokens)
    yield Contestant("dense, equal parameters", plan_of(nearest(parameter_count)), tokens)
    equal_flops = nearest(lambda of: flops_per_token(of, base.train.seq_len))
    yield Contestant("dense, equal FLOPs", plan_of(equal_flops), tokens)
    slower = bisect.bisect_left(range(len(models)), True, key=lambda place: not fits_in_time(place))
    yield Contestant("dense, equal time", plan_of(max(slower - 1, 0)), tokens)


def _fastest(args: argparse.Namespace, search: Search) -> Plan:
    plan = search.fastest()
    if plan is None:
        raise ConfigError(
            f"{args.model} does not fit on {args.gpus} x {args.gpu}; boost plan without --worth names a way out"
        )
    return plan


def scaled(base: Config) -> Iterator[Config]:
    """Yields dense models in order of size, up to the shape of `base`: with as many blocks and heads, and MLPs of its relative
    width or wider, up to the size of the next head dimension."""
    whole = dense_of(base)
    model = whole.model
    least = max(model.head_dim // 4 // HEAD_STEP * HEAD_STEP, HEAD_STEP)
    models = []
    for head_dim in range(least, model.head_dim, HEAD_STEP):
        ffn_dim = max(round(model.ffn_dim * head_dim / model.head_dim / FFN_STEP), 1) * FFN_STEP
        models.append(model.model_copy(update={"dim": model.heads * head_dim, "ffn_dim": ffn_dim}))
    for smaller, larger in itertools.pairwise([*models, model]):
        while parameter_count(smaller) < parameter_count(larger):
            yield whole.model_copy(update={"model": smaller})
            smaller = smaller.model_copy(update={"ffn_dim": smaller.ffn_dim + FFN_STEP})
    yield whole
