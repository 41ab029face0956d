"""`boost launch`: a command on the processes of torchrun, checked before they start."""

import argparse
import signal
from types import FrameType

from boost.cli.main import build_parser, command_words, parse, split_overrides
from boost.errors import TRY_AGAIN, ConfigError, StoppedError
from boost.train.signals import STOP_SIGNALS


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "launch",
        usage="boost launch [--check | TORCHRUN OPTIONS] -- COMMAND ...",
        description="Checks the command, such as 'train run.toml', and then runs it under torchrun. Options before -- are\n"
        "torchrun's.\n"
        "Compared with 'torchrun ... -m boost.cli.main COMMAND':\n"
        "  - A mistake in the configuration is reported before processes start, and never repeated by --max-restarts.\n"
        "  - An error is one line, printed once and last.\n"
        "  - SIGUSR1 is forwarded, and repeated signals do not interrupt a save.\n"
        "  - The exit code says what to do:",
        epilog="  0   done\n"
        "  2   a mistake in the configuration, the data or the storage: a restart would not help\n"
        "  3   training cannot continue (a lost process, a hang, non-finite numbers): restart\n"
        "  75  a signal stopped the run: restart\n\n"
        "With --check, only checks the command, as a batch script does once for all nodes.\n\n"
        "examples:\n"
        "  boost launch --nproc-per-node 8 -- train run.toml --resume auto\n"
        "  boost launch --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29400 \\\n"
        "      --rdzv-id mine --max-restarts 3 -- train run.toml --resume auto",
    )
    parser.set_defaults(takes_overrides=True)
    return parser


def run(args: argparse.Namespace) -> int:
    words = args.overrides
    if "--" not in words[:-1]:
        raise ConfigError(
            "boost launch: -- and a command are missing; write boost launch [torchrun options] -- train CONFIG"
        )
    options, command = words[: words.index("--")], words[words.index("--") + 1 :]
    before = {number: signal.signal(number, _stop) for number in STOP_SIGNALS}  # until torchrun handles them
    try:
        plain, overrides = split_overrides(command)
        words = command_words(plain)
        launched = parse(build_parser(words), words, overrides)
        if check := getattr(launched, "check", None):
            check(launched)
        if options == ["--check"]:
            return 0

        from boost.train.agent import torchrun

        return torchrun(options, command)
    finally:
        for number, handler in before.items():
            # Once torchrun has run, the exit code is known: srun sends SIGTERM to the last of its tasks.
            signal.signal(number, handler if signal.getsignal(number) is _stop else signal.SIG_IGN)


def _stop(number: int, frame: FrameType | None) -> None:
    stop = StoppedError(f"stopped by {signal.Signals(number).name} before the processes started; nothing was lost")
    stop.exit_code = TRY_AGAIN
    raise stop
