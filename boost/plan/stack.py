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
from boost.plan.hardware import AttentionSpeed, Hardware, Speeds

StackName = Literal["boost", "eager", "compiled", "fused"]

FILE = Path(__file__).parent / "stacks.toml"


class Reached(Section):
    """Multiples of the speeds of a profile."""

    gemm: Positive = 1.0
    elementwise: Positive = 1.0
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
    reached: dict[str, Reached] = Field(default_factory=dict)
    """By architecture, the first word of a profile's name; others reach all."""


@functools.cache
def stacks() -> dict[str, Stack]:
    """By name."""
    return {name: Stack.model_validate(tree) for name, tree in read_toml(FILE).items()}


def with_stack(
    hardware: Hardware, name: StackName, architecture: str, attention: str = "", reached: Reached | None = None
) -> Hardware:
    """A profile as a stack uses it. `attention`: another kernel than the stack's; `reached`: in place of the stack's own, to fit
    it."""
    stack = stacks()[name]
    found = reached or stack.reached.get(architecture, Reached())
    return hardware.model_copy(update={"speeds": _speeds(hardware.speeds, attention or stack.attention, found)})


def _speeds(speeds: Speeds, kernel: str, reached: Reached) -> Speeds:
    attention = speeds.attention | speeds.other_attention.get(kernel, {})
    changed = {
        "gemm": {
            dtype: each.model_copy(update={"fraction": each.fraction * reached.gemm})
            for dtype, each in speeds.gemm.items()
        },
        "memory_fraction": speeds.memory_fraction * reached.elementwise,
        "attention": {
            dtype: tuple(_slower(each, reached.attention) for each in table) for dtype, table in attention.items()
        },
    }
    return speeds.model_copy(update=changed)


def _slower(speed: AttentionSpeed, share: float) -> AttentionSpeed:
    return speed.model_copy(update={"forward": speed.forward * share, "backward": speed.backward * share})
