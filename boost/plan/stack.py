"""Software stacks: what a framework compiles, the attention kernel it calls, and what its steps reach of the hardware.

`boost` is what `boost train` runs. The others are those of the public record (`boost.plan.record`); what they reach is fitted to
half of its rows.
"""

import functools
from pathlib import Path
from typing import Literal

from pydantic import Field

from boost.config.schema import CompileName, Positive, Section
from boost.config.text import read_toml
from boost.plan.hardware import AttentionSpeed, Hardware, PipelineHabit, Speeds

StackName = Literal["boost", "eager", "compiled", "fused", "nanotron"]

FILE = Path(__file__).parent / "stacks.toml"


class Reached(Section):
    """Multiples of the speeds of a profile."""

    gemm: Positive = 1.0
    attention: Positive = 1.0


class Stack(Section):
    """A stack."""

    title: str
    compile: CompileName
    """As train.compile."""
    overlap: Literal["none", "halves"] = "none"
    """As parallel.overlap: whether TP communication hides behind computation."""
    attention: str = ""
    """Kernel, where a profile has several; '': the profile's own."""
    pipeline: PipelineHabit = PipelineHabit()
    """How it sends between stages."""
    host: Positive = 1.0
    """Time of the host for an operation, in multiples of the profile's."""
    reached: dict[str, Reached] = Field(default_factory=dict)
    """By architecture (`Hardware.architecture`); others reach all."""


@functools.cache
def stacks() -> dict[str, Stack]:
    """By name."""
    return {name: Stack.model_validate(tree) for name, tree in read_toml(FILE).items()}


def with_stack(hardware: Hardware, name: StackName = "boost", attention: str = "") -> Hardware:
    """A profile as a stack uses it. `attention`: another kernel than the stack's."""
    stack, speeds = stacks()[name], hardware.speeds
    kernel = speeds.other_attention.get(attention or stack.attention, {})
    speeds = speeds.model_copy(update={"attention": speeds.attention | kernel})
    speeds = with_reached(speeds, stack.reached.get(hardware.architecture, Reached()))
    return hardware.model_copy(
        update={"speeds": speeds, "pipeline": stack.pipeline, "host_us": hardware.host_us * stack.host}
    )


def with_reached(speeds: Speeds, reached: Reached) -> Speeds:
    """Speeds multiplied by what is reached of them."""
    gemm = {
        dtype: each.model_copy(update={"fraction": each.fraction * reached.gemm}) for dtype, each in speeds.gemm.items()
    }
    attention = {
        dtype: tuple(_slower(each, reached.attention) for each in table) for dtype, table in speeds.attention.items()
    }
    return speeds.model_copy(update={"gemm": gemm, "attention": attention})


def _slower(speed: AttentionSpeed, share: float) -> AttentionSpeed:
    return speed.model_copy(update={"forward": speed.forward * share, "backward": speed.backward * share})
