"""Which parts of the model torch.compile compiles (train.compile)."""

from typing import Literal

CompileName = Literal["auto", "none", "kernels", "blocks"]
CompiledPart = Literal["none", "kernels", "blocks"]


def compiled_part(name: CompileName, device: str) -> CompiledPart:
    """Resolves `name` for a device ("cpu", "cuda"). On CPUs 'auto' is 'none': compiled kernels save 1% of a step and take 30 s to
    compile."""
    if name == "auto":
        return "kernels" if device == "cuda" else "none"
    return name
