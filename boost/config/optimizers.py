"""Learning-rate schedules and optimizers: common fields, and one class for each, with its own fields and rules.

`boost.optim.schedule` computes each schedule's rate from the step. Each optimizer class names the function that builds it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, SerializeAsAny

from boost.config.architecture import carries, is_product
from boost.config.section import Count, Decay, Fraction, Natural, NonNegative, Positive, Tagged, Values, WholeConfig


class LRSchedule(Tagged):
    """The learning rate after warmup."""

    key: ClassVar[str] = "optim.schedule"
    absent: ClassVar[Values] = {"restart_warmup_steps": 0}

    schedule: str = "cosine"
    """The learning rate after warmup."""

    @classmethod
    def suits(cls, optimizer: type[Tagged]) -> bool:
        """Whether the schedule works with the optimizer."""
        return True


class Cosine(LRSchedule):
    """Decays to min_lr_ratio * lr at the last step."""

    schedule: Literal["cosine"] = "cosine"


class Constant(LRSchedule):
    """Stays at lr until the final decay."""

    schedule: Literal["constant"] = "constant"

    decay_steps: Natural = 0
    """Number of final steps over which the learning rate decays linearly to min_lr_ratio * lr."""

    def problems(self, config: WholeConfig) -> Iterator[str]:
        """Warmup and decay must fit within the run."""
        warmup, steps = config.optim.warmup_steps, config.train.steps
        if self.decay_steps and warmup + self.decay_steps > steps:
            yield (
                f"optim.decay_steps = {self.decay_steps} and optim.warmup_steps = {warmup} do not fit within "
                f"train.steps = {steps}; largest valid value of optim.decay_steps: {max(steps - warmup, 0)}"
            )


class CosineRestarts(LRSchedule):
    """LORO's cosine with a warm restart whenever moments are cleared."""

    schedule: Literal["cosine-restarts"] = "cosine-restarts"

    restart_warmup_steps: Natural = 5
    """Steps of warmup from 0 back up to the cosine after every exact step. Default: the published value."""

    restart_delay: Natural = 0
    """Steps by which the cosine and its restarts are delayed. Must be a multiple of exact_every."""

    @classmethod
    def suits(cls, optimizer: type[Tagged]) -> bool:
        """Restarts follow exact steps."""
        return "exact_every" in optimizer.model_fields

    def problems(self, config: WholeConfig) -> Iterator[str]:
        """Restarts must coincide with cleared moments and fit within the run."""
        optim, steps, warmup = config.optim, config.train.steps, config.optim.warmup_steps
        if not self.suits(type(optim)):
            yield (
                "optim.schedule = 'cosine-restarts' requires optim.name = 'loro', because it restarts when LORO clears moments; "
                "use optim.name = 'loro', or optim.schedule = 'cosine'"
            )
            return
        period = optim.exact_every
        if self.restart_warmup_steps > period:
            yield (
                f"optim.restart_warmup_steps = {self.restart_warmup_steps} exceeds the number of steps between restarts, "
                f"optim.exact_every = {period}; largest valid value: {period}"
            )
        most = max(steps - warmup, 0) // period * period
        if self.restart_delay % period:
            best = min(max((2 * self.restart_delay + period) // (2 * period), 1) * period, most)
            yield (
                f"optim.restart_delay = {self.restart_delay} must be a multiple of optim.exact_every = {period}, so that the "
                f"learning rate drops only when moments are cleared; nearest valid value: {best}"
            )
        if self.restart_delay > most:
            yield (
                f"optim.restart_delay = {self.restart_delay} and optim.warmup_steps = {warmup} move the peak of the cosine past "
                f"train.steps = {steps}; largest valid value of optim.restart_delay: {most}"
            )
        if warmup >= steps:
            yield (
                f"optim.warmup_steps = {warmup} leaves no steps of train.steps = {steps} for optim.schedule = "
                f"'cosine-restarts'; largest valid value: {steps - 1}"
            )


class OptimConfig(Tagged):
    """Optimizer and learning-rate schedule. All optimizers have AdamW's fields, because they use it for the embedding, head
    and norms."""

    key: ClassVar[str] = "optim.name"
    absent: ClassVar[Values] = {"exact_every": 0}
    if TYPE_CHECKING:  # readable for every optimizer: its own field, or the value in `absent`
        exact_every: int = 0

    for_factors: ClassVar[bool] = False
    """Whether the optimizer has its own update for the factors A and B."""

    builder: ClassVar[str]
    """module:name of a function (fused parameters, configuration, mesh) -> optimizer. A string, because this package does not
    import torch."""

    whole_factors: ClassVar[bool] = False
    """Whether every step (not just one in exact_every) needs whole factors."""

    factor_copies: ClassVar[int] = 1
    """Number of factor-shaped tensors in the workspace for a step on gathered factors."""

    factor_dtype: ClassVar[str] = "float32"
    """Minimum dtype for computations on gathered factors."""

    factor_bucket: ClassVar[int] = 1
    """Size of a bucket of gathered factors, as a multiple of BUCKET_BYTES."""

    name: str = "adamw"
    """Optimizer."""

    lr: Positive = 3e-3
    """Peak learning rate."""

    beta1: Decay = 0.9
    """AdamW's decay rate of the first moment."""

    beta2: Decay = 0.999
    """AdamW's decay rate of the second moment."""

    eps: Positive = 1e-8
    """AdamW's epsilon. LORO adds it to sqrt(v) before bias correction, as published."""

    weight_decay: NonNegative = 0.01
    """Decoupled weight decay."""

    decay_on: Literal["all", "matrices"] = "all"
    """Parameters that weight decay applies to. all: every parameter (CoLA's recipe); matrices: only the matrices of the linears,
    not the embedding, head or norms."""

    clip: NonNegative = 0.5
    """Maximum global gradient norm; 0 disables clipping (the norm is still logged)."""

    warmup_steps: Natural = 0
    """Steps of linear warmup from 0 (cosine-restarts: from min_lr_ratio * lr) to lr."""

    min_lr_ratio: Fraction = 0.1
    """Final learning rate as a fraction of lr."""

    lr_schedule: SerializeAsAny[LRSchedule] = Field(default_factory=LRSchedule)
    """Learning-rate schedule. In a file, its keys are `schedule` and the fields of the selected schedule."""

    @classmethod
    def switch(cls, table: dict[str, object], changes: Values) -> None:
        """Falls back to the default schedule if the current one does not work with the new optimizer."""
        optimizer, schedule = cls.find(changes.get("name")), LRSchedule.find(table.get("schedule"))
        if optimizer and schedule and "schedule" not in changes and not schedule.suits(optimizer):
            changes = {**changes, "schedule": LRSchedule.model_fields["schedule"].default}
        super().switch(table, changes)

    def problems(self, config: WholeConfig) -> Iterator[str]:
        """Requires low-rank factors if the optimizer is for them; checks the schedule."""
        if self.for_factors and not config.model.low_rank:
            yield (
                f"optim.name = '{self.name}' is for low-rank factors, but model.family = '{config.model.family}' has none; use "
                "optim.name = 'adamw' or model.family = 'svd'"
            )
        yield from self.lr_schedule.problems(config)


class AdamWConfig(OptimConfig):
    """AdamW for every parameter."""

    builder: ClassVar[str] = "boost.optim.adamw:plain_adamw"
    name: Literal["adamw"] = "adamw"


class LOROConfig(OptimConfig):
    """AdamW, with Riemannian steps on the low-rank manifold for the factors (ICLR 2025), for model.family = svd."""

    builder: ClassVar[str] = "boost.optim.loro:Loro"
    for_factors: ClassVar[bool] = True
    factor_copies: ClassVar[int] = 2  # factors and directions
    factor_dtype: ClassVar[str] = "float64"
    factor_bucket: ClassVar[int] = 8  # enough pairs to keep all processes busy
    name: Literal["loro"] = "loro"

    exact_every: Count = 500
    """K: the last of every K steps is exact; all moments are then cleared. Published runs use 500 and 200."""

    def is_exact(self, step: int) -> bool:
        """Whether step `step` (0-based) is exact: the K-th, 2K-th, ... step of training."""
        return (step + 1) % self.exact_every == 0

    def problems(self, config: WholeConfig) -> Iterator[str]:
        """An exact step changes the basis of the latents; only y = B (A x) is invariant to it."""
        yield from super().problems(config)
        model = config.model
        if model.low_rank and not is_product(model):
            has_act = model.latent_act != "none" and not carries(model)
            what = f"model.latent_act = '{model.latent_act}'" if has_act else f"model.family = '{model.family}'"
            yield (
                f"optim.name = 'loro' changes the basis of the latents, to which {what} is not invariant; use "
                "model.family = 'svd' with model.latent_act = 'none'"
            )


class MuonConfig(OptimConfig):
    """Orthogonalized momentum for the factors, and AdamW for the rest."""

    builder: ClassVar[str] = "boost.optim.muon:Muon"
    for_factors: ClassVar[bool] = True
    whole_factors: ClassVar[bool] = (
        True  # orthogonalizing each shard of a factor separately would be a different update
    )
    factor_bucket: ClassVar[int] = 4  # enough Gram matrices to keep most processes busy
    name: Literal["muon"] = "muon"

    muon_lr: NonNegative = 0.0
    """Peak learning rate of the factors, on the same schedule. 0: same as lr."""

    muon_momentum: Decay = 0.95
    """Momentum coefficient."""

    muon_nesterov: bool = True
    """Use Nesterov momentum."""

    muon_adjust: Literal["original", "match_rms_adamw"] = "original"
    """Scale of the learning rate for an m x n factor. original: sqrt(max(1, m / n)); match_rms_adamw: 0.2 sqrt(max(m, n)), so that
    learning rate and weight decay tuned for AdamW carry over."""

    muon_steps: Annotated[int, Field(ge=1, le=99)] = 5
    """Number of Newton-Schulz iterations."""
