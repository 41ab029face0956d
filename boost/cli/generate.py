"""`boost generate`: generates text from a checkpoint."""

import argparse
import json
import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from boost.cli.inference import add_checkpoint_arguments, open_model, run_on_mesh
from boost.cli.terminal import add_options
from boost.data.tokenizer import PlainText, TextStream, load_tokenizer
from boost.errors import ConfigError
from boost.text import JsonObject, printable_text
from boost.train.sampling import Sampling, beyond_context

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from boost.train.checkpoint import Checkpoint

MAX_TOKENS = 1 << 20
"""Largest valid --max-tokens. The key/value cache is allocated in full at the start."""

OPTIONS = {
    "--prompt TEXT...": "text to continue; may be repeated (default: piped text, or else a new document)",
    "--prompts PATH": 'file with one prompt per line, or a .jsonl file with {"prompt": "text"} per line',
    "--samples N": "texts per prompt (default 1), each with its own random numbers",
    "--max-tokens N": "maximum number of new tokens (default 200)",
    "--greedy": "always take the most likely token; same as --temperature 0",
    "--temperature TEMPERATURE": "sampling temperature (default: as in an imported generation_config.json that samples, or "
    "else 0.8)",
    "--top-k K": "sample from the K most likely tokens (default: likewise, or else 0: all)",
    "--top-p P": "nucleus sampling: sample from the most likely tokens with total probability P (default: likewise, or "
    "else 0.95)",
    "--seed SEED": "seed (default 0); the same seed gives the same text",
    "--json": "print one line of JSON per text, with the keys prompt, text, tokens and, with --samples, sample",
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "generate",
        description="Continues prompts token by token, with a key/value cache, one text after another. Works with any checkpoint, "
        "at any TP size.\nTo serve many prompts at once, export the model: vLLM and transformers batch them.",
        epilog="examples:\n"
        "  boost generate runs/demo --prompt 'def main():'\n"
        "  boost generate runs/demo --prompt 'import ' --greedy --max-tokens 50\n"
        "  boost generate runs/demo --temperature 0.7 --top-k 50 --top-p 0.95 --seed 7 --tp 2\n"
        "  boost generate runs/demo --prompt 'class ' --prompt 'def ' --json\n"
        "  boost generate runs/demo --prompts prompts.jsonl --json > texts.jsonl\n"
        "  boost generate runs/demo --prompt 'def ' --samples 5 --temperature 1.0\n"
        "  echo -n 'import ' | boost generate runs/demo",
    )
    add_checkpoint_arguments(parser)
    add_options(parser, OPTIONS, samples=1, max_tokens=200, seed=0)
    return parser


def run(args: argparse.Namespace) -> int:
    if not 1 <= args.max_tokens <= MAX_TOKENS:
        bound = 1 if args.max_tokens < 1 else MAX_TOKENS
        raise ConfigError(f"--max-tokens = {args.max_tokens} is out of range; nearest valid value: {bound}")
    if args.samples < 1:
        raise ConfigError(f"--samples = {args.samples} is too small; smallest valid value: 1")
    _sampling(args, {})
    args.given = _read_prompts(args)
    return run_on_mesh(generate_process, args)


def _read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts of --prompt and --prompts, in this order. Without either: piped text, or else one empty prompt."""
    prompts: list[str] = list(args.prompt or [])
    if args.prompts:
        prompts += _prompts_of_file(args.prompts)
    elif not prompts and _is_piped():
        prompts.append(_decoded(sys.stdin.buffer.read(), "standard input").removesuffix("\n"))
    for text in args.prompt or []:
        if not _is_unicode(text):
            raise ConfigError(f"--prompt = {text!r} is not valid UTF-8; use a UTF-8 terminal")
    return prompts or [""]


def _is_unicode(value: str) -> bool:
    """Whether a text has no half of a surrogate pair."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _is_piped() -> bool:
    """Whether standard input is a pipe or a file, and this is the only process that reads it."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or replaced by something that is not a file
        return False
    return (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)) and "RANK" not in os.environ


def _prompts_of_file(name: str) -> list[str]:
    """Reads one prompt per non-blank line. In a .jsonl file, the prompt is the value of "prompt"."""
    from boost.data.readers import SURROGATE

    try:
        text = _decoded(Path(name).read_bytes(), f"--prompts = '{name}'")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--prompts = '{name}' cannot be read: {getattr(error, 'strerror', None) or error}") from None
    # Not `splitlines`, which would also split a prompt at form feeds and at Unicode line separators.
    numbered = enumerate(text.split("\n"), start=1)
    lines = [(number, line.removesuffix("\r")) for number, line in numbered if line.strip()]
    if not lines:
        raise ConfigError(f"--prompts = '{name}' is empty; write one prompt per line")
    if not name.lower().endswith((".jsonl", ".jsonlines", ".ndjson", ".json")):
        return [line for _, line in lines]
    prompts: list[str] = []
    unused = dict[str, None]()
    for number, line in lines:
        try:
            content = json.loads(line)
            prompt = content["prompt"]
        except (ValueError, LookupError, TypeError, RecursionError):
            prompt = None
        if not isinstance(prompt, str):
            raise ConfigError(f'--prompts = \'{name}\': line {number} is not of the form {{"prompt": "text"}}')
        if not _is_unicode(prompt):
            raise ConfigError(f"--prompts = '{name}': line {number} is {SURROGATE}; correct it")
        unused |= dict.fromkeys(key for key in content if key != "prompt")
        prompts.append(prompt)
    if unused:
        print(f"warning: --prompts = '{name}': fields without effect: {', '.join(unused)}", file=sys.stderr)
    return prompts


def _decoded(data: bytes, field: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{field} is not valid UTF-8 (invalid byte at offset {error.start}); convert it") from None


def generate_process(args: argparse.Namespace) -> int:
    """Runs the generation in one process of the mesh; the main process prints."""
    from boost.convert.vocabulary import end_tokens
    from boost.train.checkpoint import HUB
    from boost.train.generate import generate
    from boost.train.rendezvous import close_mesh

    tokenizers: list[Tokenizer] = []

    def read_tokenizer(checkpoint: "Checkpoint") -> None:
        checkpoint.require_tokenizer()
        tokenizers[:] = [load_tokenizer(checkpoint.tokenizer)]

    checkpoint, _, mesh, model = open_model(args, read_tokenizer)
    (tokenizer,) = tokenizers
    sampling = _sampling(args, (checkpoint.data.get(HUB) or {}).get("generation", {}))
    ends, longest = end_tokens(checkpoint.data), 0
    # A single text appears token by token.
    streams = len(args.given) == args.samples == 1 and not args.json
    plain = PlainText(tokenizer, checkpoint.data.get("eos"))
    given = [(prompt, _encode(plain, prompt, checkpoint)) for prompt in args.given]

    def show(text: str, end: str = "\n") -> None:
        if mesh.is_main:
            print(printable_text(text) if sys.stdout.isatty() else text, end=end, flush=True)

    for number, (prompt, tokens) in enumerate(given, start=1):
        for sample in range(args.samples):
            if streams:
                show(prompt, end="")
            stream, new, text = TextStream(tokenizer, tokens), list[int](), ""
            for token in generate(model, tokens, args.max_tokens, sampling, ends, sample):
                new.append(token)
                text += (piece := stream.add(token))
                if streams:
                    show(piece, end="")
            text += (rest := stream.rest())
            longest = max(longest, len(tokens) + len(new))
            if streams:
                show(rest)
            elif args.json:
                line: JsonObject = {"prompt": prompt, **({"sample": sample} if args.samples > 1 else {})}
                show(json.dumps(line | {"text": text, "tokens": new}))
            else:
                of_samples = f", sample {sample + 1} of {args.samples}" if args.samples > 1 else ""
                show(f"--- {number} of {len(given)}{of_samples}\n{prompt}{text}")
    if (warning := beyond_context(longest, checkpoint.context)) and mesh.is_main:
        print(f"warning: {warning}", file=sys.stderr)
    mesh.barrier()
    close_mesh()
    return 0


def _encode(plain: PlainText, prompt: str, checkpoint: "Checkpoint") -> list[int]:
    """Tokens of a prompt. Raises ConfigError if there are none."""
    # Imported weights may have a bos. In our own token stores, a document starts after the eos of the previous one.
    start, eos = checkpoint.data.get("bos"), checkpoint.data.get("eos")
    tokens, vocabulary = ([] if start is None else [start]) + plain.encode(prompt), checkpoint.config.model.vocab_size
    tokens = tokens or ([] if eos is None else [eos])
    if not tokens:
        raise ConfigError("--prompt is empty, and these weights have no known start-of-document token; pass some text")
    if max(tokens) >= vocabulary:
        raise ConfigError(f"--prompt has token {max(tokens)}, but model.vocab_size = {vocabulary}; change the prompt")
    return tokens


def _sampling(args: argparse.Namespace, settings: JsonObject) -> Sampling:
    temperature = 0.0 if args.greedy else args.temperature
    sampling = Sampling.of(settings, temperature, args.top_k, args.top_p, args.seed)
    sampling.check()
    return sampling
