"""One decoder block under one layout: shared by single-block experiments.

No embedding, head, loss or optimizer. For `lax`, this is the first block, which has no latent gates.
Legend: T tokens per micro-batch, D hidden width; both local to this process.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from boost.config import Config
from boost.config.load import change_family, from_tree
from boost.config.stages import Stage
from boost.config.traffic import Collective
from boost.errors import ConfigError
from boost.measure.document import Section
from boost.measure.results import Facts, as_markdown, save_section
from boost.models.attention import make_context
from boost.models.decoder import TransformerBlock
from boost.models.group import LinearGroup
from boost.models.init import initialize
from boost.models.interface import Layout, Pending, Saved, Stream
from boost.parallel.counting import CollectiveCounter
from boost.parallel.mesh import Mesh, close_mesh, open_mesh, world_size
from boost.plan.collectives import micro_batch_collectives
from boost.plan.published import Way
from boost.train.model import build_decoder

FIRST_BLOCK = Stage(1, 3, 0, 1)
"""A middle pipeline stage: a block without embedding or head."""

PRODUCTS = ("mm", "bmm")
"""PyTorch's GEMM operators. A block uses no others, since its linears have no bias."""

DEFAULTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "cpu": (
        "cola-350m",
        ("--train.seq_len=256", "--train.param_dtype=float32", "--train.compute_dtype=float32"),
    ),
    "cuda": (
        "boost-7b",
        ("--train.seq_len=4096", "--train.param_dtype=bfloat16", "--train.compute_dtype=bfloat16"),
    ),
}
"""By device type: the default preset and overrides. The GPU preset matches the paper."""


@dataclass(frozen=True)
class BlockVariant:
    """A layout with its options."""

    name: str
    parallel: dict[str, Any]
    dense: bool = False
    """Whether it uses the full-rank model of the same width."""
    way: Way | None = None
    """The paper's name for it."""


MEGATRON = BlockVariant("megatron", {"layout": "megatron"}, dense=True, way="full-rank")
MEGATRON_SP = BlockVariant("megatron-sp", {"layout": "megatron-sp"}, dense=True)
VANILLA = BlockVariant("vanilla", {"layout": "vanilla"}, way="vanilla")
PUBLISHED = BlockVariant("vanilla, published", {"layout": "vanilla", "vanilla": "published"})
BTP = BlockVariant("btp", {"layout": "btp"}, way="BOOST")
BTP_SP = BlockVariant("btp-sp", {"layout": "btp-sp"})


def block_config(config: Config, contender: BlockVariant, tp: int, batch: int, **parallel: Any) -> Config:
    """The model of `config` under a layout, with `tp` processes, micro-batches of `batch` sequences, and no recomputation.

    `parallel`: additional fields of [parallel]. Raises ConfigError if the configuration is invalid or the model is dense.
    """
    if not config.model.low_rank:
        raise ConfigError("model.family = 'dense' has no bottleneck to compare; take cola, svd or lax")
    tree = config.model_dump()
    if contender.dense:
        change_family(tree["model"], "dense")
    tree["parallel"] = {**contender.parallel, **parallel, "tp": tp}
    tree["train"] |= {"micro_batch": batch, "global_batch": batch, "recompute": "none", "recompute_every": 1}
    return from_tree(tree)


@dataclass(frozen=True)
class Operand:
    """Shape and strides of a matrix."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def filled(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A random tensor with this shape and strides."""
        extent = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return torch.randn(extent, dtype=dtype, device=device).as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class RecordedGemm:
    """One GEMM, as dispatched."""

    name: str
    """One of PRODUCTS."""
    a: Operand
    b: Operand
    phase: str
    """forward | backward"""
    half: str
    """attention | MLP"""
    place: str
    """Linear group in the forward pass: qkv | o | gate_up | down; '' in the backward pass."""

    @property
    def flops(self) -> int:
        """FLOPs, two per multiply-add."""
        return 2 * self.a.shape[-1] * self.b.shape[-1] * torch.Size(self.a.shape[:-1]).numel()


class GemmRecorder(TorchDispatchMode):
    """Records every GEMM at the dispatcher while active. Set `phase`, `half` and `place` to label them."""

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.half, self.place = "forward", "attention", ""
        self.products: list[RecordedGemm] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        assert not name.startswith(("addmm", "baddbmm", "addbmm")), f"a block has no {name}"
        if name in PRODUCTS:
            a, b = (Operand(tuple(x.shape), tuple(x.stride())) for x in args[:2])
            place = self.place if self.phase == "forward" else ""
            self.products.append(RecordedGemm(name, a, b, self.phase, self.half, place))
        return func(*args, **(kwargs or {}))


class _Labelling:
    """Wraps a layout and labels the recorder with the current linear group and, in the backward pass, the current half."""

    def __init__(self, layout: Layout, recorder: GemmRecorder) -> None:
        self._layout, self._recorder = layout, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layout, name)

    def with_options(self, **options: Any) -> "_Labelling":
        return _Labelling(self._layout.with_options(**options), self._recorder)

    def in_proj_comm(self, stream: Stream, gamma: Tensor, group: LinearGroup) -> Pending[tuple[Saved, Stream]]:
        self._recorder.place = group.shape.name
        self._recorder.half = "attention" if group.shape.name == "qkv" else "MLP"
        if group.shape.name == "gate_up":
            stream.x.register_hook(self._back_at_attention)
        return self._layout.in_proj_comm(stream, gamma, group)

    def out_proj_local(self, hidden: Tensor, group: LinearGroup) -> Tensor:
        self._recorder.place = group.shape.name
        return self._layout.out_proj_local(hidden, group)

    def _back_at_attention(self, _: Tensor) -> None:
        self._recorder.half = "attention"


class BlockRun:
    """The first block of a decoder on one process. Full weights, input and output gradient are the same for every layout, so all
    layouts compute the same function."""

    def __init__(self, config: Config, mesh: Mesh, weights: bool = True) -> None:
        """`weights` = False skips initialization, for fake tensors."""
        decoder = build_decoder(config, mesh, FIRST_BLOCK)
        if weights:
            initialize(decoder, config.train.seed)
        self.config, self.layout = config, decoder.layout
        self.block = cast(TransformerBlock, decoder.blocks[0])
        self.weights = list(self.block.parameters())
        train, model = config.train, config.model
        shape, dtype = (train.micro_batch * train.seq_len, model.dim), getattr(torch, train.compute_dtype)
        generator = torch.Generator().manual_seed(train.seed)
        whole = [torch.randn(shape, generator=generator if weights else None) for _ in range(2)]
        x_TD, self.dy_TD = (self._own(each).to(mesh.device, dtype) for each in whole)
        self.x_TD = x_TD.requires_grad_()
        positions = torch.arange(train.seq_len, device=mesh.device)
        self.context = make_context(train.micro_batch, positions, model, dtype)

    def forward(self) -> list[Tensor]:
        """Runs the forward pass, saving activations as in training. Returns [y]."""
        return [self.block(self.layout, [Stream(self.x_TD)], [self.context])[0].x]

    def both(self) -> list[Tensor]:
        """Runs the forward and backward pass. Returns [y, dx, *weight gradients]."""
        return self._both(self.layout, ())

    def collectives(self) -> list[Collective]:
        """The collectives of a forward and backward pass, counted at the dispatcher."""
        counter = CollectiveCounter()
        with counter:
            self._both(self.layout, (counter,))
        return counter.collectives

    def products(self) -> list[RecordedGemm]:
        """The GEMMs of a forward and backward pass, recorded at the dispatcher."""
        recorder = GemmRecorder()
        with recorder:
            self._both(cast(Layout, _Labelling(self.layout, recorder)), (recorder,))
        return recorder.products

    def _both(self, layout: Layout, observers: Sequence[CollectiveCounter | GemmRecorder]) -> list[Tensor]:
        y_TD = self.block(layout, [Stream(self.x_TD)], [self.context])[0].x
        for observer in observers:
            observer.phase = "backward"
        return [y_TD, *torch.autograd.grad(y_TD, [self.x_TD, *self.weights], self.dy_TD)]

    def _own(self, whole: Tensor) -> Tensor:
        """This process's shard of a full residual stream, as a copy."""
        kind = self.layout.spec.residual
        if kind == "replicated":
            return whole
        dim = 0 if kind == "tokens" else 1
        size = whole.shape[dim] // self.layout.size
        return whole.narrow(dim, self.layout.rank * size, size).contiguous()


def table_of(config: Config) -> list[Collective]:
    """The collective table of the first block, forward and backward, for one micro-batch."""
    train = config.train
    tokens = train.micro_batch * train.seq_len
    found = micro_batch_collectives(
        config.model, config.parallel, tokens, train.compute_dtype, recompute=["none"] * config.model.layers,
        stage=FIRST_BLOCK,
    )  # fmt: skip
    return [each for each in found if each.layer is not None]


def device_kind(wanted: str, processes: int) -> str:
    """'cuda' if `run.device` allows it and every process has a GPU, else 'cpu'."""
    gpus = torch.cuda.device_count() if wanted != "cpu" else 0
    return "cuda" if wanted == "cuda" or gpus >= max(processes, world_size() if world_size() > 1 else 1) else "cpu"


def experiment_process(
    measure: Callable[..., Facts],
    arguments: tuple[Any, ...],
    section: Callable[[Facts], Section],
    config: Config,
    out: Path,
) -> int:
    """Runs `measure(config, mesh, *arguments)` on this process. The main process writes `out`.json, .md and figures."""
    mesh = open_mesh(config.parallel, config.run.device, config.run.timeout_s)
    facts = measure(config, mesh, *arguments)
    if mesh.is_main:
        shown = section(facts)
        save_section(out, facts, shown)
        print(as_markdown(facts, shown))
    mesh.barrier()
    close_mesh()
    return 0
