"""`boost generate`: text from a checkpoint."""

import argparse
import json
from typing import Any

from boost.cli.inference import add_checkpoint_arguments, open_model, run_on_mesh
from boost.errors import ConfigError

MAX_TOKENS = 1 << 20
"""Limit of one generation; the key/value cache is allocated in full at the start."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "generate",
        help="generate text from a checkpoint",
        description="Continues a prompt, token by token, with a key/value cache. Any checkpoint, at any TP size.",
        epilog="examples:\n"
        "  boost generate runs/demo --prompt 'def main():'\n"
        "  boost generate runs/demo --prompt 'import ' --greedy --max-tokens 50\n"
        "  boost generate runs/demo --temperature 0.7 --top-k 50 --top-p 0.95 --seed 7 --tp 2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_checkpoint_arguments(parser)
    parser.add_argument("--prompt", default="", help="text to continue (default: the start of a document)")
    parser.add_argument(
        "--max-tokens", type=int, default=200, metavar="N", help="maximum number of new tokens (default 200)"
    )
    parser.add_argument(
        "--greedy", action="store_true", help="always take the most likely token; same as --temperature 0"
    )
    parser.add_argument("--temperature", type=float, default=0.8, help="divides the logits (default 0.8)")
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="sample from the K most likely tokens (default 0: all)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        metavar="P",
        help="nucleus sampling: the most likely tokens with total probability P (default 0.95)",
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text (default 0)")
    parser.add_argument("--json", action="store_true", help="print JSON: prompt, text, tokens")
    return parser


def run(args: argparse.Namespace) -> int:
    if not 1 <= args.max_tokens <= MAX_TOKENS:
        bound = 1 if args.max_tokens < 1 else MAX_TOKENS
        raise ConfigError(f"--max-tokens = {args.max_tokens} is out of range; nearest valid value: {bound}")
    try:
        args.prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"--prompt = {args.prompt!r} is not valid UTF-8; use a terminal with UTF-8") from None
    _sampling(args)
    return run_on_mesh(generate_process, args)


def generate_process(args: argparse.Namespace) -> int:
    """One process of the generation; the main one prints the text as it is generated."""
    from boost.data.tokenizer import load_tokenizer
    from boost.parallel.mesh import close_mesh
    from boost.train.generate import generate

    checkpoint, config, mesh, decoder = open_model(args)
    checkpoint.require_tokenizer()
    tokenizer, eos = load_tokenizer(checkpoint.tokenizer), checkpoint.data["eos"]
    start = checkpoint.data.get(
        "bos"
    )  # imported weights may have a bos; our documents begin after the eos of the previous one
    prompt = ([] if start is None else [start]) + tokenizer.encode(args.prompt, add_special_tokens=False).ids
    prompt = prompt or ([] if eos is None else [eos])
    if not prompt:
        raise ConfigError(
            "--prompt is empty, and the start-of-document token of these weights is unknown; pass some text"
        )
    if max(prompt) >= config.model.vocab_size:
        raise ConfigError(
            f"--prompt has token {max(prompt)}, but model.vocab_size is {config.model.vocab_size}; change the prompt"
        )
    tokens: list[int] = []
    written = ""
    streams = mesh.is_main and not args.json
    if streams:
        print(args.prompt, end="", flush=True)
    for token in generate(decoder, prompt, args.max_tokens, _sampling(args), eos):
        tokens.append(token)
        if streams:
            # Bytes of one character may be spread over tokens: print only what can no longer change.
            text = tokenizer.decode(tokens)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                print(text[len(written) :], end="", flush=True)
                written = text
    text = tokenizer.decode(tokens)
    if streams:
        print(text[len(written) :])
    elif mesh.is_main:
        print(json.dumps({"prompt": args.prompt, "text": text, "tokens": tokens}, indent=2))
    mesh.barrier()
    close_mesh()
    return 0


def _sampling(args: argparse.Namespace) -> Any:
    from boost.train.generate import Sampling

    temperature = 0.0 if args.greedy else args.temperature
    sampling = Sampling(temperature, args.top_k, args.top_p, args.seed)
    sampling.check()
    return sampling
