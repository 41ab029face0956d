"""How long an optimizer step takes on given hardware, and what it is made of. Arithmetic only.

A micro-batch is its operations, each by a roofline whose roof depends on the shape, and the collectives of TP, which all wait
for. A step is its micro-batches through the pipeline, the sums of gradients (and gathers of weights that replicas share) as
far as computation does not hide them, and the optimizer.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from boost.config.architecture import first_alike, flops_per_token, has_latent_gate
from boost.config.factors import needs_whole_factors
from boost.config.schema import Config, ModelConfig, RecomputeName
from boost.config.stages import Stage, stages
from boost.config.traffic import Collective
from boost.plan import trace
from boost.plan.collectives import boundary_sends
from boost.plan.hardware import Hardware, Speeds
from boost.plan.network import seconds as collective_seconds
from boost.plan.network import span
from boost.plan.optimizer import optimizer_collectives
from boost.plan.replicas import gathers, gradient_collectives
from boost.plan.step import as_stored, kinds_of_blocks, step_work
from boost.plan.trace import told, trace_block, trace_embedding, trace_loss
from boost.plan.work import ATTENTION, ATTENTION_BACKWARD, GEMM, Counted, Work

GEMMS = "matrix products"
ATTENTION_TIME = "attention"
OTHER = "element-wise"
RECOMPUTED = "recomputed"
HOST = "host"
TENSOR = "TP collectives"
PIPELINE = "pipeline sends"
BUBBLE = "pipeline bubble"
REPLICAS = "DP collectives"
OPTIMIZER_TIME = "optimizer"
REST = "rest"

PARTS = {
    GEMMS: "forward and backward pass, the head's too",
    ATTENTION_TIME: "softmax(q k^T) v and its gradients",
    OTHER: "norms, activations, rotary, residual, loss, casts",
    RECOMPUTED: "what the backward pass computes again",
    HOST: "devices wait for the host to issue operations",
    TENSOR: "over TP processes, none hidden",
    PIPELINE: "to and from neighbouring stages",
    BUBBLE: "stages wait for each other",
    REPLICAS: "gradients and shared weights, what is not hidden",
    OPTIMIZER_TIME: "gradient norm, clipping, update",
    REST: "batches, step stats",
}
"""What the time of a step is spent on, in words."""


Seconds = defaultdict[str, float]
"""By name."""


@dataclass
class PassTime:
    """Seconds of one micro-batch on one pipeline process."""

    parts: Seconds = field(default_factory=lambda: defaultdict(float))
    forward: float = 0.0
    backward: float = 0.0
    """Recomputation included."""
    weight_gradients: float = 0.0
    """Of the backward pass, what no other stage waits for."""
    calls: int = 0
    """Operations that the host issues."""

    @property
    def total(self) -> float:
        """Both passes."""
        return self.forward + self.backward

    def add(self, other: "PassTime", times: int) -> None:
        """So many others, one behind the other."""
        for part, seconds in other.parts.items():
            self.parts[part] += times * seconds
        self.forward += times * other.forward
        self.backward += times * other.backward
        self.weight_gradients += times * other.weight_gradients
        self.calls += times * other.calls

    def wait(self, seconds: float) -> None:
        """For the host, a third of it in the forward pass."""
        self.parts[HOST] += seconds
        self.forward += seconds / 3
        self.backward += seconds * 2 / 3


@dataclass(frozen=True)
class StepTime:
    """A predicted optimizer step."""

    seconds: float
    parts: dict[str, float]
    """Seconds by PARTS, of the busiest pipeline process; they sum up to `seconds`."""
    tokens: int
    """Of the global batch."""
    devices: int
    flops: float
    """Of the model's mathematics (recomputation never counted), whole step and mesh."""
    peak_flops: float
    """Of one device."""
    hidden: float
    """Seconds of DP collectives that computation hides."""

    @property
    def tokens_per_second(self) -> float:
        """Of all devices."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation, a fraction."""
        return self.flops / (self.seconds * self.devices * self.peak_flops)

    def cost_per_billion(self, price: float) -> float:
        """Money for 10^9 tokens, at `price` for one device and hour."""
        return price * self.devices * 1e9 / self.tokens_per_second / 3600


def predict(config: Config, hardware: Hardware) -> StepTime:
    """The time of a usual step. Raises ConfigError for a dtype that the hardware has no speed for."""
    return Predictor(hardware).predict(config)


class Predictor:
    """Predictions on one hardware. What configurations share, as a block under one layout, is computed once."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.fused_norm = hardware.has_fused_norm
        self._known: dict[tuple[Any, ...], Any] = {}
        self._models: list[ModelConfig] = []

    def predict(self, config: Config) -> StepTime:
        """As the function."""
        parallel, train, hardware = config.parallel, config.train, self.hardware
        count = train.global_batch // (parallel.dp * train.micro_batch)
        every, passes = stages(config), self.passes(config)
        busiest = max(range(parallel.pp), key=lambda rank: passes[rank].total)
        worst = passes[busiest]
        parts = defaultdict(float, {name: count * value for name, value in worst.parts.items()})
        parts[BUBBLE] = _bubble(config, passes, worst) * self._alone(config)
        held = every[busiest :: parallel.pp]
        exposed, hidden = self._replicas(config, held, worst, count)
        parts[REPLICAS] += exposed
        parts[OPTIMIZER_TIME] += self._once(config, held)
        parts[REST] += hardware.step_ms * 1e-3
        tokens = train.global_batch * train.seq_len
        return StepTime(
            seconds=sum(parts.values()),
            parts={name: parts[name] for name in PARTS if parts[name]},
            tokens=tokens,
            devices=parallel.world_size,
            flops=float(tokens * self._cached(config, "flops", flops_per_token, config.model, train.seq_len)),
            peak_flops=hardware.peak_flops(train.compute_dtype),
            hidden=hidden,
        )

    def passes(self, config: Config) -> list[PassTime]:
        """One micro-batch on each pipeline process."""
        every = stages(config)
        return [self._pass(config, every[rank :: config.parallel.pp]) for rank in range(config.parallel.pp)]

    def at_least(self, config: Config) -> float:
        """Seconds that `predict` says at least if nothing is recomputed, for a fraction of its work: stages of equal length,
        replicas and optimizer for nothing."""
        parallel, train, model = config.parallel, config.train, config.model
        kinds = self._of_step(config, "kinds", lambda: kinds_of_blocks(model, range(model.layers)))
        total = sum(
            count * self._cached(config, (layer, "none"), self._block, config, layer, "none").total
            for layer, count in kinds.items()
        )
        ends = (Stage(0, 2), Stage(1, 2)) if parallel.pp > 1 else (Stage(),)
        for stage in ends:
            key = (stage.has_embedding, stage.has_head)
            total += self._cached(config, key, self._ends, config, stage).total
        count = train.global_batch // (parallel.dp * train.micro_batch)
        if parallel.schedule == "zero-bubble" or self.hardware.alone is not None:
            return count * total / parallel.pp
        return (count - 1 / parallel.virtual) * total / parallel.pp + total / parallel.virtual

    def _alone(self, config: Config) -> float:
        """Time of a stage at work while the others wait, over that with all of them at work: cores share memory and clocks."""
        hardware, parallel, dtype = self.hardware, config.parallel, config.train.compute_dtype
        if hardware.alone is None or not 1 < parallel.pp == parallel.world_size <= hardware.per_node:
            return 1.0
        large = (4096, 4096, 4096)
        together, alone = (of.gemm_speed(dtype).flops_per_s(*large) for of in (hardware.speeds, hardware.alone))
        return min(together / alone, 1.0)

    def _speeds(self, config: Config) -> Speeds:
        return self.hardware.speeds_of(min(config.parallel.world_size, self.hardware.per_node))

    def _pass(self, config: Config, held: Sequence[Stage]) -> PassTime:
        """One micro-batch through all stages of one pipeline process."""
        policies, result = config.train.recompute_by_layer(config.model.layers), PassTime()
        for stage in held:
            kinds = Counter((first_alike(config.model, layer), policies[layer]) for layer in stage.numbers)
            for (layer, policy), count in kinds.items():
                result.add(self._cached(config, (layer, policy), self._block, config, layer, policy), count)
            result.add(self._cached(config, (stage.has_embedding, stage.has_head), self._ends, config, stage), 1)
            if stage.count > 1:
                result.add(self._sends(config, stage), 1)
        # On a GPU the host issues ahead, and is waited for where it is slower than the device.
        issuing = self.hardware.host_us * 1e-6 * result.calls
        computing = result.total - sum(result.parts[part] for part in (TENSOR, PIPELINE))
        result.wait(issuing if self.hardware.device == "cpu" else max(issuing - computing, 0.0))
        return result

    def _block(self, config: Config, layer: int, policy: RecomputeName) -> PassTime:
        run = trace_block(as_stored(config), layer, policy, self.fused_norm)
        return self._of(config, [run])

    def _ends(self, config: Config, stage: Stage) -> PassTime:
        stored = as_stored(config)
        runs = [trace_embedding(stored)] if stage.has_embedding else []
        runs += [trace_loss(stored, self.fused_norm)] if stage.has_head else []
        return self._of(config, runs)

    def _sends(self, config: Config, stage: Stage) -> PassTime:
        """To and from the neighbours: of the first block and the last, whose boundaries they are."""
        result = PassTime()
        first, last = stage.numbers[0], stage.numbers[-1]
        key = (
            "sends",
            stage.has_embedding,
            stage.has_head,
            has_latent_gate(config.model, first),
            has_latent_gate(config.model, last),
        )
        train = config.train
        sends = list(
            boundary_sends(config.model, config.parallel, train.micro_batch * train.seq_len, train.compute_dtype, stage)
        )
        sent = self._cached(config, key, lambda: self._sums(config, sends))
        # What is sent here is received there: each pass of a micro-batch waits for one of each.
        result.forward, result.backward = 2 * sent["pp forward"], 2 * sent["pp backward"]
        result.parts[PIPELINE] = result.total
        return result

    def _of(self, config: Config, runs: Sequence[trace.TracedPass]) -> PassTime:
        """Operations and collectives, one after the other."""
        work = sum((run.work for run in runs), Counter[Work]())
        seconds = busy(work, self._speeds(config))
        sent = self._sums(config, (each for run in runs for each in run.collectives))
        result = PassTime(calls=work.total())
        for part in (GEMMS, ATTENTION_TIME, OTHER):
            result.parts[part] = seconds[f"forward {part}"] + seconds[f"backward {part}"]
        result.parts[RECOMPUTED] = seconds["recompute"]
        result.parts[TENSOR] = sent["tp forward"] + sent["tp backward"]
        result.forward = seconds["forward"] + sent["tp forward"]
        result.backward = seconds["recompute"] + seconds["backward"] + sent["tp backward"]
        result.weight_gradients = seconds[f"backward {GEMMS}"] / 2
        return result

    def _sums(self, config: Config, collectives: Iterable[Collective]) -> Seconds:
        """Seconds by axis and phase; what is sent again belongs to the backward pass."""
        result: Seconds = defaultdict(float)
        for each in collectives:
            direction = "forward" if each.phase == "forward" else "backward"
            result[f"{each.axis} {direction}"] += collective_seconds(each, config.parallel, self.hardware)
        return result

    def _replicas(self, config: Config, held: Sequence[Stage], worst: PassTime, count: int) -> tuple[float, float]:
        """(exposed, hidden) seconds of gradients and of weights that replicas share, a step."""
        parallel, overlap = config.parallel, self.hardware.overlap
        # A pipeline under FSDP gathers for each micro-batch, all in phase 'step'.
        gathered = count if parallel.shard == "full" and parallel.pp > 1 else 0
        sums: Seconds = self._of_step(config, ("replicas", held, gathered), self._replica_sums, config, held)
        # Sums are under way during the last backward pass; gathers for the whole step during all of it.
        cover = overlap * (worst.backward if parallel.shard == "none" else worst.total)
        if parallel.shard == "full" and parallel.pp > 1:
            cover = overlap * worst.total * count
        exposed = max(sums["step"] - cover, 0.0)
        for phase, computing in (("forward", worst.forward), ("backward", worst.backward)):
            exposed += count * max(sums[phase] - overlap * computing, 0.0)
        return exposed, sums["step"] + count * (sums["forward"] + sums["backward"]) - exposed

    def _replica_sums(self, config: Config, held: Sequence[Stage]) -> Seconds:
        """Seconds by phase: of each micro-batch, or once a step."""
        sums: Seconds = defaultdict(float)
        alike = Counter((*gradient_collectives(config, held), *gathers(config, held)))
        for each, times in alike.items():
            sums[each.phase] += times * collective_seconds(each, config.parallel, self.hardware)
        return sums

    def _once(self, config: Config, held: Sequence[Stage]) -> float:
        """What is done between the last backward pass and the next step."""
        accumulated = config.train.global_batch // (config.parallel.dp * config.train.micro_batch)
        seconds: float = self._of_step(config, ("once", held, accumulated), self._once_seconds, config, held)
        return seconds

    def _once_seconds(self, config: Config, held: Sequence[Stage]) -> float:
        work = step_work(config, held)
        seconds = busy(work, self._speeds(config))["step"]
        issuing = self.hardware.host_us * 1e-6 * work.total()
        seconds = seconds + issuing if self.hardware.device == "cpu" else max(seconds, issuing)
        if needs_whole_factors(config.optim):
            rank = held[0].index % config.parallel.pp
            whole = optimizer_collectives(config, rank)
            seconds += sum(collective_seconds(each, config.parallel, self.hardware) for each in whole)
        return seconds

    def _cached(self, config: Config, key: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        """What `function` returns of a micro-batch, computed once for all configurations that agree on model, TP, layout and
        micro-batch."""
        p, train, per_node = config.parallel, config.train, self.hardware.per_node
        # How a group lies on nodes, and how many processes a node has.
        places = (span("tp", p, per_node), span("pp", p, per_node), min(p.world_size, per_node))
        shared = (*told(p, "parallel"), *told(train, "train"), places)
        return self._known_or(config, (shared, key), function, arguments)

    def _of_step(self, config: Config, key: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        """The same of what is done once a step, whatever the micro-batch."""
        p = config.parallel
        return self._known_or(config, ((p.dp, p.pp, p.shard, p.shard_outer), key), function, arguments)

    def _known_or(self, config: Config, key: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        model, p, train = config.model, config.parallel, config.train
        if all(model is not each for each in self._models):
            self._models.append(model)  # kept, so that its identity is not given to another
        whole = (id(model), p.layout, p.tp, train.compute_dtype, train.param_dtype, key)
        if whole not in self._known:
            self._known[whole] = function(*arguments)
        return self._known[whole]


def busy(work: Counted, speeds: Speeds) -> Seconds:
    """Seconds on the device by phase, and of each phase by part, as '<phase>' and '<phase> <part>'."""
    result: Seconds = defaultdict(float)
    for each, times in work.items():
        seconds = times * speeds.seconds(each)
        result[each.phase] += seconds
        result[f"{each.phase} {_part(each.kernel)}"] += seconds
    return result


def _part(kernel: str) -> str:
    if kernel == GEMM:
        return GEMMS
    return ATTENTION_TIME if kernel in (ATTENTION, ATTENTION_BACKWARD) else OTHER


def _bubble(config: Config, passes: list[PassTime], worst: PassTime) -> float:
    """What the busiest pipeline process waits for the others, all micro-batches together.

    gpipe, 1F1B: the other processes' share of the first and last micro-batch (arXiv 1811.06965, 2006.09503). v stages a
    process make it v times shorter (arXiv 2104.04473); weight gradients, which nobody waits for, fill it (2401.10241).
    """
    schedule = config.parallel.schedule
    others = sum(each.total for each in passes) - worst.total
    if schedule == "zero-bubble":
        others -= 2 * sum(each.weight_gradients for each in passes if each is not worst)
    return max(others, 0.0) / config.parallel.virtual
