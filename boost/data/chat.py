"""Chat templates: the Jinja template that comes with a tokenizer and turns messages into the text that a model was tuned on."""

from collections.abc import Callable
from pathlib import Path

from boost.errors import ConfigError, DataError

Message = dict[str, str]
"""`{"role": "user" | "assistant" | "system", "content": text}`."""


def load_chat_template(folder: Path) -> Callable[[list[Message]], str] | None:
    """A function from messages to the text after which the assistant's answer starts; None if `folder` has no template.

    `folder` holds a tokenizer.json, and the template where transformers keeps it: chat_template.jinja, additional_chat_templates/,
    or tokenizer_config.json. transformers renders it, in a sandbox. Raises ConfigError if transformers is not installed, DataError
    for files that it cannot read; the function raises DataError for messages that the template refuses.
    """
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError:
        raise ConfigError("--chat needs transformers; install it with: pip install 'boost-llm[hf]'") from None
    from jinja2 import TemplateError

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the Rust side raises a plain Exception for anything it cannot parse
        raise DataError(f"the tokenizer of '{folder}' cannot be read by transformers: {error}") from None
    if not tokenizer.chat_template:
        return None

    def render(messages: list[Message]) -> str:
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise DataError(f"the chat template of '{folder}' refuses these messages: {error}; correct it") from None

    return render
