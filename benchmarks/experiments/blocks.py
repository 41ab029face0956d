"""One decoder block under one layout: the common part of single-block experiments.

There is no embedding, head, loss or optimizer. For `lax` it is the first block, which has no latent gates.
Legend: T tokens of the micro-batch and D width of the residual stream, as this process holds them.
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
"""As if it stood in the midst of a pipeline: a block that neither embeds nor predicts."""

PRODUCTS = ("mm", "bmm")
"""Names of torch's matrix products. A block has no other: its linears have no bias."""

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
"""By kind of device: the preset whose block is taken unless one is named, and what is changed of it. On GPUs it is the paper's."""


@dataclass(frozen=True)
class BlockVariant:
    """A layout with its switches."""

    name: str
    parallel: dict[str, Any]
    dense: bool = False
    """Of the full-rank model of the same width."""
    way: Way | None = None
    """What the paper calls it."""


MEGATRON = BlockVariant("megatron", {"layout": "megatron"}, dense=True, way="full-rank")
MEGATRON_SP = BlockVariant("megatron-sp", {"layout": "megatron-sp"}, dense=True)
VANILLA = BlockVariant("vanilla", {"layout": "vanilla"}, way="vanilla")
PUBLISHED = BlockVariant("vanilla, published", {"layout": "vanilla", "vanilla": "published"})
BTP = BlockVariant("btp", {"layout": "btp"}, way="BOOST")
BTP_SP = BlockVariant("btp-sp", {"layout": "btp-sp"})


def block_config(config: Config, contender: BlockVariant, tp: int, batch: int, **parallel: Any) -> Config:
    """The model of `config` under a layout, `tp` processes and micro-batches of `batch` sequences, nothing recomputed.

    `parallel`: further fields of that section. Raises ConfigError if the configuration is invalid, and for a dense model.
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
    """Memory layout of a matrix."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def filled(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """One with random numbers, in this memory order."""
        extent = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return torch.randn(extent, dtype=dtype, device=device).as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class RecordedGemm:
    """One matrix product, as issued."""

    name: str
    """One of PRODUCTS."""
    a: Operand
    b: Operand
    phase: str
    """forward | backward"""
    half: str
    """attention | MLP"""
    place: str
    """Group of linears, forward: qkv | o | gate_up | down; '' backward."""

    @property
    def flops(self) -> int:
        """Two for each multiply-add."""
        return 2 * self.a.shape[-1] * self.b.shape[-1] * torch.Size(self.a.shape[:-1]).numel()


class GemmRecorder(TorchDispatchMode):
    """Records every matrix product while it is active, as the dispatcher sees it. Set `phase`, `half` and `place` to label them."""

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
    """A layout that labels a recorder with the current group, and with whether the backward pass has reached the first half."""

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
    """The first block of a decoder on one process. Assembled over the processes, weights, input and incoming gradient are the
    same for every layout, so all compute the same function."""

    def __init__(self, config: Config, mesh: Mesh, weights: bool = True) -> None:
        """`weights` False: not initialized, for fake tensors."""
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
        """[y], as in training: with activations saved for the backward pass."""
        return [self.block(self.layout, [Stream(self.x_TD)], [self.context])[0].x]

    def both(self) -> list[Tensor]:
        """[y, dx, gradients of the weights]: forward and backward pass."""
        return self._both(self.layout, ())

    def collectives(self) -> list[Collective]:
        """Collectives of a forward and a backward pass, counted at the dispatcher."""
        counter = CollectiveCounter()
        with counter:
            self._both(self.layout, (counter,))
        return counter.collectives

    def products(self) -> list[RecordedGemm]:
        """Matrix products of a forward and a backward pass, recorded at the dispatcher."""
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
    """'cuda' if `run.device` allows it and each process that will run here has a GPU, else 'cpu'."""
    gpus = torch.cuda.device_count() if wanted != "cpu" else 0
    return "cuda" if wanted == "cuda" or gpus >= max(processes, world_size() if world_size() > 1 else 1) else "cpu"


def experiment_process(
    measure: Callable[..., Facts],
    arguments: tuple[Any, ...],
    section: Callable[[Facts], Section],
    config: Config,
    out: Path,
) -> int:
    """One process of an experiment: `measure(config, mesh, *arguments)`. The main process writes `out`.json, .md and figures."""
    mesh = open_mesh(config.parallel, config.run.device, config.run.timeout_s)
    facts = measure(config, mesh, *arguments)
    if mesh.is_main:
        shown = section(facts)
        save_section(out, facts, shown)
        print(as_markdown(facts, shown))
    mesh.barrier()
    close_mesh()
    return 0
