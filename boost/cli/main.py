"""The console script `boost`: one file per command, each with `add_parser` and `run`.

Only the file of the given command is imported. Commands import torch, tokenizers and other slow modules inside `run`, so that
`--help` and configuration errors are instant.
"""

import argparse
import difflib
import importlib
import keyword
import os
import sys
from collections.abc import Collection, Sequence
from typing import NoReturn

from boost.errors import BoostError, ConfigError, StorageError, explained, system_error, system_limit
from boost.machine import available_cores
from boost.text import error_line, prepare_streams, print_error
from boost.version import __version__

COMMAND_GROUPS = {
    "data": {"prepare": "tokenize files, a Hugging Face dataset or a code corpus"},
    "training": {
        "train": "train a model",
        "config": "print a fully resolved configuration, or validate a file",
        "eval": "evaluate a checkpoint on held-out text",
        "generate": "generate text from a checkpoint",
    },
    "models": {
        "checkpoint": "list and verify checkpoints",
        "export": "write a checkpoint as a Hugging Face folder",
        "import": "convert weights from transformers to a checkpoint",
    },
    "planning": {
        "plan": "find the fastest layout, mesh and batch for your GPUs",
        "plan calibrate": "measure this machine: GEMMs, attention, memory, collectives",
        "inspect": "show how a model is sharded, and its collectives",
    },
    "clusters": {
        "launch": "start a command under torchrun, on one or more nodes",
        "verify": "check that training is correct and fast on these machines",
        "coordinate": "host the key-value store for in-step recovery",
    },
}
"""Commands and their summaries by heading, in the order of `boost --help`, which imports no command's file."""

COMMANDS = {name: summary for commands in COMMAND_GROUPS.values() for name, summary in commands.items()}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(error_line(message))


def build_parser(words: Collection[str] = COMMANDS) -> argparse.ArgumentParser:
    """Builds the parser for the commands among `words`. Each command's file defines its arguments and help."""
    listed = [
        f"{heading}:\n" + "".join(f"  {name:<14}  {summary}\n" for name, summary in commands.items())
        for heading, commands in COMMAND_GROUPS.items()
    ]
    parser = _Parser(
        prog="boost",
        usage="boost COMMAND ...",
        description="\n".join(["Train low-rank LLMs (SVD, CoLA, LaX) on many GPUs.\n", *listed]),
        epilog="Quick start:\n"
        "  boost prepare --stdlib     prepare a corpus from the Python standard library\n"
        "  boost train demo           train a few million parameters in minutes on a CPU\n"
        "'boost COMMAND --help' shows the options of a command, with examples.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"boost {__version__}", help="show the version and exit")
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", prog="boost", required=True, help=argparse.SUPPRESS
    )
    for name in (name for name in COMMANDS if name in words):
        # plan_calibrate.py is the two-word command `plan calibrate`; import_.py avoids the keyword `import`.
        command = importlib.import_module(f"boost.cli.{name.replace(' ', '_')}{'_' * keyword.iskeyword(name)}")
        subparser = command.add_parser(subparsers)
        subparser.allow_abbrev, subparser.formatter_class = False, argparse.RawDescriptionHelpFormatter
        subparser.add_argument("--debug", action="store_true", help="show the full traceback if there is an error")
        subparser.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 success, 2 bad input, 3 training failed, 1 a bug."""
    prepare_streams()
    # Processes with many more threads than cores hang, so OMP_NUM_THREADS is lowered before torch reads it.
    threads, cores = os.environ.get("OMP_NUM_THREADS", ""), available_cores()
    if threads.isdecimal() and int(threads) > cores:
        os.environ["OMP_NUM_THREADS"] = str(cores)
        note = f"OMP_NUM_THREADS = {threads} exceeds the number of available cores; using {cores}"
        print(f"warning: {note}", file=sys.stderr)
    given = list(sys.argv[1:] if argv is None else argv)
    # All other words of `launch` are torchrun's or those of the command that it launches.
    launches = given[:1] == ["launch"] and not {"-h", "--help"} & {*given[1:2]}
    words, overrides = (given[:1], given[1:]) if launches else split_overrides(given)
    if not given:
        build_parser(()).print_help()
        return 0
    try:
        words = command_words(words)
    except ConfigError as error:
        print_error(str(error))
        return error.exit_code
    return run_command(build_parser(words), words, overrides)


def command_words(words: list[str]) -> list[str]:
    """`words` with the command as one word, such as `plan calibrate`, before its options. Raises ConfigError if it is unknown."""
    place = next((n for n, word in enumerate(words) if not word.startswith("-")), len(words))
    if place == len(words):
        return words
    if words[place] not in COMMANDS:
        near = difflib.get_close_matches(words[place], COMMANDS, n=1)
        advice = f"did you mean '{near[0]}'?" if near else "see boost --help"
        raise ConfigError(f"unknown command '{words[place]}'; {advice}")
    two = " ".join(words[place : place + 2])
    command, rest = (two, words[place + 2 :]) if two in COMMANDS else (words[place], words[place + 1 :])
    own = [word for word in words[:place] if word in ("-h", "--help", "--version")]
    return [*own, command, *(word for word in words[:place] if word not in own), *rest]


def parse(parser: argparse.ArgumentParser, words: Sequence[str], overrides: list[str]) -> argparse.Namespace:
    """Parses a subcommand's arguments. Like argparse, exits with code 2 if they are wrong. Raises ConfigError, naming an unknown
    flag, if the subcommand takes those of a configuration."""
    args, unknown = parser.parse_known_args(words)
    if not getattr(args, "takes_overrides", False) and overrides + unknown:
        text = " ".join(overrides + unknown)
        parser.error(f"unrecognized arguments: {text} (see {parser.prog} {args.command} --help)")

    from boost.config.load import parse_overrides

    for flag in (word for word in unknown if word.startswith("--")):
        dict(parse_overrides([flag]))  # before its value is taken for another argument; every key has a dot
    args.overrides = unknown + overrides
    return args


def run_command(parser: argparse.ArgumentParser, words: Sequence[str], overrides: list[str]) -> int:
    """Parses `words`, calls the subcommand's `run` and returns its exit code. Prints an error as one line on stderr."""
    try:
        args = parse(parser, words, overrides)
    except ConfigError as error:
        print_error(str(error))
        return error.exit_code
    try:
        return args.run(args) or 0
    except BoostError as error:
        if args.debug:
            raise
        print_error(explained(error))
        return _exit_code(error.exit_code)
    except BrokenPipeError:
        # Closing the pipe early (`boost config --fields | head`) is not an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (OSError, RuntimeError) as error:
        message = system_limit(error)
        known = StorageError(message) if message else system_error(error) if isinstance(error, OSError) else None
        if args.debug or known is None:
            raise
        print_error(str(known))
        return _exit_code(known.exit_code)
    except KeyboardInterrupt:
        print_error("interrupted")
        return _exit_code(130)


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Extracts `--section.key value` and `--section.key=value` from anywhere in a command line."""
    rest, overrides, position = [], [], 0
    while position < len(words):
        word = words[position]
        position += 1
        if not (word.startswith("--") and "." in word.partition("=")[0]):
            rest.append(word)
            continue
        overrides.append(word)
        if "=" not in word and position < len(words) and not words[position].startswith("--"):
            overrides.append(words[position])
            position += 1
    return rest, overrides


def _exit_code(code: int) -> int:
    """Returns `code`. Exits immediately if a process group is open, because NCCL's shutdown would wait for other processes."""
    if "torch" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
