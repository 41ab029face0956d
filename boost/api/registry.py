"""`register_family`: families of linears from other packages. `register_layout` is in `boost.config.layouts`."""

from typing import TypeVar, cast, get_args

from boost.config.families import ModelConfig
from boost.errors import ConfigError

Family = TypeVar("Family", bound=type[ModelConfig])


def register_family(family: Family) -> Family:
    """Makes a family known to configurations, `boost.nn` and the planner. Usable as a class decorator.

    A family is a subclass of `ModelConfig` (or `LowRankConfig`, `SVDConfig`, ...) whose field `family` is a `Literal` of its name:

        @boost.register_family
        class WideCoLA(CoLAConfig):
            family: Literal["wide-cola"] = "wide-cola"
            rank: Width = 256

    Raises ConfigError if the class has no name of its own.
    """
    values = get_args(cast(type[ModelConfig], family).model_fields["family"].annotation)
    if len(values) != 1 or ModelConfig.choices.get(values[0]) is not family:
        raise ConfigError(
            f"{family.__name__} does not name a family of its own; add a field such as family: Literal['my-family'] = 'my-family'"
        )
    return family
