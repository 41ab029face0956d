"""Chat templates: a tokenizer's Jinja template, which formats messages in the form that a model was fine-tuned on."""

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from boost.data.tokenizer import PlainText, by_transformers
from boost.errors import ConfigError, DataError
from boost.text import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Prompter = Callable[[Sequence[JsonObject], JsonObject], tuple[str, list[str]]]
"""Formats messages, with other variables of the template, as the prompt for the assistant's answer. Also returns notes on what the
template does not use of the messages."""


def load_chat_template(folder: Path) -> Prompter | None:
    """Returns the `Prompter` of a folder; None if `folder` has no template.

    `folder` holds a tokenizer.json and the template in a location that transformers supports: chat_template.jinja,
    additional_chat_templates/, or tokenizer_config.json. transformers renders the template in a sandbox. Raises ConfigError if
    transformers is not installed, and DataError if it cannot read the files. The function raises DataError if the template rejects
    the messages or does not use a variable.
    """
    tokenizer = _load(folder)
    if not tokenizer.chat_template:
        return None

    template = ChatTemplate(folder, tokenizer)
    errors: tuple[type[Exception], ...] = (*_template_errors(), Rejected)

    def prompt(messages: Sequence[JsonObject], variables: JsonObject) -> tuple[str, list[str]]:
        try:
            if unused := template.unused_variables(variables):
                raise DataError(
                    f"the chat template does not use {unused[0]!r}, or boost sets it; remove it from the prompt"
                )
            adapted, notes = template.adapted(messages, variables)
            notes += template.unused_keys(adapted, variables)
            return template.render(adapted, variables, prompt=True), notes
        except errors as error:
            raise DataError(
                f"the chat template rejects these messages: {error}; fix the messages or the template"
            ) from None

    return prompt


def _load(folder: Path) -> "PreTrainedTokenizerFast":
    """The transformers tokenizer in a folder."""
    try:
        return by_transformers(folder)
    except ImportError:
        raise ConfigError("--chat needs transformers; install it with: pip install transformers") from None


def _template_errors() -> tuple[type[Exception], ...]:
    from jinja2 import TemplateError

    return TemplateError, ArithmeticError, LookupError, TypeError, ValueError


@lru_cache(maxsize=8)
def _names(template: str) -> set[str]:
    """Every word in a template, and so the name of every variable and field that it may use."""
    return set(re.findall(r"\w+", template))


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
_PROBE = {"boost_probe": "value"}
_PROBE_JSON = re.compile(r'\{\s*"boost_probe"\s*:\s*"value"\s*\}')
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of the parts of a content list that are text."""


def joined(content: object) -> object:
    """The text in a list of parts; text unchanged."""
    if not isinstance(content, list):
        return content
    return "".join(part["text"] for part in content if part.get("type", "text") in TEXT_PARTS)


def _called(call: JsonObject, change: Callable[[object], object]) -> JsonObject:
    """A tool call with changed arguments."""
    function = call.get("function", call)
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    function = {**function, "arguments": change(function["arguments"])}
    return {**call, "function": function} if "function" in call else function


def _in_form(value: object, forms: tuple[str, ...]) -> object:
    """The arguments of a tool call, as text or as an object. Raises Rejected if they are not JSON."""
    content = value
    if isinstance(value, str):
        try:
            content = json.loads(value) if value.strip() else {}
        except (ValueError, RecursionError):
            raise Rejected("with tool-call arguments that are not JSON") from None
    form = "text" if isinstance(value, str) else "an object"
    if form in forms and value != "":
        return value
    return content if "an object" in forms else json.dumps(content, ensure_ascii=False)


class ChatTemplate:
    """Formats conversations for training so that only the assistant's text counts toward the loss.

    {% generation %} markers in a template delimit this text. Without markers, it is what each assistant message adds to the prompt
    before it: the conversation up to and including the message, minus the prompt from which the message would be generated.
    """

    def __init__(self, folder: Path, tokenizer: "PreTrainedTokenizerFast | None" = None) -> None:
        """`folder`: see `load_chat_template`; `tokenizer`: the folder's, if it is loaded. Raises ConfigError; raises DataError also
        if the folder has no template."""
        self._tokenizer = tokenizer or _load(folder)
        if not self._tokenizer.chat_template:
            raise DataError(
                f"--tokenizer {folder} has no chat template; add a chat_template.jinja file, or use a chat model's tokenizer"
            )
        templates = self._tokenizer.chat_template
        self._templates: dict[str, str] = templates if isinstance(templates, dict) else {"default": templates}
        self.template: str = self._templates.get("default") or "\n".join(self._templates.values())
        self.has_markers = _GENERATION.search(self.template) is not None
        self.straddling = 0
        """Number of answers so far that begin within a token: the model sees a different token there when it generates."""
        self.endless = 0
        """Number of answers so far that do not end with an end-of-turn token that counts: the model does not learn to stop."""
        self._ends = {*self._tokenizer.all_special_ids, *self._tokenizer.added_tokens_decoder}
        self._plain = PlainText(self._tokenizer.backend_tokenizer)
        self._content_forms: dict[tuple[str, str], tuple[str, ...]] = {}
        """Forms of content by (template, role): see `_reads`."""
        self._null: dict[str, bool] = {}
        """Whether a template reads null as content: see `_reads_null`."""
        self._forms: dict[str, tuple[str, ...]] = {}
        """Forms of tool-call arguments by template: see `_reads_arguments`."""
        parameters = inspect.signature(self._tokenizer.apply_chat_template).parameters
        self._reserved = {"messages", *parameters} - {"tools", "documents"}

    @property
    def special_tokens(self) -> dict[str, str]:
        """The special tokens that the template may use, by role (such as eos_token)."""
        return {
            role: str(token) for role, token in self._tokenizer.special_tokens_map.items() if isinstance(token, str)
        }

    def unused(self, messages: Sequence[JsonObject], fields: Mapping[str, object]) -> Iterator[str]:
        """Describes the parts of a conversation that the template does not use, or not in this form."""
        variables = {name: value for name, value in fields.items() if name not in self._reserved}
        messages, notes = self.adapted(messages, variables)
        yield from notes
        if "strftime_now" in _names(self._source(variables)) and "date_string" not in fields:
            yield "in which the chat template may write today's date"
        for name in self.unused_variables(fields):
            yield f"with {name!r}, which the chat template does not use"
        yield from self.unused_keys(messages, variables)

    def unused_keys(self, messages: Sequence[JsonObject], variables: JsonObject) -> Iterator[str]:
        """Describes the keys of adapted messages that the template does not use."""
        names = _names(self._source(variables))
        for name in {name: None for message in messages for name in message}:
            if name in names or name == "weight":
                continue
            without = [{key: value for key, value in message.items() if key != name} for message in messages]
            # transformers may give a field to the template under another name.
            if self._probed(without, variables) == self._probed(messages, variables):
                yield f"with {name!r} in a message, which the chat template does not use"

    def unused_variables(self, fields: Mapping[str, object]) -> list[str]:
        """The names of variables that the template does not use."""
        used = _names(self._source(dict(fields))) - self._reserved
        return [name for name in fields if name not in used]

    def encode(self, messages: Sequence[JsonObject], fields: Mapping[str, object] | None = None) -> list[Encoded]:
        """Returns the conversation as one document. If the template formats a message differently once other messages follow it
        (for example, drops its reasoning), returns one document per assistant message, in which only that message counts.

        A message with `weight` 0 does not count. `fields`: additional template variables, such as `tools`. Raises Rejected.
        """
        counts = [message.get("weight") != 0 for message in messages if message["role"] == "assistant"]
        messages = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
        variables = {name: value for name, value in (fields or {}).items() if name not in self._reserved}
        try:
            messages, source = self.adapted(messages, variables)[0], self._source(variables)
            for message in messages:
                if message["role"] == "assistant" and not message["content"]:
                    if not message.get("tool_calls"):
                        raise Rejected("with an empty answer")
                    if "tool_calls" not in source:
                        raise Rejected("with a tool call as the answer, which the chat template does not use")
            if _GENERATION.search(source):
                documents = [self._by_markers(messages, counts, variables)]
            else:
                documents = self._by_prefixes(messages, counts, variables)
        except _template_errors() as error:
            raise Rejected(f"rejected by the chat template: {error}".splitlines()[0]) from None
        for document in documents:
            # After such a character, offsets, and with them masks, are wrong (tokenizers 0.23).
            if self._plain.dropped(document.ids, document.text):
                raise Rejected("with characters that the tokenizer has no token for")
            document.mask[:1] = False  # nothing precedes the first token
            if not document.mask.any():
                raise Rejected("without a token that counts toward the loss")
            for end in np.flatnonzero(document.mask & ~np.append(document.mask[1:], False)):
                # Templates write white space after the end of a turn.
                last = next((i for i in document.ids[end::-1] if self.text_of(i[None]).strip()), None)
                self.endless += last not in self._ends
        return documents

    def _source(self, variables: JsonObject) -> str:
        """The template for a conversation: transformers may choose another one for a conversation with tools."""
        return str(self._tokenizer.get_chat_template(tools=variables.get("tools")))

    def with_text_read(
        self, messages: Sequence[JsonObject], variables: JsonObject
    ) -> tuple[list[JsonObject], dict[str, None]]:
        """The messages, with text as a list of parts where the template needs that, and notes."""
        source, adapted, notes = self._source(variables), [dict(message) for message in messages], dict[str, None]()
        for message in adapted:
            text, role = message["content"], message["role"]
            if not isinstance(text, str) or not text.strip():
                continue
            forms = self._reads(source, role, messages, variables)
            if "text" in forms:
                continue
            if "parts" in forms:
                notes["with text as content, passed to the chat template as parts, because it needs that"] = None
                message["content"] = [{"type": "text", "text": text}]
            elif text.strip() not in self._probed(messages, variables):
                notes[f"with a message of role {role!r}, which the chat template does not use"] = None
        return adapted, notes

    def adapted(self, messages: Sequence[JsonObject], variables: JsonObject) -> tuple[list[JsonObject], list[str]]:
        """The messages in the form that the template reads, and notes on what was changed. Raises Rejected."""
        source, (adapted, notes) = self._source(variables), self.with_text_read(messages, variables)
        if any(message["content"] is None for message in adapted) and not self._reads_null(source, adapted, variables):
            notes["with null as content, passed to the chat template as empty text, because it needs that"] = None
            adapted = [m | {"content": ""} if m["content"] is None else m for m in adapted]
        for message in adapted:
            parts = message["content"]
            if isinstance(parts, list) and "parts" not in self._reads(source, message["role"], messages, variables):
                kinds = {part.get("type", "text"): None for part in parts if part.get("type", "text") not in TEXT_PARTS}
                notes |= {
                    f"with content of type {kind!r}, which the chat template does not read": None for kind in kinds
                }
                message["content"] = joined(parts)
            if calls := message.get("tool_calls"):
                forms = self._reads_arguments(source, adapted, variables)
                message["tool_calls"] = [_called(call, partial(_in_form, forms=forms)) for call in calls]
                if message["tool_calls"] != calls:
                    (form,) = forms
                    notes[f"with tool-call arguments passed to the chat template as {form}, because it needs that"] = (
                        None
                    )
        return adapted, list(notes)

    def _reads(self, source: str, role: str, messages: Sequence[JsonObject], variables: JsonObject) -> tuple[str, ...]:
        """The forms of content, "text" and "parts", that the template reads of this role, whichever form it needs of others."""
        if (source, role) not in self._content_forms:
            part, read = {"type": "text", "text": "boost_probe"}, list[str]()
            texts = [joined(message["content"]) or "" for message in messages]
            others = texts, [[{"type": "text", "text": text}] for text in texts]
            is_rejected = True
            for form, content in (("text", "boost_probe"), ("parts", [part])):
                for other in others:
                    probe = [
                        m | {"content": content if m["role"] == role else x}
                        for m, x in zip(messages, other, strict=True)
                    ]
                    text = self._probed(probe, variables)
                    is_rejected &= not text
                    if "boost_probe" in text and not any(written in text for written in (str(part), json.dumps(part))):
                        read.append(form)
            if not read:  # rejected for another reason, or not shown in this conversation
                return ("text",) if is_rejected else ()
            self._content_forms[source, role] = tuple(read)
        return self._content_forms[source, role]

    def _reads_null(self, source: str, messages: Sequence[JsonObject], variables: JsonObject) -> bool:
        """Whether the template reads null as no content, rather than as the word None."""
        if source not in self._null:
            empty, null = (
                self._probed(
                    [m | {"content": text if m["content"] is None else joined(m["content"])} for m in messages],
                    variables,
                )
                for text in ("", None)
            )
            self._null[source] = bool(null) and null.count("None") <= empty.count("None")
        return self._null[source]

    def _reads_arguments(self, source: str, messages: Sequence[JsonObject], variables: JsonObject) -> tuple[str, ...]:
        """The forms of tool-call arguments of which the template makes JSON: an object for `tojson`, text for concatenation. If it
        makes JSON of neither, it writes the values of an object in its own format."""
        if source not in self._forms:
            texts = {}
            probes: dict[str, Callable[[object], object]] = {
                "an object": lambda _: _PROBE,
                "text": lambda _: json.dumps(_PROBE),
            }
            for form, change in probes.items():
                probe = [
                    m | ({"tool_calls": [_called(c, change) for c in m["tool_calls"]]} if m.get("tool_calls") else {})
                    for m in messages
                ]
                probe = [m | {"content": joined(m["content"])} if isinstance(m["content"], list) else m for m in probe]
                texts[form] = self._probed(probe, variables)
            forms = tuple(form for form, text in texts.items() if _PROBE_JSON.search(text))
            own_format = "boost_probe" in texts["an object"] and str(_PROBE) not in texts["an object"]
            self._forms[source] = forms or (("an object",) if own_format else tuple(texts))
        return self._forms[source]

    def _probed(self, messages: Sequence[JsonObject], variables: JsonObject) -> str:
        try:
            return self.render(messages, variables)
        except _template_errors():
            return ""

    def _by_markers(self, messages: Sequence[JsonObject], counts: Sequence[bool], variables: JsonObject) -> Encoded:
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
        return Encoded(ids, mask, self.render(messages, variables))

    def _by_prefixes(
        self, messages: Sequence[JsonObject], counts: Sequence[bool], variables: JsonObject
    ) -> list[Encoded]:
        whole, spans, stable = self.render(messages, variables), list[tuple[str, int]](), True
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for i, is_counted in zip(answers, counts, strict=True):
            if not is_counted:
                continue
            answered = self.render(messages[: i + 1], variables)
            spans.append((answered, self._start(messages[:i], answered, variables)))
            stable = stable and whole.startswith(answered)
        if stable:
            return [self._tokenized(whole, [(start, len(answered)) for answered, start in spans])]
        return [self._tokenized(answered, [(start, len(answered))]) for answered, start in spans]

    def _start(self, before: Sequence[JsonObject], answered: str, variables: JsonObject) -> int:
        """Where the answer to the messages `before` starts in the formatted text. Raises Rejected."""
        if before:
            prompt = self.render(before, variables, prompt=True)
            if answered.startswith(prompt):
                return len(prompt)
        else:  # no earlier message: most templates cannot format an empty conversation, so use the header after another message
            other = [{"role": "user", "content": "a"}]
            header = self.render(other, variables, prompt=True).removeprefix(self.render(other, variables))
            if header and header in answered:
                return answered.index(header) + len(header)
        raise Rejected("with a chat-template prompt that is not a prefix of the formatted conversation")

    def render(self, messages: Sequence[JsonObject], variables: JsonObject, prompt: bool = False) -> str:
        """The text of these messages; `prompt`: and what precedes the next answer."""
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
