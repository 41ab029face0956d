"""Learning-rate schedules, one class each. `boost.optim.schedule` computes their rates as functions of the step."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from boost.config.section import Natural, Tagged

if TYPE_CHECKING:
    from boost.config.schema import Config


class LRSchedule(Tagged):
    """The learning rate after warmup."""

    key: ClassVar[str] = "optim.schedule"
    absent: ClassVar[Mapping[str, Any]] = {"restart_warmup_steps": 0}

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

    def problems(self, config: "Config") -> Iterator[str]:
        """Warmup and decay must fit within the run."""
        warmup, steps = config.optim.warmup_steps, config.train.steps
        if self.decay_steps and warmup + self.decay_steps > steps:
            yield (
                f"optim.decay_steps = {self.decay_steps} and optim.warmup_steps = {warmup} do not fit within "
                f"train.steps = {steps}; largest valid value: {max(steps - warmup, 0)}"
            )


class CosineRestarts(LRSchedule):
    """LORO's cosine with a warm restart whenever moments are cleared."""

    schedule: Literal["cosine-restarts"] = "cosine-restarts"

    restart_warmup_steps: Natural = 5
    """Steps of warmup from 0 back to the cosine after every exact step. Default: the published value."""

    restart_delay: Natural = 0
    """Steps by which the cosine and its restarts are delayed. Must be a multiple of exact_every."""

    @classmethod
    def suits(cls, optimizer: type[Tagged]) -> bool:
        """Restarts follow exact steps."""
        return "exact_every" in optimizer.model_fields

    def problems(self, config: "Config") -> Iterator[str]:
        """Restarts must coincide with cleared moments and fit within the run."""
        optim, steps, warmup = config.optim, config.train.steps, config.optim.warmup_steps
        if not self.suits(type(optim)):
            yield (
                "optim.schedule = 'cosine-restarts' requires optim.name = 'loro', whose cleared moments it follows; use that, or "
                "optim.schedule = 'cosine'"
            )
            return
        every = optim.exact_every
        if self.restart_warmup_steps > every:
            yield (
                f"optim.restart_warmup_steps = {self.restart_warmup_steps} is longer than the optim.exact_every = {every} "
                f"steps between restarts; largest valid value: {every}"
            )
        most = max(steps - warmup, 0) // every * every
        if self.restart_delay % every:
            best = min(max((2 * self.restart_delay + every) // (2 * every), 1) * every, most)
            yield (
                f"optim.restart_delay = {self.restart_delay} must be a multiple of optim.exact_every = {every}, so that the rate "
                f"only drops when moments are cleared; nearest valid value: {best}"
            )
        if self.restart_delay > most:
            yield (
                f"optim.restart_delay = {self.restart_delay} moves the peak of the cosine past the end of train.steps = {steps} "
                f"with optim.warmup_steps = {warmup}; largest valid value: {most}"
            )
        if warmup >= steps:
            yield (
                f"optim.warmup_steps = {warmup} leaves no steps of train.steps = {steps} for optim.schedule = "
                f"'cosine-restarts'; largest valid value: {steps - 1}"
            )
