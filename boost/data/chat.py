"""Chat templates: a tokenizer's Jinja template, which formats messages in the form that a model was fine-tuned on."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from boost.errors import ConfigError, DataError

Message = dict[str, str]
"""`{"role": "user" | "assistant" | "system", "content": text}`."""


def load_chat_template(folder: Path) -> Callable[[list[Message]], str] | None:
    """Returns a function that formats messages as the prompt for the assistant's answer; None if `folder` has no template.

    `folder` holds a tokenizer.json and the template in a location that transformers supports: chat_template.jinja,
    additional_chat_templates/, or tokenizer_config.json. transformers renders the template in a sandbox. Raises ConfigError if
    transformers is not installed, and DataError if it cannot read the files. The function raises DataError if the template rejects
    the messages.
    """
    tokenizer = _load(folder)
    if not tokenizer.chat_template:
        return None

    def render(messages: list[Message]) -> str:
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except _template_errors() as error:
            raise DataError(
                f"the chat template of '{folder}' rejects these messages: {error}; fix the template"
            ) from None

    return render


def _load(folder: Path) -> Any:
    """The transformers tokenizer in a folder."""
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError:
        raise ConfigError("--chat needs transformers; install it with: pip install transformers") from None
    try:
        return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the Rust side raises a plain Exception for anything it cannot parse
        raise DataError(f"transformers cannot read the tokenizer in '{folder}': {error}") from None


def _template_errors() -> tuple[type[Exception], ...]:
    from jinja2 import TemplateError

    return TemplateError, ArithmeticError, LookupError, TypeError, ValueError


class Rejected(Exception):
    """Why the template cannot format a conversation for training."""


@dataclass(frozen=True)
class Encoded:
    """A formatted conversation: token `ids` [n], and `mask` [n], True for tokens that count toward the loss."""

    ids: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    text: str


_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Matches the marker at the start of the assistant's part in a template."""


class ChatTemplate:
    """Formats conversations for training so that only the assistant's text counts toward the loss.

    {% generation %} markers in a template delimit this text. Without markers, it is what each assistant message adds to the prompt
    before it: the conversation up to and including the message, minus the prompt from which the message would be generated.
    """

    def __init__(self, folder: Path) -> None:
        """`folder`: see `load_chat_template`. Raises ConfigError; raises DataError also if the folder has no template."""
        self._tokenizer = _load(folder)
        if not self._tokenizer.chat_template:
            raise DataError(
                f"--tokenizer {folder} has no chat template; add a chat_template.jinja file, or use a chat model's tokenizer"
            )
        self.template: str = self._tokenizer.get_chat_template()
        self.has_markers = _GENERATION.search(self.template) is not None
        self.straddling = 0
        """Number of answers so far that begin within a token: the model sees a different token there when it generates."""
        self.endless = 0
        """Number of answers so far whose end-of-turn token does not count toward the loss: the model does not learn to stop."""
        self._special = set(self._tokenizer.all_special_ids)
        self._names = set(re.findall(r"\w+", self.template))
        parameters = inspect.signature(self._tokenizer.apply_chat_template).parameters
        self._reserved = {"messages", *parameters} - {"tools", "documents"}

    @property
    def special_tokens(self) -> dict[str, str]:
        """The special tokens that the template may use, by role (such as eos_token)."""
        return {
            role: str(token) for role, token in self._tokenizer.special_tokens_map.items() if isinstance(token, str)
        }

    def unused(self, messages: Sequence[dict[str, Any]], fields: Mapping[str, Any]) -> Iterator[str]:
        """Describes the parts of a conversation that the template does not use."""
        for name in fields:
            if name not in self._names or name in self._reserved:
                yield f"with {name!r}, which the chat template does not use"
        for name in {name: None for message in messages for name in message}:
            if name not in self._names and name != "weight":
                yield f"with {name!r} in a message, which the chat template does not use"

    def encode(self, messages: Sequence[dict[str, Any]], fields: Mapping[str, Any] | None = None) -> list[Encoded]:
        """Returns the conversation as one document. If the template formats a message differently once other messages follow it
        (for example, drops its reasoning), returns one document per assistant message, in which only that message counts.

        A message with `weight` 0 does not count. `fields`: additional template variables, such as `tools`. Raises Rejected.
        """
        counts = [message.get("weight") != 0 for message in messages if message["role"] == "assistant"]
        messages = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
        variables = {name: value for name, value in (fields or {}).items() if name not in self._reserved}
        try:
            if self.has_markers:
                documents = [self._by_markers(messages, counts, variables)]
            else:
                documents = self._by_prefixes(messages, counts, variables)
        except _template_errors() as error:
            raise Rejected(f"rejected by the chat template: {error}".splitlines()[0]) from None
        for document in documents:
            document.mask[:1] = False  # nothing precedes the first token
            if not document.mask.any():
                raise Rejected("without a token that counts toward the loss")
        return documents

    def _by_markers(
        self, messages: Sequence[dict[str, Any]], counts: Sequence[bool], variables: dict[str, Any]
    ) -> Encoded:
        encoded = self._tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **variables
        )
        ids = np.array(encoded["input_ids"], dtype=np.int64)
        mask = np.array(encoded["assistant_masks"], dtype=np.bool_)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]))).reshape(-1, 2)
        if not all(counts):
            if len(edges) != len(counts):
                raise Rejected(
                    "with answers of weight 0, but without exactly one {% generation %} block of the template per answer"
                )
            for (start, end), is_counted in zip(edges, counts, strict=True):
                mask[start:end] &= is_counted
        self.endless += sum(
            bool(mask[start])
            and end < len(ids)
            and int(ids[end]) in self._special
            and int(ids[end - 1]) not in self._special
            for start, end in edges
        )
        return Encoded(ids, mask, self._render(messages, variables))

    def _by_prefixes(
        self, messages: Sequence[dict[str, Any]], counts: Sequence[bool], variables: dict[str, Any]
    ) -> list[Encoded]:
        whole, spans, stable = self._render(messages, variables), list[tuple[str, int]](), True
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for i, is_counted in zip(answers, counts, strict=True):
            if not is_counted:
                continue
            answered = self._render(messages[: i + 1], variables)
            spans.append((answered, self._start(messages[:i], answered, variables)))
            stable = stable and whole.startswith(answered)
        if stable:
            return [self._tokenized(whole, [(start, len(answered)) for answered, start in spans])]
        return [self._tokenized(answered, [(start, len(answered))]) for answered, start in spans]

    def _start(self, before: Sequence[dict[str, Any]], answered: str, variables: dict[str, Any]) -> int:
        """Where the answer to the messages `before` starts in the formatted text. Raises Rejected."""
        if before:
            prompt = self._render(before, variables, prompt=True)
            if answered.startswith(prompt):
                return len(prompt)
        else:  # no earlier message: most templates cannot format an empty conversation, so use the header after another message
            other = [{"role": "user", "content": "a"}]
            header = self._render(other, variables, prompt=True).removeprefix(self._render(other, variables))
            if header and header in answered:
                return answered.index(header) + len(header)
        raise Rejected("with a chat-template prompt that is not a prefix of the formatted conversation")

    def _render(self, messages: Sequence[dict[str, Any]], variables: dict[str, Any], prompt: bool = False) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=prompt, **variables
            )
        )

    def _tokenized(self, text: str, spans: Sequence[tuple[int, int]]) -> Encoded:
        """Tokenizes the text; a token counts toward the loss if it begins in one of the character spans."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        mask = np.zeros(len(offsets), dtype=np.bool_)
        for start, end in spans:
            mask |= (offsets[:, 0] >= start) & (offsets[:, 0] < end)
            self.straddling += bool(((offsets[:, 0] < start) & (offsets[:, 1] > start)).any())
        return Encoded(np.array(encoded["input_ids"], dtype=np.int64), mask, text)

    def text_of(self, ids: npt.NDArray[np.int64]) -> str:
        """The text of these tokens, including special tokens."""
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))
