"""The Triton kernels that torch.compile generates build for A100 and H100 without a GPU.

Inductor lowers for a device that is not present, and Triton compiles for a named target. Needs a CUDA build of torch.
"""

import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from boost.models.kernels import KERNELS
from tests.models.kernel_arguments import arguments

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(torch.version.cuda is None, reason="torch was built without CUDA"),
]

CAPABILITIES = (80, 90)
KERNEL_SOURCE = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)'''", re.DOTALL)
COUNTS = {"normed_backward": 2, "rotated": 4, "rotated_backward": 4}
"""Number of kernels of functions that have more than one: a sum over tokens in addition to sums over channels, and kernels that
inductor only fuses when torch.compile drives it (one kernel on CPUs, test_kernels.py)."""


@pytest.fixture(params=CAPABILITIES, ids=["sm_80", "sm_90"])
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Makes torch and Triton report a GPU of this compute capability."""
    import torch._inductor.config as inductor
    from torch._inductor.runtime import hints, triton_helpers
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    found = int(request.param)
    properties = hints.DeviceProperties(
        type="cuda", index=0, multi_processor_count=132, cc=found, major=found // 10, regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048, warp_size=32,
    )  # fmt: skip
    monkeypatch.setattr(hints.DeviceProperties, "create", lambda device: properties)
    for name, value in {
        "get_device_properties": SimpleNamespace(
            major=found // 10, minor=found % 10, multi_processor_count=132, warp_size=32, total_memory=80 << 30
        ),
        "get_device_capability": divmod(found, 10),
        "current_device": 0,
        "device_count": 1,
        "is_available": True,
        "_lazy_init": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(triton_helpers, "set_driver_to_gpu", lambda: None)
    monkeypatch.setattr(
        driver,
        "_active",
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", found, 32),
            get_current_device=lambda: 0,
            get_device_interface=lambda: torch.cuda,
            utils=SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 166912}),
        ),
    )
    with inductor.patch(compile_threads=1, use_static_cuda_launcher=False):
        yield found


def test_every_kernel_is_built(capability: int, tmp_path: Path) -> None:
    for name, given in arguments(torch.bfloat16).items():
        built = list(KERNEL_SOURCE.findall(inductor_code(KERNELS[name].function, given)))
        assert len(built) == COUNTS.get(name, 1), name
        for number, (kernel, source) in enumerate(built):
            tuner = getattr(module_of(tmp_path / f"{name}_{number}.py", source), kernel)
            compiled = tuner._precompile_config(tuner.configs[0]).kernel
            assert compiled.metadata.target.arch == capability
            assert f".target sm_{capability}" in compiled.asm["ptx"] and compiled.asm["cubin"]


def inductor_code(function: Callable[..., Any], given: tuple[Any, ...]) -> str:
    """Code that inductor generates for a function of these tensors on a GPU. Traced on the CPU, because indexing queries the
    device."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    def of_tensors(*tensors: Tensor) -> Any:
        each = iter(tensors)
        return function(*(next(each) if isinstance(x, Tensor) else x for x in given))

    tensors = [x for x in given if isinstance(x, Tensor)]
    pure = torch.func.functionalize(of_tensors, remove="mutations_and_views")
    graph = make_fx(pure, decomposition_table=select_decomp_table(), tracing_mode="fake")(*tensors)
    with FakeTensorMode() as fake:
        on_gpu = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in tensors]
        for node in graph.graph.nodes:
            node.meta.pop("val", None)
        FakeTensorProp(graph, mode=fake).propagate_dont_convert_inputs(*on_gpu)
        lowering = GraphLowering(graph, example_inputs=on_gpu)
        with V.set_debug_handler(DebugContext()), V.set_graph_handler(lowering), V.set_fake_mode(fake):
            lowering.run(*on_gpu)
            code = lowering.codegen()[0]
    return str(getattr(code, "value", code))


def module_of(path: Path, source: str) -> ModuleType:
    """Triton reads the source again, so it has to be a file."""
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
