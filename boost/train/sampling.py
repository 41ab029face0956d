"""Options for choosing the next token. Does not import torch, so that errors appear immediately."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from boost.errors import ConfigError

MIN_TEMPERATURE = 1e-4
"""At lower temperatures, logits overflow, and sampling is greedy anyway."""
MAX_TEMPERATURE = 1e18
"""At higher temperatures, an integer overflows, and sampling is uniform anyway."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. A temperature of 0 means greedy sampling; top_k = 0 and top_p = 1 turn these filters off."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    @classmethod
    def of(
        cls, settings: Mapping[str, Any], temperature: float | None, top_k: int | None, top_p: float | None, seed: int
    ) -> "Sampling":
        """The given parameters; for None, those of `settings`, a generation_config.json, if it samples, or else the usual ones."""
        values: dict[str, Any] = {"temperature": 0.8, "top_k": 0, "top_p": 0.95}
        if settings.get("do_sample") is True:
            # What transformers takes where a value is null or missing.
            for name, usual in (("temperature", 1.0), ("top_k", 50), ("top_p", 1.0)):
                values[name] = usual if settings.get(name) is None else settings[name]
        given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        for name in [name for name, value in given.items() if value is None and settings.get(name) is not None]:
            try:
                cls(**{name: values[name]}).check()
            except (ConfigError, TypeError):
                raise ConfigError(
                    f"{name} = {values[name]!r} in the imported generation_config.json is not valid; pass another value"
                ) from None
        return cls(**values | {name: value for name, value in given.items() if value is not None}, seed=seed)

    def check(self) -> None:
        """Raises ConfigError if a parameter is invalid. The error names the field, its value and a valid value."""
        if not (self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE):
            raise ConfigError(
                f"--temperature = {self.temperature} must be 0 (greedy) or at least {MIN_TEMPERATURE}, up to {MAX_TEMPERATURE:g}; "
                "the usual value is 0.8"
            )
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed = {self.seed} must be between 0 and {2**63 - 1}; the usual value is 0")
        if type(self.top_k) is not int or not 0 <= self.top_k < 2**63:
            raise ConfigError(f"--top-k = {self.top_k} must be 0 (off) or more; nearest valid value: 0")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p = {self.top_p} must be in (0, 1]; nearest valid value: 1.0 (off)")


def beyond_context(tokens: int, context: int) -> str:
    """Returns a warning if a prompt and its continuation (`tokens` tokens in total) exceed the context; else ''."""
    if tokens <= context:
        return ""
    return f"the text has up to {tokens} tokens, but the model's context length is {context}; text beyond that may be meaningless"
