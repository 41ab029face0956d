"""`boost generate`: generates text from a checkpoint."""

import argparse
import json
import sys
from typing import Any

from boost.cli.inference import add_checkpoint_arguments, open_model, run_on_mesh
from boost.cli.prompts import is_piped, read_prompts
from boost.errors import ConfigError

MAX_TOKENS = 1 << 20
"""Largest valid --max-tokens. The key/value cache is allocated in full at the start."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "generate",
        help="generate text from a checkpoint",
        description="Continues prompts token by token, with a key/value cache. Works with any checkpoint, at any TP size.\n"
        "Several prompts are processed one after the other, each with the same seed.",
        epilog="examples:\n"
        "  boost generate runs/demo --prompt 'def main():'\n"
        "  boost generate runs/demo --prompt 'import ' --greedy --max-tokens 50\n"
        "  boost generate runs/demo --temperature 0.7 --top-k 50 --top-p 0.95 --seed 7 --tp 2\n"
        "  boost generate runs/demo --prompt 'class ' --prompt 'def ' --json\n"
        "  boost generate runs/demo --prompts prompts.jsonl --json > texts.jsonl\n"
        "  echo -n 'import ' | boost generate runs/demo\n"
        "  boost generate checkpoints/llama-chat --chat                       interactive chat; with --prompt, a single answer",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_checkpoint_arguments(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue; may be repeated; '-' reads all of stdin (default: piped text, or else start a new document)",
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help='file with one prompt per line, or a .jsonl file with {"prompt": "text"} per line; \'-\' reads stdin',
    )
    parser.add_argument(
        "--chat", action="store_true", help="treat prompts as user messages, using the chat template of the checkpoint"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=200, metavar="N", help="maximum number of new tokens (default 200)"
    )
    parser.add_argument(
        "--greedy", action="store_true", help="always take the most likely token; same as --temperature 0"
    )
    parser.add_argument("--temperature", type=float, default=0.8, help="sampling temperature (default 0.8)")
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="sample from the K most likely tokens (default 0: all)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        metavar="P",
        help="nucleus sampling: sample from the most likely tokens with total probability P (default 0.95)",
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text (default 0)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON per prompt: prompt, text, tokens")
    return parser


def run(args: argparse.Namespace) -> int:
    if not 1 <= args.max_tokens <= MAX_TOKENS:
        bound = 1 if args.max_tokens < 1 else MAX_TOKENS
        raise ConfigError(f"--max-tokens = {args.max_tokens} is out of range; nearest valid value: {bound}")
    _sampling(args)
    args.dialog = args.chat and not (args.prompt or args.prompts or is_piped())
    if args.dialog and (args.tp != 1 or args.json or not sys.stdin.isatty()):
        raise ConfigError(
            "--chat without --prompt is interactive: it requires a terminal, one process (--tp 1), and no --json"
        )
    args.texts = [] if args.dialog else read_prompts(args)
    return run_on_mesh(generate_process, args)


def generate_process(args: argparse.Namespace) -> int:
    """Runs the generation on one process of the mesh; the main process prints tokens as they are generated."""
    from boost.parallel.mesh import close_mesh

    generation = Generation(args)
    main = generation.mesh.is_main
    if args.dialog:
        generation.dialog()
    for number, prompt in enumerate(args.texts, start=1):
        if main and len(args.texts) > 1 and not args.json:
            print(f"--- {number} of {len(args.texts)}")
        messages = [{"role": "user", "content": prompt}]
        tokens, text = generation.answer(messages) if args.chat else generation.continue_(prompt)
        if main and args.json:
            print(json.dumps({"prompt": prompt, "text": text, "tokens": tokens}))
    generation.mesh.barrier()
    close_mesh()
    return 0


class Generation:
    """A checkpoint's model and tokenizer, on this process of the mesh."""

    def __init__(self, args: argparse.Namespace) -> None:
        from boost.convert.chat import load_template_of
        from boost.data.tokenizer import load_tokenizer

        checkpoint, self._config, self.mesh, self._model = open_model(args)
        checkpoint.require_tokenizer()
        self._args, self._eos = args, checkpoint.data["eos"]
        # Imported weights may have a bos. In our own token stores, a document starts after the eos of the previous one.
        self._bos = checkpoint.data.get("bos")
        self._tokenizer = load_tokenizer(checkpoint.tokenizer)
        self._streams = self.mesh.is_main and not args.json
        if not args.chat:
            return
        self._render = load_template_of(checkpoint)
        if self._render is None:
            raise ConfigError(
                f"--chat: '{checkpoint.path}' has no chat template: none was imported, and there is no chat_template.jinja; add "
                "one, or remove --chat"
            )
        # Templates write special tokens as text. As in transformers, special tokens in messages are then encoded as such too.
        self._tokenizer.encode_special_tokens = False

    def continue_(self, prompt: str) -> tuple[list[int], str]:
        """Continues a prompt, and prints both unless --json is given. Returns (new tokens, their text)."""
        if self._streams:
            print(prompt, end="", flush=True)
        ids = ([] if self._bos is None else [self._bos]) + self._encode(prompt)
        return self._generate(ids or ([] if self._eos is None else [self._eos]))

    def answer(self, messages: list[dict[str, str]]) -> tuple[list[int], str]:
        """Answers the last of `messages`. Returns (new tokens, their text)."""
        assert self._render is not None
        return self._generate(self._encode(self._render(messages)))

    def dialog(self) -> None:
        """Reads messages from the terminal and answers them, until an empty line, Ctrl-D or Ctrl-C."""
        print("An empty line or Ctrl-D ends the chat.")
        messages: list[dict[str, str]] = []
        while True:
            try:
                said = input("> ").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return
            if not said:
                return
            messages.append({"role": "user", "content": said})
            messages.append({"role": "assistant", "content": self.answer(messages)[1]})

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        vocabulary = self._config.model.vocab_size
        if ids and max(ids) >= vocabulary:
            raise ConfigError(f"--prompt has token {max(ids)}, but model.vocab_size = {vocabulary}; change the prompt")
        return ids

    def _generate(self, prompt: list[int]) -> tuple[list[int], str]:
        from boost.train.generate import generate

        if not prompt:
            raise ConfigError(
                "--prompt is empty, and these weights have no known start-of-document token; pass some text"
            )
        tokens: list[int] = []
        written = ""
        for token in generate(self._model, prompt, self._args.max_tokens, _sampling(self._args), self._eos):
            tokens.append(token)
            if self._streams:
                # The bytes of one character may span several tokens: print only text that can no longer change.
                text = self._tokenizer.decode(tokens)
                if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                    print(text[len(written) :], end="", flush=True)
                    written = text
        text = self._tokenizer.decode(tokens)
        if self._streams:
            print(text[len(written) :])
        return tokens, text


def _sampling(args: argparse.Namespace) -> Any:
    from boost.train.generate import Sampling

    temperature = 0.0 if args.greedy else args.temperature
    sampling = Sampling(temperature, args.top_k, args.top_p, args.seed)
    sampling.check()
    return sampling
