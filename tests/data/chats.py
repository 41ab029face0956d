"""A tokenizer with a chat template, and conversations, for the tests of `boost prepare --chat`."""

import json
from pathlib import Path
from typing import Any

from boost.data.prepare import PrepareOptions, prepare
from boost.data.store import TokenStore
from boost.data.tokenizer import train_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{{ m['content'] + '<|im_end|>' }}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = CHATML.replace(
    "{{ m['content'] + '<|im_end|>' }}{% else %}",
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}",
)
"""The same text, but the template marks the assistant's part, without the line break after it."""
TEXT = "what is a low rank model and why does it train fast ask me again tomorrow"
WORDS = TEXT.split()


def chat_tokenizer(folder: Path, template: str | None = CHATML) -> Path:
    """A folder with a byte-level tokenizer of 300 tokens, two special ones, and the template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer([f"{TEXT}\n"] * 20, 300)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def conversation(number: int) -> list[dict[str, Any]]:
    """Messages: one or more exchanges of different lengths, some after a system message."""
    messages = [{"role": "system", "content": f"answer number {number}"}] if number % 3 == 0 else []
    for turn in range(1 + number % 3):
        asked = " ".join(WORDS[(number + turn + i) % len(WORDS)] for i in range(3 + number % 7))
        answered = " ".join(WORDS[(5 * number + 2 * turn + i) % len(WORDS)] for i in range(1 + (number + turn) % 9))
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return messages


def chat_store_in(folder: Path, template: str = CHATML, count: int = 60) -> TokenStore:
    """A token store of `count` conversations, with a fifth held out, and its conversations."""
    options = PrepareOptions(
        out=folder / "store",
        inputs=(str(write_conversations(folder / "chats.jsonl", count)),),
        tokenizer=str(chat_tokenizer(folder / "tokenizer", template)),
        heldout=0.2,
        chat=True,
    )
    return prepare(options).store


def write_conversations(path: Path, count: int) -> Path:
    """A file of conversations."""
    path.write_text("".join(json.dumps({"messages": conversation(i)}) + "\n" for i in range(count)), encoding="utf-8")
    return path
