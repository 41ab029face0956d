"""`boost generate`: text from a checkpoint."""

import argparse
import json
import sys
from typing import Any

from boost.cli.inference import add_checkpoint_arguments, open_model, run_on_mesh
from boost.errors import ConfigError


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
    parser.add_argument("--max-tokens", type=int, default=200, metavar="N", help="most new tokens (default 200)")
    parser.add_argument("--greedy", action="store_true", help="always the likeliest token; the same as --temperature 0")
    parser.add_argument("--temperature", type=float, default=0.8, help="divides the logits (default 0.8)")
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="only the K likeliest tokens (default 0: all)"
    )
    parser.add_argument(
        "--top-p", type=float, default=0.95, metavar="P", help="only the likeliest that hold P (default 0.95)"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text (default 0)")
    parser.add_argument("--json", action="store_true", help="print JSON: prompt, text, tokens")
    return parser


def run(args: argparse.Namespace) -> int:
    if args.max_tokens < 1:
        raise ConfigError(f"--max-tokens = {args.max_tokens} is too small; the smallest legal value is 1")
    _sampling(args)
    return run_on_mesh(generate_process, args)


def generate_process(args: argparse.Namespace) -> int:
    """One process of the generation; the main one prints, as the text comes."""
    from boost.data.tokenizer import load_tokenizer
    from boost.parallel.mesh import close_mesh
    from boost.train.generate import generate

    try:
        checkpoint, config, mesh, decoder = open_model(args)
        tokenizer, eos = load_tokenizer(str(checkpoint.tokenizer)), checkpoint.data["eos"]
        prompt = tokenizer.encode(args.prompt, add_special_tokens=False).ids or [eos]
        if max(prompt) >= config.model.vocab_size:
            raise ConfigError(
                f"--prompt has token {max(prompt)}, but the model knows {config.model.vocab_size}; reword it"
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
            json.dump({"prompt": args.prompt, "text": text, "tokens": tokens}, sys.stdout, indent=2)
            print()
        mesh.barrier()
    finally:
        close_mesh()
    return 0


def _sampling(args: argparse.Namespace) -> Any:
    from boost.train.generate import Sampling

    temperature = 0.0 if args.greedy else args.temperature
    sampling = Sampling(temperature, args.top_k, args.top_p, args.seed)
    sampling.check()
    return sampling
