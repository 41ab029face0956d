"""Base classes of configuration tables: `Section`, and `Tagged`, a section in which one key selects the class.

A tagged section is flat in the file: `[optim] name = "muon"` selects `MuonConfig`, whose fields are next to `name` in the same
table. To add a choice, write a subclass, in any package. Importing its module registers it.
"""

import copy
import functools
import inspect
import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer
from pydantic.fields import FieldInfo
from pydantic.functional_validators import AfterValidator, ModelWrapValidatorHandler, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError, PydanticUndefined

from boost.errors import ConfigError
from boost.text import JsonObject

Count = Annotated[int, Field(ge=1, le=2**31)]
Width = Annotated[int, Field(ge=1, le=2**20)]
Natural = Annotated[int, Field(ge=0, le=2**31)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Home = AfterValidator(os.path.expanduser)
"""Expands a leading ~ in a path to the home folder, as a shell does."""
Place = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$"), Home]
Values = Mapping[str, object]
"""Fields of a section, by name."""
UNTRACED = "untraced"
"""Marks a field that changes nothing in a micro-batch's passes through a block, the embedding or the loss on one TP group. The
planner traces those once for all configurations that differ only in such fields."""


class Section(BaseModel):
    """A table in the configuration file. Frozen; unknown keys and wrong types are errors. Sections are hashed by value, once each,
    so that the planner's caches can be keyed by them."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    __slots__ = ("_hash",)  # copies start without a value

    def __hash__(self) -> int:
        try:
            own: int = self._hash  # type: ignore[attr-defined]
        except AttributeError:
            own = hash((type(self), *(_hashable(self.__dict__[name]) for name in type(self).model_fields)))
            object.__setattr__(self, "_hash", own)
        return own


def _hashable(value: object) -> object:
    if isinstance(value, list | tuple):  # a list: in a copy that was not validated
        return tuple(map(_hashable, value))
    return frozenset((key, _hashable(item)) for key, item in value.items()) if isinstance(value, dict) else value


def nearest(value: int, largest: int, legal: Callable[[int], bool]) -> int:
    """The legal integer from 1 to `largest` that is closest to `value`; of two at the same distance, the larger one.

    Some value up to `largest` must be legal. Fields are bounded, so the search is short.
    """
    for distance in range(max(value, largest)):
        for candidate in (value + distance, value - distance):
            if 1 <= candidate <= largest and legal(candidate):
                return candidate
    return 1


PLUGINS = "boost.plugins"
"""Entry-point group of installed packages whose modules define families, optimizers or schedules, or register layouts."""


BUILT_IN = "boost.families"
"""The package of our own families, which register themselves as plugins do. In a message, they stand in its order."""


@functools.cache
def load_plugins() -> None:
    """Imports the modules that installed packages name in the entry-point group `PLUGINS`; their classes register themselves.
    Raises ConfigError if one of them cannot be imported."""
    import_module(BUILT_IN)
    for point in metadata.entry_points(group=PLUGINS):
        try:
            point.load()
        except (Exception, SystemExit) as error:
            package = f" of package {point.dist.name}" if point.dist else ""
            raise ConfigError(
                f"plugin '{point.name}'{package} cannot be imported: {type(error).__name__}: {error}; fix '{point.value}', or "
                "uninstall it"
            ) from error


WholeConfig = Any
"""The whole configuration (`boost.config.schema.Config`), which rules read. It is Any because that module imports this one."""


def resolved(name: str, field: str) -> Any:
    """What a class names as `module:name` in `field`. Raises ConfigError if it cannot be imported."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{field} = '{name}' cannot be imported ({error}); correct it in its class") from None


class Tagged(Section):
    """A section whose tag selects the class (a tagged union).

    A direct subclass is a root: it has the tag and the fields common to all choices. A subclass of the root whose tag is a
    `Literal` of one value is a choice, with its own fields; validating with the root returns an instance of the choice. A field
    of a tagged type is a part: its keys are flat in this section too, and readable as the section's attributes (`optim.schedule` is
    `optim.lr_schedule.schedule`).
    """

    key: ClassVar[str]
    """Dotted key of the tag in the file, such as optim.name."""

    absent: ClassVar[Values] = {}
    """Fields that are readable for every choice, and their values for choices that do not have them."""

    choices: ClassVar[dict[str, Any]] = {}
    """Classes by tag value. A root and all of its subclasses share one dictionary."""

    parts: ClassVar[dict[str, "type[Tagged]"]] = {}
    """Roots of the tagged fields, by field name."""

    def problems(self, config: WholeConfig) -> Iterator[str]:
        """Rules of this choice that the configuration violates, one line each."""
        yield from ()

    @classmethod
    def derived(cls, values: Values) -> dict[str, object]:
        """Defaults that depend on other fields."""
        return {}

    @classmethod
    def tag(cls) -> str:
        """Name of the field that selects the class."""
        return cls.key.rpartition(".")[2]

    @classmethod
    def find(cls, value: object) -> type[Self] | None:
        """The class for a tag value, built in or from an installed package; None if there is none."""
        if not isinstance(value, str):
            return None
        if value not in cls.choices:
            import_module(BUILT_IN)
        if value not in cls.choices:
            load_plugins()
        return cls.choices.get(value)

    @classmethod
    def choice(cls, values: Values) -> type[Self]:
        """The class selected by a table. Raises ValidationError."""
        value = values.get(cls.tag(), cls.model_fields[cls.tag()].default)
        if (selected := cls.find(value)) is None:
            raise _invalid(cls, "literal_error", cls.tag(), value, expected=" or ".join(cls.choices))
        return selected

    @classmethod
    def owners(cls, name: str) -> list[str]:
        """Tag values of the choices that have this field."""
        return [value for value, choice in cls.choices.items() if name in choice.model_fields]

    @classmethod
    def keys(cls) -> Iterator[tuple[str, FieldInfo]]:
        """Every key of this section in a file, including those of all choices, with its documentation."""
        load_plugins()
        names = [*cls.model_fields, *(name for choice in cls.choices.values() for name in choice.model_fields)]
        for name in dict.fromkeys(names):
            if name in cls.parts:
                yield from cls.parts[name].keys()
            elif name == cls.tag():  # documented by the first paragraph of each choice's docstring
                info = copy.copy(cls.model_fields[name])
                info.annotation = Literal[tuple(cls.choices)]  # type: ignore[assignment]
                summaries = ((choice.__doc__ or "").partition("\n\n")[0] for choice in cls.choices.values())
                meanings = [f"{value}: {summary}" for value, summary in zip(cls.choices, summaries, strict=True)]
                info.description = " ".join(filter(None, [info.description, *meanings]))
                yield name, info
            elif name in cls.model_fields:
                yield name, cls.model_fields[name]
            else:  # a field of some choices, with a default if they share one
                owners = cls.owners(name)
                infos = [cls.choices[owner].model_fields[name] for owner in owners]
                info = copy.copy(infos[0])
                info.description = f"Only with {cls.key} = {' | '.join(owners)}. {info.description}"
                if any(other.default != info.default for other in infos):
                    info.default = PydanticUndefined
                yield name, info

    @classmethod
    def switch(cls, table: dict[str, object], changes: Values) -> None:
        """Prepares a table for `changes`. If they select a new choice, removes the fields that it lacks and those in `dropped`."""
        for root in (cls, *cls.parts.values()):
            tag = root.tag()
            former, new = root.find(table.get(tag, root.model_fields[tag].default)), root.find(changes.get(tag))
            if former is None or new is None or former is new:
                continue
            common = former.model_fields.keys() & new.model_fields.keys()
            common -= {tag, *root.dropped(former, new, table, changes)}
            for name in [name for name in table if root.owners(name) and name not in common]:
                del table[name]

    @classmethod
    def dropped(cls, former: type[Self], new: type[Self], table: Values, changes: Values) -> set[str]:
        """Fields of both choices that are removed too, because their values in the table are the previous choice's defaults."""
        return set()

    @classmethod
    def __pydantic_init_subclass__(cls, **_: object) -> None:
        cls.parts = {
            name: info.annotation
            for name, info in cls.model_fields.items()
            if isinstance(info.annotation, type) and issubclass(info.annotation, Tagged)
        }
        if Tagged in cls.__bases__:
            cls.choices = {}
        elif cls.tag() in inspect.get_annotations(cls):
            tag = cls.model_fields[cls.tag()]
            if tag.default is not PydanticUndefined and tag.default not in get_args(tag.annotation):
                raise TypeError(
                    f"{cls.__qualname__}.{cls.tag()} = {tag.default!r} is not one of the values in its annotation, {tag.annotation}"
                )
            for value in get_args(tag.annotation):
                if other := cls.choices.get(value):
                    raise TypeError(
                        f"{cls.key} = '{value}' is already registered to {other.__qualname__}; "
                        f"{cls.__qualname__} needs a different value"
                    )
                cls.choices[value] = cls

    def __new__(cls, *_: object, **values: object) -> Self:
        # OptimConfig(name="muon") is a MuonConfig, like OptimConfig.model_validate({"name": "muon"}).
        return super().__new__(cls if cls in cls.choices.values() else cls.choice(values))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            if name in self.absent:
                return self.absent[name]
            for part in self.parts:
                own = self.__dict__.get(part)
                if own is not None and (name in own.absent or name in type(own).model_fields):
                    return getattr(own, name)
            return super().__getattr__(name)

    def model_copy(self, *, update: Values | None = None, deep: bool = False) -> Self:
        """Like pydantic's, but validates the copy if `update` changes the tag or a key of a part, because these may select other
        classes."""
        own = getattr(self, self.tag())
        if not update or (update.get(self.tag(), own) == own and update.keys() <= type(self).model_fields.keys()):
            return super().model_copy(update=update, deep=deep)
        values = self.model_dump()
        self.switch(values, update)
        root = next(base for base in type(self).__mro__ if Tagged in base.__bases__)
        return root.model_validate(values | dict(update))  # type: ignore[attr-defined]

    @model_validator(mode="wrap")
    @classmethod
    def _select(cls, values: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(values, Tagged) or not isinstance(values, dict):
            return handler(values)
        if cls in cls.choices.values():
            return handler(_own(cls, values))
        return cls.choice(values).model_validate(values)

    @model_serializer(mode="wrap")
    def _flatten(self, handler: SerializerFunctionWrapHandler) -> JsonObject:
        table: JsonObject = handler(self)
        for part in self.parts:
            table |= table.pop(part, {})
        return table


def _own(cls: type[Tagged], values: Values) -> dict[str, object]:
    """This choice's fields from a flat table, with those of its parts nested. Raises ValidationError for keys of other choices."""
    own = dict(values)
    for part, root in cls.parts.items():
        if part in own and not isinstance(own[part], root):
            raise _invalid(cls, "extra_forbidden", part, own[part])
        inner = {name: own.pop(name) for name in values if name in root.model_fields or root.owners(name)}
        own.setdefault(part, inner)
    for name, value in own.items():
        if name not in cls.model_fields and cls.owners(name):
            raise _misplaced(cls, values.get(cls.tag(), cls.model_fields[cls.tag()].default), name, value)
    return cls.derived(own) | own


def _misplaced(cls: type[Tagged], own: object, name: str, value: object) -> ValidationError:
    """The error for a field of another choice: names the owner and both fixes."""
    field, shown = f"{cls.key.partition('.')[0]}.{name}", value
    while isinstance(shown, dict) and shown:  # the first entry of a table, as the user wrote it
        entry, shown = next(iter(shown.items()))
        field += f".{entry}"
    shown_value = str(shown).lower() if isinstance(shown, bool) else repr(shown)
    *others, last = [f"'{owner}'" for owner in cls.owners(name)]
    ways = f"{', '.join(others)} or {last}" if others else last
    message = (
        f"{field} = {shown_value} belongs to {cls.key} = {ways}, not to '{own}'; remove it, or use {cls.key} = {ways}"
    )
    return _invalid(cls, PydanticCustomError("misplaced", "{message}", {"message": message}), name, value)


def _invalid(
    cls: type[Tagged], kind: str | PydanticCustomError, name: str, value: object, **context: object
) -> ValidationError:
    return ValidationError.from_exception_data(
        cls.__name__, [InitErrorDetails(type=kind, loc=(name,), input=value, ctx=context)]
    )
