"""The console script `boost`: one file per command, each with `add_parser` and `run`.

Commands import torch, tokenizers and the rest inside `run`, so that `--help` and a mistake in a configuration answer at once.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from boost import __version__
from boost.cli import COMMANDS, SubcommandGroup, joined, load_command
from boost.config.text import printable
from boost.errors import BoostError, StorageError


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command; `boost COMMAND --help` is written by the command's own file."""
    parser = argparse.ArgumentParser(
        prog="boost",
        description="Train low-rank bottleneck LLMs (SVD, CoLA) on one laptop or many GPUs.",
        epilog="A first run: 'boost prepare --stdlib', then 'boost train demo'. Each command has its own --help.",
    )
    parser.add_argument("--version", action="version", version=f"boost {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        command = load_command(name)
        first, _, _ = name.rpartition(" ")
        subparser = command.add_parser(SubcommandGroup(subparsers, first) if first else subparsers)
        subparser.allow_abbrev = False
        subparser.add_argument("--debug", action="store_true", help="show the full traceback of an error")
        subparser.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 success, 2 bad input, 3 training failed, 1 a bug."""
    words, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    return run_command(build_parser(), joined(words), overrides)


def run_command(parser: argparse.ArgumentParser, words: Sequence[str], overrides: list[str]) -> int:
    """Runs what `parser`'s subcommand sets as `run` and returns its exit code; an error is one line on stderr."""
    args, unknown = parser.parse_known_args(words)
    try:
        if not getattr(args, "takes_overrides", False) and overrides + unknown:
            parser.error(
                printable(
                    f"unrecognized arguments: {' '.join(overrides + unknown)} (see {parser.prog} {args.command} --help)"
                )
            )
        args.overrides = unknown + overrides  # `boost bench` passes them on: the experiment's name must come first
        return args.run(args) or 0
    except BoostError as error:
        if args.debug:
            raise
        print_error(str(error))
        return _leave(error.exit_code)
    except BrokenPipeError:
        # A reader that closes the pipe early (`boost config --fields | head`) is not an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if args.debug:
            raise
        print_error(f"{error.filename or 'file system'}: {error.strerror or error}")
        return _leave(StorageError.exit_code)
    except KeyboardInterrupt:
        print_error("interrupted")
        return _leave(130)


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


def print_error(message: str) -> None:
    """Prints one line on stderr. Names and values in the message may be untrusted, so it is escaped."""
    print(f"boost: error: {printable(' '.join(message.split()))}", file=sys.stderr)


def _leave(code: int) -> int:
    """Exits at once if a process group is open: NCCL's orderly shutdown would wait for the other processes."""
    if "torch" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
