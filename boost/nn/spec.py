"""`Spec`, from which `boost.nn` modules are built: sizes, a layout, and this process's position on a mesh."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from boost.config import Config
from boost.config.architecture import Parameter
from boost.config.families import ModelConfig
from boost.config.layouts import layouts_of, local_shape
from boost.config.load import from_tree
from boost.config.schema import ParallelConfig
from boost.errors import ConfigError
from boost.layouts.runtime import layout_for
from boost.models.interface import Layout
from boost.models.recompute import POLICIES
from boost.nn.plain import OneProcess
from boost.parallel.mesh import Axis, Mesh

FFN_MULTIPLE = 32


class Spec:
    """A validated description of a decoder and its sharding. Do not change it, because modules share it.

        spec = boost.nn.Spec(dim=512, heads=8, rank=128, layout="btp", mesh=mesh)
        block = boost.nn.Block(spec)

    Attributes: `model` (the sizes, a ModelConfig), `parallel` (the layout, a ParallelConfig), `layout` (its runtime), `tp` (the TP
    axis), `tp_mesh` (its DeviceMesh; None with one rank), `device`, `dtype` of the weights, and `compute_dtype` for
    activations and GEMMs (None: the weights' dtype when the module is called).
    """

    def __init__(
        self,
        *,
        family: str = "cola",
        layout: str | None = None,
        mesh: DeviceMesh | dist.ProcessGroup | None = None,
        recompute: str = "none",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        compute_dtype: torch.dtype | None = None,
        seed: int = 0,
        **fields: object,
    ) -> None:
        """
        Args:
            family: how linears are parameterized: svd, cola, lax, dense, or one that you registered.
            layout: how linears are sharded over TP (default: the family's default, such as btp). It has no effect without TP.
            mesh: the TP ranks, as a one-dimensional DeviceMesh, one with a dimension "tp", or a process group. None: one process.
            recompute: activation checkpointing policy for every block, as in `train.recompute`.
            device: device of the weights (default: the mesh's, or torch's default).
            dtype: dtype of the weights (default: torch's default).
            compute_dtype: dtype for activations and GEMMs (default: that of the weights, also after `.double()` or `.half()`).
            seed: seed for the initial weights, which depend only on it and the parameter's name, and are equal on every mesh.
            fields: sizes (dim, heads, kv_heads, ffn_dim, rank, layers, vocab_size, ...) and other fields of [model], and options of
                the layout (norm, grouping, overlap). ffn_dim defaults to 8/3 dim, rank to dim / 4.

        Raises ConfigError if a field is invalid, with one line that states the field, its value and the nearest valid value.
        """
        for name, given in (("dtype", dtype), ("compute_dtype", compute_dtype)):
            if given is not None and not isinstance(given, torch.dtype):
                raise ConfigError(f"{name} = {given!r} is not a torch.dtype; pass one, such as torch.bfloat16")
        self.tp = tp_axis(mesh)
        self.tp_mesh: DeviceMesh | None = None
        if isinstance(mesh, DeviceMesh) and self.tp.size > 1:
            self.tp_mesh = mesh["tp"] if mesh.ndim > 1 else mesh
        elif self.tp.group is not None:
            kind = "cuda" if "nccl" in dist.get_backend(self.tp.group) else "cpu"
            self.tp_mesh = DeviceMesh.from_group(self.tp.group, kind)
        self.seed = seed
        self.dtype = dtype or torch.get_default_dtype()
        self.compute_dtype = compute_dtype
        if device is not None:
            self.device = torch.device(device)
        elif isinstance(mesh, DeviceMesh) and mesh.device_type != "cpu":
            self.device = torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
        else:
            self.device = torch.get_default_device()
        if recompute not in POLICIES:
            raise ConfigError(f"recompute = '{recompute}' is not a policy; valid values: {', '.join(POLICIES)}")
        self.recompute = recompute
        config = _config(family, layout, self.tp.size, fields)
        self.model: ModelConfig = config.model
        self.parallel: ParallelConfig = config.parallel
        self.mesh = Mesh(self.device, {"tp": self.tp}, rank=self.tp.rank, size=self.tp.size)
        self.layout: Layout = layout_for(self.model, self.parallel, self.mesh)
        if self.tp.size == 1:
            self.layout = OneProcess(self.layout.spec, self.model, self.parallel, self.mesh)

    @contextmanager
    def allocation(self) -> Iterator[None]:
        """Context manager in which parameters are created with the spec's dtype and device."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with self.device:
                yield
        finally:
            torch.set_default_dtype(before)

    def local_shape(self, parameter: Parameter) -> tuple[int, ...]:
        """Shape of this process's shard of a parameter."""
        return local_shape(parameter, self.layout.placement(parameter.role), self.tp.size)

    def __deepcopy__(self, memo: dict[int, object]) -> "Spec":
        return self  # process groups cannot be copied, and copies of a module live on the same ranks

    def __repr__(self) -> str:
        model, tp = self.model, f", {self.parallel.layout} over {self.tp.size} TP ranks" if self.tp.size > 1 else ""
        rank = f", rank={model.rank}" if model.low_rank else ""
        return f"Spec({model.title}, dim={model.dim}, heads={model.heads}, ffn_dim={model.ffn_dim}{rank}{tp})"


@contextmanager
def autocast_resolved(device: torch.device, dtype: torch.dtype) -> Iterator[torch.dtype]:
    """Yields the dtype in which activations are computed: `dtype` or, under `torch.autocast`, autocast's dtype.

    Autocast is disabled in this context, because it does not apply to the hand-written nodes, which choose their own dtypes.
    """
    kind = "cpu" if device.type == "meta" else device.type  # autocast knows no meta tensors
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False):
        yield dtype


def tp_axis(mesh: DeviceMesh | dist.ProcessGroup | None) -> Axis:
    """The TP axis of a mesh. Raises ConfigError if the mesh has several dimensions and none is named "tp"."""
    if mesh is None:
        return Axis()
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names or ()
        if mesh.ndim > 1 and "tp" not in names:
            raise ConfigError(
                f"mesh has dimensions {names}, but none is named 'tp'; name the TP dimension 'tp', or pass only that one"
            )
        mesh = mesh.get_group("tp" if mesh.ndim > 1 else None)
    size = dist.get_world_size(mesh)
    return Axis(dist.get_rank(mesh), size, mesh) if size > 1 else Axis()


def _config(family: str, layout: str | None, tp: int, fields: dict[str, object]) -> Config:
    """The checked configuration for these sizes. Training fields, which modules do not use, keep their defaults."""
    names = {name for name, _ in ParallelConfig.keys()}  # noqa: SIM118  a method of the class
    parallel = {name: value for name, value in fields.items() if name in names}
    model = {"family": family, **{name: value for name, value in fields.items() if name not in names}}
    if fixed := sorted(parallel.keys() & ParallelConfig.model_fields.keys() - {"overlap", "grouping"}):
        raise ConfigError(f"{fixed[0]} = {parallel[fixed[0]]!r} does not apply to a module; pass the TP ranks as mesh")
    if isinstance(dim := model.get("dim"), int) and "ffn_dim" not in model:
        model["ffn_dim"] = -(-8 * dim // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE
    if layout is None and ModelConfig.find(family) is not None:
        layout = layouts_of(ModelConfig.model_validate({"family": family}))[0]
    chosen = {"layout": layout} if layout is not None else {}
    return from_tree({"model": model, "parallel": {**parallel, **chosen, "tp": tp}})
