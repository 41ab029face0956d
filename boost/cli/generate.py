"""`boost generate`: generates text from a checkpoint."""

import argparse
import json
import os
import stat
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from boost.cli.inference import add_checkpoint_arguments, open_model, run_on_mesh
from boost.cli.terminal import add_options
from boost.data.tokenizer import TextStream, continuation
from boost.errors import ConfigError
from boost.text import JsonObject, printable_text
from boost.train.sampling import Sampling, beyond_context

if TYPE_CHECKING:
    from boost.train.checkpoint import Checkpoint
    from boost.train.generate import NewToken

MAX_TOKENS = 1 << 20
"""Largest valid --max-tokens. The key/value cache is allocated in full at the start."""


class Chat(NamedTuple):
    """A chat to answer."""

    messages: list[JsonObject]
    variables: JsonObject
    """Of the chat template, such as `tools`."""


Prompt = str | Chat

OPTIONS = {
    "--prompt TEXT...": "text to continue; may be repeated (default: piped text, or else a new document)",
    "--prompts PATH": 'file with one prompt per line, or a .jsonl file with {"prompt": "text"} per line; with --chat, {"messages": '
    '[{"role": "user", "content": "text"}, ...]} is also valid',
    "--chat": "treat prompts as user messages, using the checkpoint's chat template",
    "--samples N": "texts per prompt (default 1); sample i uses the seed SEED + i",
    "--max-tokens N": "maximum number of new tokens (default 200)",
    "--greedy": "always take the most likely token; same as --temperature 0",
    "--temperature TEMPERATURE": "sampling temperature (default: as in an imported generation_config.json that samples, or "
    "else 0.8)",
    "--top-k K": "sample from the K most likely tokens (default: likewise, or else 0: all)",
    "--top-p P": "nucleus sampling: sample from the most likely tokens with total probability P (default: likewise, or "
    "else 0.95)",
    "--seed SEED": "seed (default 0); the same seed gives the same text",
    "--json": "print one line of JSON per text, with the keys prompt (or messages), text, tokens and, with --samples, sample",
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "generate",
        description="Continues prompts token by token, with a key/value cache. Works with any checkpoint, at any TP size.\n"
        "Several prompts are processed together, in batches; each is continued as if it were alone.",
        epilog="examples:\n"
        "  boost generate runs/demo --prompt 'def main():'\n"
        "  boost generate runs/demo --prompt 'import ' --greedy --max-tokens 50\n"
        "  boost generate runs/demo --temperature 0.7 --top-k 50 --top-p 0.95 --seed 7 --tp 2\n"
        "  boost generate runs/demo --prompt 'class ' --prompt 'def ' --json\n"
        "  boost generate runs/demo --prompts prompts.jsonl --json --batch 32 > texts.jsonl\n"
        "  boost generate runs/demo --prompt 'def ' --samples 5 --temperature 1.0\n"
        "  echo -n 'import ' | boost generate runs/demo\n"
        "  boost generate checkpoints/llama-chat --chat                       interactive chat; with --prompt, a single answer",
    )
    add_checkpoint_arguments(parser)
    parser.add_argument(
        "--batch",
        dest="batch_size",
        type=int,
        default=16,
        metavar="N",
        help="sequences to generate at a time (default 16); the key/value cache grows in proportion",
    )
    add_options(parser, OPTIONS, samples=1, max_tokens=200, seed=0)
    return parser


def run(args: argparse.Namespace) -> int:
    if not 1 <= args.max_tokens <= MAX_TOKENS:
        bound = 1 if args.max_tokens < 1 else MAX_TOKENS
        raise ConfigError(f"--max-tokens = {args.max_tokens} is out of range; nearest valid value: {bound}")
    for flag, value in (("--batch", args.batch_size), ("--samples", args.samples)):
        if value < 1:
            raise ConfigError(f"{flag} = {value} is too small; smallest valid value: 1")
    _sampling(args, {})
    args.dialog = args.chat and not (args.prompt or args.prompts or _is_piped())
    if args.dialog and (args.tp != 1 or args.json or args.samples > 1 or not sys.stdin.isatty()):
        raise ConfigError(
            "--chat without --prompt is interactive: it requires a terminal and one process (--tp 1), without --json or --samples"
        )
    args.given = [] if args.dialog else _read_prompts(args)
    return run_on_mesh(generate_process, args)


def _read_prompts(args: argparse.Namespace) -> list[Prompt]:
    """The prompts of --prompt and --prompts, in this order. Without either: piped text, or else one empty prompt."""
    prompts: list[Prompt] = list(args.prompt or [])
    if args.prompts:
        prompts += _prompts_of_file(args.prompts, args.chat)
    elif not prompts and _is_piped():
        prompts.append(_decoded(sys.stdin.buffer.read(), "standard input").removesuffix("\n"))
    for text in args.prompt or []:
        if not _is_unicode(text):
            raise ConfigError(f"--prompt = {text!r} is not valid UTF-8; use a UTF-8 terminal")
    return prompts or [""]


def _is_unicode(value: object) -> bool:
    """Whether a value has no half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
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


def _prompts_of_file(name: str, chat: bool) -> list[Prompt]:
    """Reads one prompt per non-blank line. In a .jsonl file, the prompt is the value of "prompt" or, with `chat`, of "messages",
    and `chat` also takes variables of the chat template."""
    from boost.data.conversations import Malformed, template_fields
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
    prompts: list[Prompt] = []
    unused = dict[str, None]()
    for number, line in lines:
        try:
            content = json.loads(line)
            field = "messages" if chat and "messages" in content else "prompt"
            prompt, variables = content[field], template_fields(content) if chat else {}
        except (ValueError, LookupError, TypeError, RecursionError):
            prompt, variables = None, {}
        except Malformed as problem:
            raise ConfigError(f"--prompts = '{name}': line {number}: {problem}; correct it") from None
        if not _is_unicode([prompt, variables]):
            raise ConfigError(f"--prompts = '{name}': line {number} is {SURROGATE}; correct it")
        if chat and isinstance(prompt, list) and prompt and all(map(_is_message, prompt)):
            prompt = Chat(prompt, variables)
        elif isinstance(prompt, str) and chat:
            prompt = Chat([{"role": "user", "content": prompt}], variables) if variables else prompt
        elif not isinstance(prompt, str):
            either = ' or {"messages": [{"role": "user", "content": "text"}, ...]}' if chat else ""
            raise ConfigError(f'--prompts = \'{name}\': line {number} is not of the form {{"prompt": "text"}}{either}')
        used = {field, *(("tools", "functions", "documents", "chat_template_kwargs") if chat else ())}
        unused |= dict.fromkeys(key for key in content if key not in used)
        prompts.append(prompt)
    if unused:
        print(f"warning: --prompts = '{name}': fields without effect: {', '.join(unused)}", file=sys.stderr)
    return prompts


def _is_message(item: object) -> bool:
    """Whether a value is a message with text, with parts that are text, or with tool calls."""
    if not isinstance(item, dict) or not isinstance(item.get("role"), str):
        return False
    content, calls = item.get("content"), item.get("tool_calls")
    if calls and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        return False
    if isinstance(content, list):
        return all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content)
    return isinstance(content, str) or (content is None and bool(calls))


def _decoded(data: bytes, field: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{field} is not valid UTF-8 (invalid byte at offset {error.start}); convert it") from None


def generate_process(args: argparse.Namespace) -> int:
    """Runs the generation in one process of the mesh; the main process prints."""
    from boost.train.rendezvous import close_mesh

    generation = Generation(args)
    if args.dialog:
        generation.dialog()
    else:
        generation.answer_all(args.given)
    generation.mesh.barrier()
    close_mesh()
    return 0


class Generation:
    """A checkpoint's model and tokenizer, in this process of the mesh."""

    def __init__(self, args: argparse.Namespace) -> None:
        from boost.convert.vocabulary import end_tokens
        from boost.data.tokenizer import PlainText
        from boost.train.checkpoint import HUB
        from boost.train.generate import prepare_inference

        self._args = args
        checkpoint, self._config, self.mesh, self._model = open_model(args, self._read_files)
        if self.mesh.size == 1:  # other layouts round after multiplying weights, not before
            prepare_inference(self._model, 1 if args.dialog else min(args.batch_size, len(args.given) * args.samples))
        self._sampling = _sampling(args, (checkpoint.data.get(HUB) or {}).get("generation", {}))
        self._eos, self._ends = checkpoint.data.get("eos"), end_tokens(checkpoint.data)
        self._plain = PlainText(self._tokenizer, self._eos)
        # Imported weights may have a bos. In our own token stores, a document starts after the eos of the previous one.
        self._bos = checkpoint.data.get("bos")
        self._context = checkpoint.context
        self._said = set[str]()
        """Notes on chats that were printed."""

    def _read_files(self, checkpoint: "Checkpoint") -> None:
        from boost.convert.vocabulary import load_template_of
        from boost.data.tokenizer import load_tokenizer

        checkpoint.require_tokenizer()
        self._tokenizer = load_tokenizer(checkpoint.tokenizer)
        if not self._args.chat:
            return
        self._render = load_template_of(checkpoint)
        if self._render is None:
            raise ConfigError(
                f"'{checkpoint.path}' has no chat template, which --chat requires: none was imported, and the folder contains no "
                "chat_template.jinja; add one, or remove --chat"
            )
        # Templates write special tokens as text. As in transformers, those in messages are then encoded as special tokens too.
        self._tokenizer.encode_special_tokens = False

    def answer_all(self, given: list[Prompt]) -> None:
        """Continues or answers prompts and prints the texts in order, each as soon as the ones before it are printed."""
        prompts = [self._encode_prompt(prompt) for prompt in given]
        if len(prompts) == self._args.samples == 1 and not self._args.json:
            if isinstance(given[0], str) and not self._args.chat:
                self._print(given[0], end="")
            self._stream(prompts[0])
            return
        tokens: dict[tuple[int, int], list[int]] = {}
        ended: set[tuple[int, int]] = set()
        order = iter([(prompt, sample) for prompt in range(len(prompts)) for sample in range(self._args.samples)])
        following = next(order, None)
        for new in self._generate(prompts):
            key = new.prompt, new.sample
            tokens.setdefault(key, []).append(new.token)
            ended |= {key} if new.is_last else set()
            while following in ended:
                assert following is not None
                prompt, sample = following
                self._print_text(given, prompt, sample, prompts[prompt], tokens.pop(following))
                following = next(order, None)

    def dialog(self) -> None:
        """Reads messages from the terminal and answers them, until an empty line, Ctrl-D or Ctrl-C."""
        print("An empty line or Ctrl-D ends the chat.")
        messages: list[JsonObject] = []
        while True:
            try:
                said = input("> ").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return
            if not said:
                return
            messages.append({"role": "user", "content": said})
            messages.append({"role": "assistant", "content": self._stream(self._encode_prompt(Chat(messages, {})))})

    def _encode_prompt(self, prompt: Prompt) -> list[int]:
        """Tokens of a text to continue, or of messages to answer. Raises ConfigError if there are none."""
        if self._args.chat:
            assert self._render is not None
            chat = Chat([{"role": "user", "content": prompt}], {}) if isinstance(prompt, str) else prompt
            text, notes = self._render([{"content": None, **message} for message in chat.messages], chat.variables)
            for note in notes:
                if note not in self._said and self.mesh.is_main:
                    print(f"warning: a chat {note}", file=sys.stderr)
                self._said.add(note)
            tokens = self._encode(text)
        else:
            assert isinstance(prompt, str)
            tokens = ([] if self._bos is None else [self._bos]) + self._encode(prompt)
            tokens = tokens or ([] if self._eos is None else [self._eos])
        if not tokens:
            raise ConfigError(
                "--prompt is empty, and these weights have no known start-of-document token; pass some text"
            )
        return tokens

    def _encode(self, text: str) -> list[int]:
        if self._args.chat:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        else:
            ids = self._plain.encode(text)
        vocabulary = self._config.model.vocab_size
        if ids and max(ids) >= vocabulary:
            raise ConfigError(f"--prompt has token {max(ids)}, but model.vocab_size = {vocabulary}; change the prompt")
        return ids

    def _generate(self, prompts: list[list[int]]) -> "Iterator[NewToken]":
        from boost.train.generate import generate_batch

        args = self._args
        batch, samples = (1, 1) if args.dialog else (args.batch_size, args.samples)
        lengths: Counter[tuple[int, int]] = Counter()
        for new in generate_batch(
            self._model, prompts, args.max_tokens, self._sampling, self._ends, samples=samples, batch=batch
        ):
            lengths[new.prompt, new.sample] += 1
            yield new
        longest = max(len(prompts[prompt]) + length for (prompt, _), length in lengths.items())
        if (warning := beyond_context(longest, self._context)) and self.mesh.is_main:
            print(f"warning: {warning}", file=sys.stderr)

    def _stream(self, prompt: list[int]) -> str:
        """Generates one text and prints it token by token. Returns it."""
        stream = TextStream(self._tokenizer, prompt)
        text = ""
        for new in self._generate([prompt]):
            text += (piece := stream.add(new.token))
            self._print(piece, end="")
        self._print(rest := stream.rest())
        return text + rest

    def _print_text(self, given: list[Prompt], prompt: int, sample: int, before: list[int], tokens: list[int]) -> None:
        said, text, samples = given[prompt], continuation(self._tokenizer, before, tokens), self._args.samples
        if self._args.json:
            line: dict[str, object] = {"prompt": said} if isinstance(said, str) else {"messages": said.messages}
            line |= {"sample": sample} if samples > 1 else {}
            self._print(json.dumps(line | {"text": text, "tokens": tokens}))
            return
        of_samples = f", sample {sample + 1} of {samples}" if samples > 1 else ""
        self._print(f"--- {prompt + 1} of {len(given)}{of_samples}")
        self._print(text if self._args.chat else f"{said}{text}")

    def _print(self, text: str, end: str = "\n") -> None:
        if self.mesh.is_main:
            print(printable_text(text) if sys.stdout.isatty() else text, end=end, flush=True)


def _sampling(args: argparse.Namespace, settings: JsonObject) -> Sampling:
    temperature = 0.0 if args.greedy else args.temperature
    sampling = Sampling.of(settings, temperature, args.top_k, args.top_p, args.seed)
    sampling.check()
    return sampling
