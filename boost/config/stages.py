"""Pipeline stages: blocks per stage, balanced by cost, and the assignment of stages to pipeline ranks.

Stage s of pp x v stages belongs to PP rank s mod pp. The first stage has the embedding, the last one the head and the loss.
"""

import functools
from dataclasses import dataclass, field

from boost.config.architecture import block_flops_per_token, first_alike, groups
from boost.config.schema import Config, ModelConfig, RecomputeName, TrainConfig
from boost.config.traffic import ITEMSIZE

FLOPS_PER_BYTE = 100
"""Cost of one byte of memory traffic in FLOPs: an A100 peaks at 312 TFLOP/s in bf16 and 2.0 TB/s, and GEMMs reach about two
thirds of the former. Only used for the embedding, which has no FLOPs."""


@dataclass(frozen=True)
class Stage:
    """Consecutive blocks, plus the embedding in the first stage and the head in the last one."""

    index: int = 0
    count: int = 1
    first_layer: int = 0
    layers: int = 0
    has_embedding: bool = field(init=False)
    """Whether this stage has the embedding."""
    has_head: bool = field(init=False)
    """Whether this stage has the head and the loss."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "has_embedding", self.index == 0)
        object.__setattr__(self, "has_head", self.index == self.count - 1)

    @property
    def numbers(self) -> range:
        """Indices of its blocks in the model."""
        return range(self.first_layer, self.first_layer + self.layers)


def whole(model: ModelConfig) -> Stage:
    """The only stage of a model without pipeline parallelism."""
    return Stage(layers=model.layers)


def stages(config: Config) -> tuple[Stage, ...]:
    """All stages of the model, in forward order, split as `parallel.split` specifies, or balanced by cost."""
    parallel = config.parallel
    return _stages(config.model, config.train, parallel.stages, tuple(parallel.split))


@functools.lru_cache(maxsize=4096)  # a search needs the same stages many times
def _stages(model: ModelConfig, train: TrainConfig, count: int, split: tuple[int, ...]) -> tuple[Stage, ...]:
    if count == 1:
        return (whole(model),)
    lengths = split or balanced(costs(model, train), count)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return tuple(
        Stage(i, len(lengths), start, length) for i, (start, length) in enumerate(zip(starts, lengths, strict=True))
    )


def stages_of(config: Config, pp_rank: int) -> tuple[Stage, ...]:
    """The stages of pipeline rank `pp_rank`."""
    return stages(config)[pp_rank :: config.parallel.pp]


@dataclass(frozen=True)
class Costs:
    """Cost of one micro-batch, forward and backward, in FLOPs of the unsharded model (TP divides all parts equally)."""

    embedding: float
    blocks: tuple[float, ...]
    head: float


def costs(model: ModelConfig, train: TrainConfig) -> Costs:
    """Cost of each part of the model, including recomputation, which MFU does not count."""
    tokens = train.micro_batch * train.seq_len

    @functools.cache
    def cost_of(layer: int, policy: RecomputeName) -> float:
        """Cost of a block that recomputes nothing, its whole forward pass, or the part after the latents."""
        flops = block_flops_per_token(model, train.seq_len, layer)
        again = 0.0
        if policy == "full-block":
            again = flops / 3
        elif policy != "none":
            entering = [p.size for g in groups(model, layer) if g.side == "enter" for p in g.maps("", "outer")]
            attention = 2.0 * model.heads_dim * train.seq_len
            again = 2.0 * sum(entering) + (0.0 if policy == "low-rank+attention-output" else attention)
        return tokens * (flops + again)

    policies = train.recompute_by_layer(model.layers)
    blocks = tuple(cost_of(first_alike(model, layer), policy) for layer, policy in enumerate(policies))
    # Forward copies T rows; backward reads and adds them. The gradient of the table is zeroed, then accumulated.
    traffic = (2 + 3) * tokens * model.dim + (1 + 3) * model.vocab_size * model.dim
    embedding = FLOPS_PER_BYTE * ITEMSIZE[train.param_dtype] * traffic
    return Costs(embedding, blocks, 6.0 * tokens * model.vocab_size * model.dim)


@functools.lru_cache(maxsize=4096)
def balanced(costs: Costs, count: int) -> tuple[int, ...]:
    """Blocks per stage, at least one each. Minimizes the cost of the slowest stage, then prefers the most even split.

    Exact, by dynamic programming over (stage, blocks before it).
    """
    layers = len(costs.blocks)
    assert count <= layers
    if count == 1:
        return (layers,)
    before = [sum(costs.blocks[:i]) for i in range(layers + 1)]
    unit = (costs.embedding + before[-1] + costs.head) / count

    # best[n]: (worst stage, sum of squares, lengths) of the stages so far over the first n blocks.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for stage in range(count):
        ends = (costs.embedding if stage == 0 else 0) + (costs.head if stage == count - 1 else 0)
        longer: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for start, (worst, squares, lengths) in best.items():
            for end in range(start + 1, layers - (count - 1 - stage) + 1):
                # Rounded to an integer, so that mirror-image splits cost exactly the same regardless of summation order.
                here = round((before[end] - before[start] + ends) / unit * 1e9)
                candidate = (max(worst, here), squares + here * here, (*lengths, end - start))
                longer[end] = min(longer.get(end, candidate), candidate)
        best = longer
    return best[layers][2]
