"""Learning-rate schedules: one class for each. Their rates are functions of the step in `boost.optim.schedule`."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from boost.config.section import Natural, Tagged

if TYPE_CHECKING:
    from boost.config.schema import Config


class LRSchedule(Tagged):
    """The learning rate after the warm-up."""

    key: ClassVar[str] = "optim.schedule"
    absent: ClassVar[Mapping[str, Any]] = {"restart_warmup_steps": 0}

    schedule: str = "cosine"
    """The learning rate after the warm-up."""

    @classmethod
    def suits(cls, optimizer: type[Tagged]) -> bool:
        """Whether the optimizer has what the schedule follows."""
        return True


class Cosine(LRSchedule):
    """Falls to min_lr_ratio at the last step."""

    schedule: Literal["cosine"] = "cosine"


class Constant(LRSchedule):
    """Stays at lr until the decay."""

    schedule: Literal["constant"] = "constant"

    decay_steps: Natural = 0
    """The last steps, over which the rate falls linearly to min_lr_ratio * lr."""

    def problems(self, config: "Config") -> Iterator[str]:
        """Warm-up and decay fit into the run."""
        warmup, steps = config.optim.warmup_steps, config.train.steps
        if self.decay_steps and warmup + self.decay_steps > steps:
            yield (
                f"optim.decay_steps = {self.decay_steps} and optim.warmup_steps = {warmup} do not fit into "
                f"train.steps = {steps}; the largest legal value is {max(steps - warmup, 0)}"
            )


class CosineRestarts(LRSchedule):
    """LORO's cosine, which dips where moments are cleared."""

    schedule: Literal["cosine-restarts"] = "cosine-restarts"

    restart_warmup_steps: Natural = 5
    """Steps from 0 back to the cosine after every exact step. The published value is the default."""

    restart_delay: Natural = 0
    """Steps by which the cosine, and its dips after the warm-up, come later; a multiple of exact_every."""

    @classmethod
    def suits(cls, optimizer: type[Tagged]) -> bool:
        """Restarts follow exact steps."""
        return "exact_every" in optimizer.model_fields

    def problems(self, config: "Config") -> Iterator[str]:
        """Restarts are where moments are cleared, and the run has room for them."""
        optim, steps, warmup = config.optim, config.train.steps, config.optim.warmup_steps
        if not self.suits(type(optim)):
            yield (
                "optim.schedule = 'cosine-restarts' restarts with the moments of optim.name = 'loro'; take that, or schedule = "
                "'cosine'"
            )
            return
        every = optim.exact_every
        if self.restart_warmup_steps > every:
            yield (
                f"optim.restart_warmup_steps = {self.restart_warmup_steps} is longer than the optim.exact_every = {every} "
                f"steps between restarts; the largest legal value is {every}"
            )
        most = max(steps - warmup, 0) // every * every
        if self.restart_delay % every:
            best = min(max((2 * self.restart_delay + every) // (2 * every), 1) * every, most)
            yield (
                f"optim.restart_delay = {self.restart_delay} must be a multiple of optim.exact_every = {every}, or the rate "
                f"would dip where nothing restarts; the nearest legal value is {best}"
            )
        if self.restart_delay > most:
            yield (
                f"optim.restart_delay = {self.restart_delay} puts the top of the cosine after the end of train.steps = {steps} "
                f"with optim.warmup_steps = {warmup}; the largest legal value is {most}"
            )
        if warmup >= steps:
            yield (
                f"optim.warmup_steps = {warmup} leaves nothing of train.steps = {steps} to optim.schedule = "
                f"'cosine-restarts'; the largest legal value is {steps - 1}"
            )
