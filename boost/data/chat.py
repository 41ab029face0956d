"""Chat templates: the Jinja template of a tokenizer, which formats messages as the text that a model was fine-tuned on."""

from collections.abc import Callable
from pathlib import Path

from boost.errors import ConfigError, DataError

Message = dict[str, str]
"""`{"role": "user" | "assistant" | "system", "content": text}`."""


def load_chat_template(folder: Path) -> Callable[[list[Message]], str] | None:
    """Returns a function that formats messages as the prompt for the assistant's answer; None if `folder` has no template.

    `folder` holds a tokenizer.json and the template in a location that transformers supports: chat_template.jinja,
    additional_chat_templates/, or tokenizer_config.json. transformers renders the template in a sandbox. Raises ConfigError if
    transformers is not installed, DataError if it cannot read the files. The function raises DataError if the template rejects
    the messages.
    """
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError:
        raise ConfigError("--chat needs transformers; install it with: pip install 'boost-llm[hf]'") from None
    from jinja2 import TemplateError

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the Rust side raises a plain Exception for anything it cannot parse
        raise DataError(f"transformers cannot read the tokenizer in '{folder}': {error}") from None
    if not tokenizer.chat_template:
        return None

    def render(messages: list[Message]) -> str:
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise DataError(
                f"the chat template of '{folder}' rejects these messages: {error}; fix the template"
            ) from None

    return render
