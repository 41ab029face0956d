"""`boost verify`: checks that training is correct and fast on these machines."""

import argparse
from dataclasses import replace
from pathlib import Path

from boost.cli.terminal import add_options
from boost.config import Config, load
from boost.config.layouts import layout_names
from boost.errors import ConfigError

SECTIONS = ("machines", "collectives", "links", "layouts", "step", "runs")


OPTIONS = {
    "--family NAME": "model family whose layouts are checked (default: CONFIG's, or cola)",
    "--nproc N": "number of processes (default: CONFIG's mesh, or one per GPU, or 2 on CPUs)",
    "--layout NAME [NAME ...]": "check only these layouts; dp, cp and pp select meshes without a layout (default: all)",
    "--compile {all,first,none}": "layouts to also check with torch.compile (default: all on GPUs; on CPUs, the first, which takes "
    "a minute)",
    "--gpu PROFILE": "hardware profile to compare with (default: the GPU's)",
    "--out FILE": "report to write (default: verify.json)",
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "verify",
        usage="boost verify [CONFIG] [--nproc N] [--only SECTION ...] [--section.key value ...]",
        description="Checks what every run on these machines relies on, in a few minutes:\n"
        "  machines     devices, drivers, versions, network interfaces\n"
        "  collectives  every collective function, forward and backward, against plain arithmetic\n"
        "  links        latency and bandwidth of every collective, against the hardware profile\n"
        "  layouts      losses, gradients and updates of every layout against one process; collectives against 'boost inspect'\n"
        "  step         time, memory and bytes sent in a training step, against the prediction\n"
        "  runs         full runs of boost train: repeated, killed, on another mesh, hanging, stopped (on one machine)\n"
        "With CONFIG, also checks its mesh and options on a small model, and times a step of CONFIG itself.\n"
        "Prints one line per check and writes a JSON report. Exits with 0 if no check failed, otherwise with 3.",
        epilog="examples:\n"
        "  boost verify                              one process per GPU, or two on CPUs\n"
        "  boost verify my.toml --nproc 8\n"
        "  boost verify --only collectives links --gpu local.toml\n"
        "  boost launch --nnodes 2 --nproc-per-node 8 ... -- verify my.toml   across nodes, without 'runs'",
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="preset name or TOML file of a run")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help="run only these sections")
    add_options(parser, OPTIONS, layout=[], out=Path("verify.json"))
    parser.set_defaults(takes_overrides=True, check=check)
    return parser


def check(args: argparse.Namespace) -> Config | None:
    """The configuration, if one is given. Raises ConfigError."""
    return load(args.config, args.overrides) if args.config or args.overrides else None


def run(args: argparse.Namespace) -> int:
    own = check(args)
    sections = tuple(name for name in SECTIONS if not args.only or name in args.only)

    import torch

    from boost.measure.verify import runs
    from boost.measure.verify.process import Request, verify_process
    from boost.measure.verify.report import Report
    from boost.plan.hardware import load_hardware
    from boost.train.launch import can_fork, launch, under_torchrun
    from boost.train.rendezvous import world_size
    from boost.train.rundir import environment

    if args.gpu is not None:
        load_hardware(args.gpu)
    parts = (*layout_names(), "dp", "cp", "pp")
    for name in args.layout:
        if name not in parts:
            raise ConfigError(f"--layout = '{name}' is unknown; valid values: {', '.join(parts)}")
    device = own.run.device if own else "auto"
    gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    model = load(None, [f"--model.family={args.family}"]).model if args.family else (own or load(None)).model
    nproc = _processes(args.nproc, own, gpus, world_size() if under_torchrun() else None)
    of_processes = tuple(name for name in sections if name != "runs")
    compiled = args.compile or ("all" if gpus else "first")
    request = Request(of_processes, model, own, device, args.gpu, compiled, tuple(args.layout))
    if under_torchrun():
        return verify_process(replace(request, whole=True), args.out)
    torch.set_num_threads(1)  # because `launch` forks
    report = Report()
    if request.sections:
        code = launch(verify_process, (request, args.out), nproc, log_dir=None, forks=can_fork())
        if code:
            return code
        report.read(args.out)
    facts = environment(own or load(None))
    report.changed = lambda: report.write(args.out, facts, finished=False)
    if "runs" in sections:
        runs.verify(report, request.model, nproc, "cuda" if gpus else "cpu")
    report.write(args.out, facts)
    print(f"\n{report.summary()}; report: {args.out}")
    return report.exit_code


def _processes(asked: int | None, own: Config | None, gpus: int, started: int | None) -> int:
    """Returns the number of processes. Raises ConfigError if it does not match the mesh, or exceeds the number of GPUs."""
    usual = own.parallel.world_size if own else (gpus or 2)
    number = next(n for n in (started, asked, usual) if n is not None)
    if number < 1:
        raise ConfigError(f"--nproc = {number} is too small; smallest valid value: 1")
    if own and number != usual:
        raise ConfigError(f"--nproc = {number} must equal the size of CONFIG's mesh; valid value: {usual}")
    if gpus and started is None and number > gpus:
        raise ConfigError(f"--nproc = {number} exceeds the number of GPUs on this machine; largest valid value: {gpus}")
    return number
