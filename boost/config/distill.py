"""Configuration of distillation: training a model on the predictions of another one."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from boost.config.section import Fraction, NonNegative, Positive, Section

if TYPE_CHECKING:
    from boost.config.schema import Config


class DistillConfig(Section):
    """Distillation: the model also learns from the predictions of a frozen teacher on the same tokens."""

    teacher: str = ""
    """Checkpoint of the teacher: a run directory (its latest checkpoint; RUN@best: its best one) or a checkpoint folder. It needs
    the same tokenizer and model.vocab_size, and may have any family. --distill-from sets it. Empty: no distillation."""

    weight: Fraction = 0.5
    """w in the loss per token, (1 - w) cross-entropy + w T^2 KL(teacher || model). 0: the text only; 1: the teacher only."""

    temperature: Positive = 1.0
    """T: both models' logits are divided by it in the KL divergence."""

    hidden: NonNegative = 0.0
    """Weight of another term per token: the mean squared difference between both models' inputs of the head (final hidden states
    after the norm). Requires a teacher with the same model.dim."""

    def problems(self, config: "Config") -> Iterator[str]:
        """Rules of this section that the configuration violates, one line each."""
        if not self.teacher:
            for name in type(self).model_fields:
                if (value := getattr(self, name)) != type(self).model_fields[name].default:
                    yield (
                        f"distill.{name} = {value} has no effect without distill.teacher; set it to a checkpoint (--distill-from), "
                        f"or remove distill.{name}"
                    )
            return
        if config.parallel.pp > 1:
            yield (
                f"distill.teacher does not support pipelines, but parallel.pp = {config.parallel.pp}; nearest valid value: 1"
            )
        if config.run.recovery != "restart":
            yield (
                f"distill.teacher does not support run.recovery = '{config.run.recovery}': a replica that rejoins would load the "
                "teacher while the others train; set run.recovery = 'restart'"
            )
        if self.weight == 0 and self.hidden == 0:
            yield (
                "distill.weight = 0 and distill.hidden = 0 leave nothing to learn from distill.teacher; set distill.weight, for "
                "example to 0.5, or remove distill.teacher"
            )
