"""Software stacks: what a framework compiles, which attention kernel it calls, and how much of the hardware's speed it reaches.

`boost` is the stack of `boost train`. The others occur in the public record (`boost.plan.record`); the speeds that they reach are
fitted to half of its rows.
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
    """Achieved speeds, as multiples of a profile's speeds."""

    gemm: Positive = 1.0
    attention: Positive = 1.0


class Stack(Section):
    """A software stack."""

    title: str
    compile: CompileName
    """What it compiles, as in train.compile."""
    overlap: Literal["none", "halves"] = "none"
    """Whether TP communication overlaps with computation, as in parallel.overlap."""
    attention: str = ""
    """Attention kernel, if a profile has several; '': the profile's default."""
    pipeline: PipelineHabit = PipelineHabit()
    """How it sends between pipeline stages."""
    host: Positive = 1.0
    """Host time per operation, as a multiple of the profile's."""
    reached: dict[str, Reached] = Field(default_factory=dict)
    """Achieved speeds by `Hardware.architecture`; architectures without an entry reach the profile's speeds."""


@functools.cache
def stacks() -> dict[str, Stack]:
    """Returns all stacks by name."""
    return {name: Stack.model_validate(tree) for name, tree in read_toml(FILE).items()}


def with_stack(hardware: Hardware, name: StackName = "boost", attention: str = "") -> Hardware:
    """Applies a stack to a profile. `attention`: overrides the stack's attention kernel."""
    stack, speeds = stacks()[name], hardware.speeds
    kernel = speeds.other_attention.get(attention or stack.attention, {})
    speeds = speeds.model_copy(update={"attention": speeds.attention | kernel})
    speeds = with_reached(speeds, stack.reached.get(hardware.architecture, Reached()))
    return hardware.model_copy(
        update={"speeds": speeds, "pipeline": stack.pipeline, "host_us": hardware.host_us * stack.host}
    )


def with_reached(speeds: Speeds, reached: Reached) -> Speeds:
    """Multiplies speeds by the achieved fractions."""
    gemm = {
        dtype: each.model_copy(update={"fraction": each.fraction * reached.gemm}) for dtype, each in speeds.gemm.items()
    }
    attention = {
        dtype: tuple(_slower(each, reached.attention) for each in table) for dtype, table in speeds.attention.items()
    }
    return speeds.model_copy(update={"gemm": gemm, "attention": attention})


def _slower(speed: AttentionSpeed, share: float) -> AttentionSpeed:
    return speed.model_copy(update={"forward": speed.forward * share, "backward": speed.backward * share})
