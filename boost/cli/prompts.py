"""Reads the prompts of `boost generate` from the command line, a file, or standard input."""

import argparse
import itertools
import json
import os
import stat
import sys
from pathlib import Path

from boost.data.chat import Message
from boost.errors import ConfigError

MAX_PROMPTS_BYTES = 1 << 28
"""Maximum size of a file or stream of prompts."""

STDIN = "-"

Prompt = str | list[Message]
"""Text, or the messages of a chat."""


def read_prompts(args: argparse.Namespace) -> list[Prompt]:
    """Returns the prompts of `--prompt` and `--prompts`, in this order. Without either: piped text, or else one empty prompt.

    `-` is standard input: one prompt for `--prompt`, one per line for `--prompts`. With `--chat`, a line of a .jsonl file may
    have messages. Raises ConfigError.
    """
    if (args.prompt or []).count(STDIN) + (args.prompts == STDIN) > 1:
        raise ConfigError("standard input can be read only once; use a single '-' in --prompt and --prompts")
    prompts: list[Prompt] = [_standard_input("--prompt") if text == STDIN else text for text in args.prompt or []]
    if args.prompts:
        prompts += _from_lines(args.prompts, args.chat)
    elif not prompts and is_piped():
        prompts.append(_standard_input("standard input"))
    contents = ([each] if isinstance(each, str) else [m["content"] for m in each] for each in prompts)
    for text in itertools.chain(*contents):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise ConfigError(f"--prompt = {text!r} is not valid UTF-8; use a UTF-8 terminal") from None
    return prompts or [""]


def is_piped() -> bool:
    """Whether standard input is a pipe or a file, and this is the only process that reads it."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or replaced by something that is not a file
        return False
    return (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)) and "RANK" not in os.environ


def _standard_input(field: str) -> str:
    """Reads all of standard input, without the last line break."""
    if "RANK" in os.environ:
        raise ConfigError(f"{field}: torchrun's processes share standard input; use --prompts FILE")
    data = sys.stdin.buffer.read(MAX_PROMPTS_BYTES + 1)
    return _decoded(data, field).removesuffix("\n")


def _from_lines(name: str, chat: bool) -> list[Prompt]:
    """Returns one prompt per line that is not blank. In a .jsonl file, it is the key "prompt" of each line, or with `chat`
    "messages"."""
    if name == STDIN:
        text = _standard_input("--prompts")
    else:
        try:
            with Path(name).open("rb") as file:
                text = _decoded(file.read(MAX_PROMPTS_BYTES + 1), f"--prompts = '{name}'")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"--prompts = '{name}' cannot be read: {reason}") from None
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if not lines:
        raise ConfigError(f"--prompts = '{name}' is empty; write one prompt per line")
    if not name.endswith((".jsonl", ".ndjson")):
        return [line for _, line in lines]
    return [_json_prompt(line, f"--prompts = '{name}': line {number}", chat) for number, line in lines]


def _json_prompt(line: str, where: str, chat: bool) -> Prompt:
    try:
        content = json.loads(line)
        prompt = content["messages"] if chat and "messages" in content else content["prompt"]
    except (ValueError, LookupError, TypeError, RecursionError):
        prompt = None
    if isinstance(prompt, str) or _are_messages(prompt):
        return prompt
    either = ' or {"messages": [{"role": "user", "content": "text"}, ...]}' if chat else ""
    raise ConfigError(f'{where} is not of the form {{"prompt": "text"}}{either}')


def _are_messages(value: object) -> bool:
    def is_message(each: object) -> bool:
        return isinstance(each, dict) and all(isinstance(each.get(key), str) for key in ("role", "content"))

    return isinstance(value, list) and bool(value) and all(map(is_message, value))


def _decoded(data: bytes, field: str) -> str:
    if len(data) > MAX_PROMPTS_BYTES:
        raise ConfigError(f"{field} has more than {MAX_PROMPTS_BYTES:,} bytes; split it")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{field} is not valid UTF-8 (byte {error.start}); convert it") from None
