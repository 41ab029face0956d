"""Pieces of a contest on one GPU: A against B in one process, in interleaved rounds, each written as soon as it is measured.

    python -m benchmarks.gpu.contest build --out contest.json

Contests that the file already has are skipped, and none starts after --seconds, so a piece can be repeated until it is complete.
A contender that cannot run is listed with its reason. Ratios are of this card and this session only.
"""

import argparse
import contextlib
import gc
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from benchmarks.commands import LEAST_ROUNDS
from benchmarks.experiments.contest import Call, refuse_zeros, spread, take_turns
from benchmarks.experiments.peers import HF, HF_COMPILED, hugging_face, of_family
from benchmarks.experiments.plain import FORMS, PlainStep, mean_loss, plain_step
from benchmarks.experiments.results import write_numbers
from benchmarks.experiments.shares import without_the_others
from boost.config import Config, load
from boost.config.layouts import layout_spec
from boost.config.schema import CompileName, ParallelConfig
from boost.convert.formats import config_json, entries
from boost.measure.speed import synchronize
from boost.measure.steps import Stepper
from boost.models.init import initial_value
from boost.models.kernels import BACKENDS, KERNELS, Kernel, using
from boost.models.latents import ACTS
from boost.parallel.loss import logit_gradient, token_logits
from boost.parallel.mesh import Mesh, mesh_of
from boost.train.rundir import environment

MODES: tuple[str, ...] = get_args(CompileName)
"""Values of train.compile."""
STEPS = {"cuda": 4, "cpu": 1}
"""Steps per sample: on a GPU, the host launches a step before the one before it is over."""
LEAST_S = 0.005
"""Seconds that a timed sample takes at least."""


@dataclass
class Contest:
    """Contenders in one process."""

    name: str
    build: Mapping[str, Callable[[], Call]]
    facts: dict[str, Any]
    parallel: ParallelConfig = field(default_factory=lambda: ParallelConfig(layout="single"))
    """With several processes, the first runs without the others (`benchmarks.experiments.shares`)."""


TINY = ("--model.layers=2", "--train.seq_len=64")


def models(args: argparse.Namespace) -> dict[str, Config]:
    """The models of the contest on one process."""
    flags = [f"--run.device={args.device}", "--parallel.tp=1"]
    if args.small:
        return {"demo": load("demo", [*flags, *TINY, *batch(2)])}
    flags += ["--train.compute_dtype=bfloat16"]
    four_blocks = load("boost-1b", [*flags, "--model.layers=4", *batch(4)])
    return {"cola-350m": load("cola-350m", flags), "boost-1b, 4 blocks": four_blocks}


def batch(sequences: int) -> list[str]:
    """A step of one micro-batch."""
    return [f"--train.micro_batch={sequences}", f"--train.global_batch={sequences}"]


def share(args: argparse.Namespace, layout: str, sequences: int) -> Config:
    """The model of which one of four TP processes runs its share."""
    flags = [f"--run.device={args.device}", "--parallel.tp=4", f"--parallel.layout={layout}", *batch(sequences)]
    flags += [] if layout_spec(layout).low_rank else ["--model.family=dense"]
    if args.small:
        return load("demo", [*flags, *TINY])
    flags += ["--model.layers=4", "--train.seq_len=4096", "--parallel.dp=1", "--parallel.pp=1"]
    return load("boost-7b", [*flags, "--train.compute_dtype=bfloat16"])


def build(args: argparse.Namespace) -> Iterator[Contest]:
    """(a) Every value of train.compile, `auto` among them, without and with CUDA graphs."""
    shares = {f"share {layout}": share(args, layout, 2 if args.small else 4) for layout in ("btp", "btp-sp")}
    for name, config in (models(args) | shares).items():
        contenders = {mode: partial(_ours, config, mode) for mode in MODES}
        contenders |= {f"{mode}, CUDA graph": partial(_ours, config, mode, "on") for mode in MODES if mode != "auto"}
        yield Contest(f"{name}: train.compile", contenders, _sizes(config), config.parallel)


def _ours(config: Config, mode: str, graphs: str = "auto") -> Call:
    device = torch.device(config.run.device, 0) if config.run.device == "cuda" else torch.device("cpu")
    mesh = mesh_of(config.parallel, device) if config.parallel.tp > 1 else Mesh(device)
    stepper = Stepper(config.changed(train={"compile": mode, "cuda_graphs": graphs}), mesh)

    def call() -> list[Tensor]:
        stepper.seconds(STEPS[device.type])
        assert stepper.stats is not None
        return [torch.tensor([stepper.stats.loss])]

    return call


def _sizes(config: Config) -> dict[str, Any]:
    return {"model": config.model.model_dump(), "train": config.train.model_dump(), "parallel": config.parallel.tp}


def peers(args: argparse.Namespace) -> Iterator[Contest]:
    """(b) `auto` against plain modules, transformers' LLaMA and the published CoLA code in ../CoLA."""
    for name, config in models(args).items():
        device = torch.device(args.device)
        for family in ("cola", "dense"):
            each = of_family(config, family)
            contenders = {"ours": partial(_ours, each, "auto")}
            contenders |= {form: partial(_plain, each, device, form) for form in FORMS}
            if family == "dense":
                mesh = Mesh(device)
                contenders |= {
                    peer: partial(_repeated, partial(hugging_face, each, mesh, peer == HF_COMPILED), device)
                    for peer in (HF, HF_COMPILED)
                }
            else:
                contenders["published CoLA"] = partial(_repeated, partial(_published, each, args.cola, device), device)
            yield Contest(f"{name}, {family}: peers", contenders, _sizes(each))


def _plain(config: Config, device: torch.device, form: str) -> Call:
    return _repeated(partial(plain_step, config, device, form), device)


def _repeated(make: Callable[[], PlainStep], device: torch.device) -> Call:
    """As many steps as `_ours` runs, so that the host may run ahead in both."""
    step = make()

    def call() -> list[Tensor]:
        for _ in range(STEPS[device.type] - 1):
            step()
        return step()[:1]

    return call


def _published(config: Config, folder: Path, device: torch.device) -> PlainStep:
    """CoLA's own class from a clone of its repository, with our initial weights. This runs the code in `folder`."""
    if not (folder / "cola").is_dir():
        raise FileNotFoundError(f"--cola {folder} has no folder 'cola'")
    sys.path.insert(0, str(folder.resolve()))
    package, weights = importlib.import_module("cola"), {}
    for entry in entries(config.model, "cola"):
        value = initial_value(entry.parameters[0], config.model, config.train.seed)
        weights[entry.name] = value.T if entry.transposed else value
    fields = config_json(config.model, "cola", config.train.param_dtype, config.train.seq_len, None, None)
    module = package.ColaForCausalLM(package.ColaConfig(**fields))
    module.load_state_dict(weights)
    module.to(device, getattr(torch, config.train.param_dtype)).train()
    narrow = config.train.compute_dtype != config.train.param_dtype

    def passes(tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        with torch.autocast(device.type, getattr(torch, config.train.compute_dtype), enabled=narrow):
            logits = module(input_ids=tokens_BS, use_cache=False).logits
        loss = mean_loss(logits, targets_BS)
        loss.backward()
        return loss.detach()

    return PlainStep(module, passes, config, device)


def attention(args: argparse.Namespace) -> Iterator[Contest]:
    """(c) Causal attention, forward and backward: torch's backends, FlashAttention-3 and 4 through torch's switch or their wheels,
    and documents of a quarter of the sequence."""
    sizes = [(16, 64)] if args.small else [(64, 1024), (128, 1024), (64, 4096), (128, 4096), (128, 16384)]
    tokens = 128 if args.small else 16384
    for width, length in sizes:
        batch, heads = max(tokens // length, 1), 2 if args.small else 2048 // width
        dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        q, k, v = (
            torch.randn(batch, heads, length, width, dtype=dtype, device=args.device, requires_grad=True)
            for _ in range(3)
        )
        backends = {"chosen by torch": None, "cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
        contenders: dict[str, Callable[[], Call]] = {
            name: partial(_sdpa, (q, k, v), backend, "") for name, backend in backends.items()
        }
        contenders |= {
            f"{name} switch": partial(_sdpa, (q, k, v), SDPBackend.FLASH_ATTENTION, name) for name in ("FA3", "FA4")
        }
        contenders["flash-attn 4 wheel"] = partial(_flash_4, (q, k, v))
        contenders["documents, varlen"] = partial(_documents, (q, k, v), length // 4)
        yield Contest(f"attention, width {width}, {length} tokens", contenders, {"batch": batch, "heads": heads})


def _gradients(result: Callable[[], Tensor], inputs: Sequence[Tensor]) -> Call:
    """Forward and backward pass."""
    weight = torch.randn_like(result())

    def call() -> Sequence[Tensor]:
        return torch.autograd.grad(result(), inputs, weight)

    return call


def _sdpa(qkv: Sequence[Tensor], backend: SDPBackend | None, switch: str) -> Call:
    """`switch`: the implementation that torch's flash backend calls."""
    q, k, v = qkv

    def result() -> Tensor:
        with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    if not switch:
        return _gradients(result, qkv)
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    def switched() -> Iterable[Tensor]:
        activate_flash_attention_impl(switch)  # raises if it is not installed
        try:
            return _gradients(result, qkv)()
        finally:
            restore_flash_attention_impl()

    return switched


def _flash_4(qkv: Sequence[Tensor]) -> Call:
    from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found]

    return _gradients(lambda: flash_attn_func(*(x.transpose(1, 2) for x in qkv), causal=True)[0], qkv)


def _documents(qkv: Sequence[Tensor], length: int) -> Call:
    from torch.nn.attention.varlen import varlen_attn

    tokens = qkv[0].shape[0] * qkv[0].shape[2]
    ends = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=qkv[0].device)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in qkv)
    return _gradients(lambda: varlen_attn(q, k, v, ends, ends, length, length, window_size=(-1, 0)), qkv)  # type: ignore[arg-type, return-value]


def gemms(args: argparse.Namespace) -> Iterator[Contest]:
    """(d) The products B u of one group: separate, one batched GEMM, one grouped GEMM; and A with the norm's weight multiplied into
    it or applied to x. (e) Two products and an activation under max-autotune."""
    tokens, widths = (64, [(16, 64)]) if args.small else (16384, [(256, 1024), (512, 2048), (1024, 4096)])
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    new = partial(torch.randn, dtype=dtype, device=args.device)
    for rank, width in widths:
        for count, what, out in ((3, "q, k, v", width), (2, "gate, up", 8 * width // 3 // 16 * 16)):
            u, b = new(count, tokens, rank), new(count, out, rank)
            forms = {
                "separate": _repeating(lambda u, b: [x @ w.T for x, w in zip(u, b, strict=True)], u, b),
                "batched": _repeating(lambda u, b: [torch.bmm(u, b.transpose(1, 2))], u, b),
                "grouped": _repeating(lambda u, b: [F.grouped_mm(u, b.transpose(1, 2))], u, b),
            }
            yield Contest(f"r {rank}: B of {what}", forms, {"tokens": tokens, "out": out})
        x, a, gamma, b = new(tokens, width), new(3 * rank, width), new(width), new(width, 3 * rank)
        forms = {
            "applied to x": _repeating(lambda x, a, gamma: [(x * gamma) @ a.T], x, a, gamma),
            "multiplied into A in each pass": _repeating(lambda x, a, gamma: [x @ (a * gamma).T], x, a, gamma),
            "multiplied before": _repeating(lambda x, a: [x @ a.T], x, a * gamma),
        }
        yield Contest(f"r {rank}: A and the norm's weight", forms, {"tokens": tokens, "width": width})
        forms = {
            mode: _repeating(torch.compile(lambda x, a, b: [F.silu(x @ a.T) @ b.T], mode=mode), x, a, b)
            for mode in ("default", "max-autotune-no-cudagraphs")
        }
        yield Contest(f"r {rank}: max-autotune", forms, {"tokens": tokens, "width": width})


def _repeating(function: Callable[..., list[Tensor]], *inputs: Tensor) -> Callable[[], Call]:
    return lambda: lambda: function(*inputs)


def float8(args: argparse.Namespace) -> Iterator[Contest]:
    """(f) The wide GEMMs of a block in bf16 and in float8 with one scale a row: time only, without the conversions."""
    tokens, sizes = (64, [(64, 128)]) if args.small else (16384, [(2048, 5472), (4096, 11008), (4096, 1024)])
    for inner, out in sizes:
        x, w = (torch.randn(rows, inner, dtype=torch.bfloat16, device=args.device) for rows in (tokens, out))
        scales = [t.abs().amax(1, keepdim=True).float() / torch.finfo(torch.float8_e4m3fn).max for t in (x, w)]
        narrow = [(t / scale).to(torch.float8_e4m3fn) for t, scale in zip((x, w), scales, strict=True)]

        def scaled(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor) -> list[Tensor]:
            return [torch._scaled_mm(x, w.T, of_x, of_w.T, out_dtype=torch.bfloat16)]

        forms = {"bf16": _repeating(lambda x, w: [x @ w.T], x, w), "float8": _repeating(scaled, *narrow, *scales)}
        yield Contest(f"{inner} x {out}", forms, {"tokens": tokens})


def layouts(args: argparse.Namespace) -> Iterator[Contest]:
    """(g) The share of one of four TP processes under every layout: the work between collectives."""
    for sequences in (1, 4):
        found = {name: share(args, name, sequences) for name in ("btp", "btp-sp", "btp-cp", "vanilla", "megatron-sp")}
        contenders = {name: partial(_ours, config, "auto") for name, config in found.items()}
        yield Contest(f"shares, micro-batch {sequences}", contenders, _sizes(found["btp"]), found["btp"].parallel)


def kernels(args: argparse.Namespace) -> Iterator[Contest]:
    """(h) Every element-wise kernel of the model, eager and compiled. `bytes`: what it must move."""
    tokens, width = (256, 128) if args.small else (16384, 4096)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    for name, arguments in kernel_arguments(tokens, width, dtype, torch.device(args.device)).items():
        kernel = KERNELS[name]
        read = kernel.reads * sum(x.nbytes for x in arguments if isinstance(x, Tensor))
        contenders = {backend: partial(_kernel, kernel, arguments, backend) for backend in ("eager", "inductor")}
        moved = read + sum(x.nbytes for x in _kernel(kernel, arguments, "eager")())
        yield Contest(f"kernel {name}", contenders, {"bytes": moved})


def kernel_arguments(tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> dict[str, tuple[Any, ...]]:
    """Arguments of each kernel by its name."""

    def new(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device)

    wide = torch.float32
    x, y, z = (new(tokens, width) for _ in range(3))
    column, gamma, head_gamma = (new(*shape, dtype=wide) for shape in ((tokens, 1), (width,), (width // 8,)))
    q, k = (new(4, tokens // 4, 8, width // 8) for _ in range(2))
    cos, sin = new(tokens // 4, 1, width // 8), new(tokens // 4, 1, width // 16)
    logits, counted = new(tokens, 2 * width), new(tokens) < 1
    targets = torch.randint(0, 2 * width, (tokens,), device=device)
    return {
        "activated": (x, column, ACTS["silu"]),
        "activated_backward": (x, y, column, ACTS["silu"]),
        "gated": (x, y),
        "gated_backward": (x, y, z),
        "rotated": (q, cos, sin, 1),
        "normed_heads": (q, k, head_gamma, head_gamma, 1e-6),
        "scaled_backward": (x, y, column),
        "row_product": (x, y, wide),
        "normed": (x, gamma, 1e-6),
        "normed_backward": (x, y, gamma, column),
        token_logits.name: (logits, targets, counted),
        logit_gradient.name: (logits.clone(), logits.float().logsumexp(1), targets, counted, counted),
    }


def _kernel(kernel: Kernel[Any], arguments: tuple[Any, ...], backend: str) -> Call:
    def call() -> tuple[Tensor, ...]:
        with torch.no_grad(), using(BACKENDS[backend]):
            result = kernel(*arguments)
        return result if isinstance(result, tuple) else (result,)

    return call


PIECES: dict[str, Callable[[argparse.Namespace], Iterator[Contest]]] = {
    function.__name__: function for function in (build, peers, attention, gemms, float8, layouts, kernels)
}


def measure(contest: Contest, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each contender by round, and why others did not run."""
    mesh, calls, reasons = Mesh(torch.device(args.device)), dict[str, Call](), dict[str, str]()
    found: dict[str, Any] = {"facts": contest.facts, "left_out": reasons, "seconds": {}}
    alone = contest.parallel.tp == 1
    with contextlib.nullcontext() if alone else without_the_others(contest.parallel, mesh.device):
        for name, make in contest.build.items():
            try:
                calls[name] = make()
                refuse_zeros(name, calls[name]())
            except Exception as error:  # of any library
                calls.pop(name, None)
                reasons[name] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]
        if calls:
            found["seconds"] = take_turns(calls, mesh, args.rounds, least_s=LEAST_S, words=contest.name).seconds
            found["profiles"] = {name: profiled(call, mesh.device) for name, call in calls.items()}
    return found


def profiled(call: Call, device: torch.device) -> dict[str, float]:
    """One call under the profiler: seconds of kernels (of operations on CPUs), their number, and peak memory in bytes."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    begun = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as recorded:
        call()
        synchronize(device)
    wall = time.perf_counter() - begun
    events = [event for event in recorded.events() or [] if ("CUDA" in str(event.device_type)) == on_gpu]
    kernels = sum(event.device_time if on_gpu else event.self_cpu_time_total for event in events) / 1e6
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    return {"wall_s": wall, "kernels_s": kernels, "kernels": len(events), "peak_bytes": peak}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("piece", choices=PIECES)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="dry run with small models, as always on CPUs")
    parser.add_argument("--rounds", type=int, default=LEAST_ROUNDS)
    parser.add_argument("--seconds", type=float, default=100.0, help="no contest starts after this time (default 100)")
    parser.add_argument("--cola", type=Path, default=Path("../CoLA"), help="clone of the published CoLA code")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.small |= args.device == "cpu"
    if args.device == "cuda":
        torch.cuda.set_device(0)
        torch.cuda.init()
    done: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    begun, late = time.monotonic(), False
    for contest in PIECES[args.piece](args):
        if contest.name in done.get(args.piece, {}):
            continue
        if late := time.monotonic() - begun > args.seconds:
            print(f"{args.piece}: more to do, run it again", flush=True)
            break
        torch._dynamo.reset()
        found = measure(contest, args)
        done.setdefault(args.piece, {})[contest.name] = found
        done["environment"] = environment(load("demo", ["--parallel.tp=1"]))
        write_numbers(args.out, done)
        times = {name: 1e3 * spread(seconds).median for name, seconds in found["seconds"].items()}
        for name, each in times.items():
            print(
                f"{contest.name:<40} {name:<32} {each:9.3f} ms  {min(times.values()) / each:.3f} of the best",
                flush=True,
            )
        for name, reason in found["left_out"].items():
            print(f"{contest.name:<40} {name:<32} left out: {reason}", flush=True)
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    return 3 if late else 0


if __name__ == "__main__":
    raise SystemExit(main())
