"""Low-rank modules for your own models and training loops, on one process or sharded under any layout.

    import boost

    model = boost.nn.Decoder(vocab_size=32000, dim=512, heads=8, layers=8, layout="btp", mesh=mesh)
    loss = model(tokens, targets)

Modules are built from a `Spec` (sizes, a layout, a mesh), or from its arguments. Their linears are `LowRankLinear` modules
with factors `A` and `B` as plain `nn.Linear` children. `functional` provides BTP as functions.
"""

from boost.nn import functional
from boost.nn.decoder import Decoder
from boost.nn.linear import LowRankLinear
from boost.nn.spec import Spec
from boost.nn.sublayers import Block, LowRankAttention, LowRankMLP

__all__ = ["Block", "Decoder", "LowRankAttention", "LowRankLinear", "LowRankMLP", "Spec", "functional"]
