"""What a block and a key of the schema are: field metadata, generic validation, freezing, paths."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields
from functools import cache
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from ds_lightning.config.coerce import Limits, coerce
from ds_lightning.errors import ConfigError

AUTO = "auto"
ALL_STAGES = frozenset({0, 1, 2, 3})
_T = TypeVar("_T", bound="Block")
_R = TypeVar("_R")


@dataclass(frozen=True)
class Key:
    """What is known about one key beside its type and default.

    Attributes:
        doc: One sentence for users.
        limits: The values that are allowed.
        renamed: Old or alternative names; the function turns the value given there into a value of
            this key.
        stages: ZeRO stages at which the key has an effect.
        status: `used`, `inert` (understood, nothing to do) or `ignored` (outside what this package
            does).
        remark: Why it is inert or ignored, for the report.
        params: For free-form `params`: the names and types allowed there for a given `type`, None
            when unknown.
        selectors: For a list of blocks of such `params`: names and types of what a block has besides.
    """

    doc: str = ""
    limits: Limits = field(default_factory=Limits)
    renamed: Mapping[str, Callable[[Any], Any] | None] = field(default_factory=dict)
    stages: frozenset[int] = ALL_STAGES
    status: str = "used"
    remark: str = ""
    params: Callable[[str | None], Mapping[str, Any] | None] | None = None
    selectors: Mapping[str, Any] | None = None


def key(
    default: Any,
    doc: str,
    *,
    choices: Mapping[str, str] | tuple[str, ...] = (),
    open_choices: bool = False,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    **rest: Any,
) -> Any:
    """A dataclass field carrying a `Key`; a callable default is a factory."""
    spellings = choices if isinstance(choices, Mapping) else {choice.casefold(): choice for choice in choices}
    limits = Limits(spellings, open_choices, at_least, at_most, above)
    metadata = {"key": Key(doc, limits, **rest)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def ignored(doc: str) -> Any:
    """A block of anything that is accepted, reported and left alone."""
    return key(dict, doc, status="ignored", remark="outside the scope of this package")


@dataclass
class Block:
    """One JSON object of a ds_config. Mutable until `frozen()`; scalars are checked when built."""

    def __post_init__(self) -> None:
        """Check and normalise every scalar; "auto" passes."""
        for name, rule in rules(type(self)).items():
            value = getattr(self, name)
            if value is None or value == AUTO or isinstance(value, Block) or block_type(type(self), name):
                continue
            try:
                setattr(self, name, coerce(value, hints(type(self))[name], rule.limits).value)
            except ValueError as error:
                raise ConfigError(f"{type(self).__name__}.{name}: {error}") from error

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute unless the block is frozen."""
        if self.__dict__.get("_is_frozen", False):
            raise FrozenInstanceError(f"cannot assign to '{name}': the resolved configuration is read-only")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Refuse to delete: a block always has all its keys."""
        raise FrozenInstanceError(f"cannot delete '{name}'")

    def frozen(self: _T) -> _T:
        """A deep copy that refuses assignment, at every level of blocks."""
        twin = copy.deepcopy(self)
        twin._freeze()
        return twin

    def _freeze(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            for child in value.values() if isinstance(value, dict) else (value,):
                if isinstance(child, Block):
                    child._freeze()
        self.__dict__["_is_frozen"] = True

    @property
    def is_on(self) -> bool:
        """Whether the block switches its feature on; blocks without an `enabled` key always do."""
        return bool(getattr(self, "enabled", True))

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and scalars, ready for JSON."""
        return {item.name: plain(getattr(self, item.name)) for item in fields(self)}


def plain(value: Any) -> Any:
    """The value with blocks and containers turned into fresh dicts and lists."""
    if isinstance(value, Block):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _per_block(function: Callable[[type[Block]], _R]) -> Callable[[type[Block]], _R]:
    """Compute once per class; the cast is because mypy calls classes of dataclasses unhashable."""
    return cast("Callable[[type[Block]], _R]", cache(function))


@_per_block
def hints(cls: type[Block]) -> dict[str, Any]:
    """The resolved annotations of a block."""
    return get_type_hints(cls)


@_per_block
def rules(cls: type[Block]) -> dict[str, Key]:
    """The keys of a block by canonical name."""
    return {item.name: item.metadata["key"] for item in fields(cls) if "key" in item.metadata}


@_per_block
def renames(cls: type[Block]) -> dict[str, str]:
    """Alternative name -> canonical name."""
    return {old: name for name, rule in rules(cls).items() for old in rule.renamed}


def unwrapped(hint: Any) -> Any:
    """The hint without `| None`."""
    if get_origin(hint) in (Union, types.UnionType):
        rest = [arg for arg in get_args(hint) if arg is not types.NoneType]
        return rest[0] if len(rest) == 1 else hint
    return hint


def block_type(cls: type[Block], name: str) -> type[Block] | None:
    """The type of a nested block, or of the blocks in a table; None for every other key."""
    hint = unwrapped(hints(cls)[name])
    if get_origin(hint) is dict:
        hint = get_args(hint)[1]
    return hint if isinstance(hint, type) and issubclass(hint, Block) else None


def is_table(cls: type[Block], name: str) -> bool:
    """Whether a key holds a dict whose keys are the user's own names."""
    return get_origin(unwrapped(hints(cls)[name])) is dict


def default_of(item: Field[Any]) -> Any:
    """The default of a field, made fresh."""
    return item.default_factory() if item.default_factory is not MISSING else item.default


def walk(cls: type[Block], prefix: str = "") -> Iterator[tuple[str, Key]]:
    """All keys below a block with their dotted paths; tables of named blocks appear as `*`."""
    for name, rule in rules(cls).items():
        path = f"{prefix}{name}"
        yield path, rule
        child = block_type(cls, name)
        if child is not None:
            yield from walk(child, f"{path}.*." if is_table(cls, name) else f"{path}.")


def value_at(block: Block, path: str) -> Any:
    """The value under a dotted path through blocks and dicts; None where the way ends early."""
    value: Any = block
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        if value is None:
            return None
    return value
