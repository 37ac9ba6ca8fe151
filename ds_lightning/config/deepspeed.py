"""Reads a ds_config into the schema: aliases, legacy forms, types, one report entry per key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ds_lightning.config import checks, support
from ds_lightning.config.coerce import coerce, shown
from ds_lightning.config.free import NULL, Entry, FreeArguments, is_auto
from ds_lightning.config.precision import AskedPrecision, asked_precision
from ds_lightning.config.problems import Problem, raise_all
from ds_lightning.config.schema import DeepSpeedConfig
from ds_lightning.config.schema.base import (
    Block,
    Key,
    block_type,
    hints,
    is_table,
    renames,
    rules,
    unwrapped,
)
from ds_lightning.config.source import read
from ds_lightning.config.unknown import why_unknown

_LEGACY_ALLGATHER_SIZE = 500_000_000


@dataclass(frozen=True)
class ParsedConfig:
    """A configuration that was read, before anything is known about the run.

    Attributes:
        config: The schema; keys that are "auto" hold their defaults.
        given: Dotted canonical keys the user set to a value; blocks that are present are listed
            too.
        autos: Dotted canonical keys the user set to "auto".
        report: One entry per given key.
        unsupported: (dotted key, message) for what would switch on a feature that is not built yet.
        source: Where it was read, for messages.
        is_absent: There was no configuration at all.
    """

    config: DeepSpeedConfig
    given: frozenset[str] = frozenset()
    autos: frozenset[str] = frozenset()
    report: tuple[Entry, ...] = ()
    unsupported: list[tuple[str, str]] = field(default_factory=list)
    source: str = "no configuration"
    is_absent: bool = False

    @property
    def stage(self) -> int | None:
        """The stage asked for; None when that is left to `ZeroStrategy(stage=...)`."""
        return self.config.zero_optimization.stage if "zero_optimization.stage" in self.given else None

    def precision(self) -> str | None:
        """The Lightning precision asked for; None when that is left to the Trainer."""
        asked = self.asked_precision()
        return None if asked is None else asked.name

    def asked_precision(self) -> AskedPrecision | None:
        """The same with the block that asks for it."""
        return asked_precision(self.config)


class Draft(NamedTuple):
    """A reading with its mistakes, for those who want to show all of it instead of raising."""

    parsed: ParsedConfig
    problems: list[Problem]


def load(source: Any = None) -> ParsedConfig:
    """Read and validate a configuration.

    Args:
        source: None, a dict (not changed), a path to JSON or HJSON, an OmegaConf config, a
            `DeepSpeedConfig`, or the
            URL-safe base64 of a JSON document.

    Raises:
        ConfigError: All mistakes at once, each with its dotted key.
    """
    if isinstance(source, ParsedConfig):
        return source
    parsed, problems = draft(source)
    raise_all(problems, parsed.source)
    return parsed


def draft(source: Any = None) -> Draft:
    """Read a configuration and collect its mistakes instead of raising them."""
    origin = read(source)
    reader = _Reader()
    config = reader.root(origin.data)
    given, autos = frozenset(reader.given), frozenset(reader.autos)
    problems = [*reader.problems, *checks.check(config, given)]
    parsed = ParsedConfig(
        config=config,
        given=given,
        autos=autos,
        report=tuple(reader.entries),
        unsupported=support.unsupported(config),
        source=origin.name,
        is_absent=origin.is_absent,
    )
    return Draft(parsed, problems)


class _Item(NamedTuple):
    """One key of an object by canonical name; `written` is the value before conversion."""

    raw: str
    name: str
    value: Any
    written: Any


class _Reader(FreeArguments):
    """Walks a plain dict along the schema."""

    def root(self, data: Mapping[str, Any]) -> DeepSpeedConfig:
        data, legacy = _without_legacy_zero(data)
        config = self._block(DeepSpeedConfig, data, "", Key())
        if legacy is not None:
            self._drop_entries_below("zero_optimization")
            remark = f"read as {data['zero_optimization']}"
            self._note("zero_optimization", legacy, "renamed", remark)
        assert isinstance(config, DeepSpeedConfig)
        return config

    def _block(self, cls: type[Block], data: Mapping[str, Any], prefix: str, parent: Key) -> Block:
        values: dict[str, Any] = {}
        for item in self._items(cls, data, prefix):
            rule = _inherited(rules(cls)[item.name], parent)
            path, raw_path = prefix + item.name, prefix + item.raw
            mark = len(self.entries)
            try:
                self._key(cls, item, path, rule, values, data)
            except ValueError as error:
                self._fail(raw_path, item.value, str(error))
            if item.raw != item.name:
                self._rename_entries(mark, raw_path, path, item)
        return cls(**values)

    def _items(self, cls: type[Block], data: Mapping[str, Any], prefix: str) -> Iterator[_Item]:
        """The known, present keys by canonical name; the others are noted on the way."""
        canonical_by_raw: dict[str, str] = {}
        for raw, value in data.items():
            name = raw if raw in rules(cls) else renames(cls).get(raw)
            if name is None:
                self._fail(prefix + raw, value, why_unknown(cls, raw, prefix))
            elif value is None:
                self._note(prefix + raw, None, "used", NULL, name=prefix + name)
            elif first := canonical_by_raw.get(name):
                twin, keep = f"'{prefix}{first}'", f"'{prefix}{name}'"
                text = f"means the same as {twin}, which is given too; keep {keep} only"
                self._fail(prefix + raw, value, text)
            else:
                canonical_by_raw[name] = raw
                convert = rules(cls)[name].renamed.get(raw)
                yield from self._converted(_Item(raw, name, value, value), convert, prefix)

    def _converted(self, item: _Item, convert: Callable[[Any], Any] | None, prefix: str) -> Iterator[_Item]:
        """The item with the value of an old name turned into that of the new one."""
        if convert is None:
            yield item
            return
        try:
            value = convert(item.value)
        except ValueError as error:
            self._fail(prefix + item.raw, item.value, f"{error}, got {shown(item.value)}")
            return
        if value is None:
            self._note(prefix + item.raw, item.value, "renamed", f"off; now '{prefix}{item.name}'")
        else:
            yield item._replace(value=value)

    def _key(
        self,
        cls: type[Block],
        item: _Item,
        path: str,
        rule: Key,
        values: dict[str, Any],
        siblings: Mapping[str, Any],
    ) -> None:
        child = block_type(cls, item.name)
        hint = unwrapped(hints(cls)[item.name])
        if child is not None:
            self.given.add(path)
            values[item.name] = self._child(child, item.value, path, rule, is_table(cls, item.name))
        elif rule.status == "ignored":
            self.given.add(path)
            values[item.name] = coerce(item.value, hint).value
            self._note(path, item.value, "ignored", rule.remark)
        elif rule.selectors is not None:
            self.given.add(path)
            values[item.name] = self.rows_of_params(item.value, path, rule, _kind(cls, siblings))
        elif rule.params is not None:
            self.given.add(path)
            values[item.name] = self.params(item.value, path, rule, _kind(cls, siblings))
        elif is_auto(item.value):
            self.autos.add(path)
            self._note(path, item.value, "auto")
        else:
            result = coerce(item.value, hint, rule.limits)
            values[item.name] = result.value
            self.given.add(path)
            remark = "; ".join(text for text in (result.remark, rule.remark) if text)
            self._note(path, item.value, rule.status, remark)

    def _child(self, child: type[Block], value: Any, path: str, rule: Key, table: bool) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError(f"expected an object, got {shown(value)}")
        if not value:
            self._note(path, value, rule.status, "an empty block: all defaults")
        if not table:
            return self._block(child, value, f"{path}.", rule)
        return {name: self._row(child, item, f"{path}.{name}", rule) for name, item in value.items()}

    def _row(self, child: type[Block], value: Any, path: str, rule: Key) -> Block:
        if isinstance(value, Mapping):
            return self._block(child, value, f"{path}.", rule)
        self._fail(path, value, f"expected an object, got {shown(value)}")
        return child()

    def _rename_entries(self, mark: int, raw_path: str, path: str, item: _Item) -> None:
        """Replace what was noted under the new name by what the user wrote under the old one."""
        made, self.entries[mark:] = self.entries[mark:], []
        if item.value is not item.written:
            remark = f"now '{path}': {item.value}"
            self._note(raw_path, item.written, "renamed", remark, name=path)
            made = [entry for entry in made if entry.status == "error"]
        for entry in made:
            key = entry.key
            if key == path or key.startswith(f"{path}."):
                key = raw_path + key.removeprefix(path)
            if entry.status == "error":
                self.entries.append(replace(entry, key=key))
                continue
            status = "renamed" if entry.status in ("used", "inert") else entry.status
            remark = "; ".join(text for text in (f"now '{entry.name}'", entry.remark) if text)
            self.entries.append(replace(entry, key=key, status=status, remark=remark))

    def _drop_entries_below(self, path: str) -> None:
        self.entries = [entry for entry in self.entries if not entry.name.startswith(f"{path}.")]


def _inherited(rule: Key, parent: Key) -> Key:
    """The rule of a key inside a block that is itself inert or ignored."""
    if parent.status == "used" or rule.status != "used":
        return rule
    return replace(rule, status=parent.status, remark=parent.remark)


def _kind(cls: type[Block], siblings: Mapping[str, Any]) -> str | None:
    """The type beside `params` in its canonical spelling, whichever of the two keys comes first."""
    kind = siblings.get("type")
    return rules(cls)["type"].limits.spellings.get(kind.casefold(), kind) if isinstance(kind, str) else None


def _without_legacy_zero(data: Mapping[str, Any]) -> tuple[dict[str, Any], bool | None]:
    """The data with `zero_optimization: true` or `false` written out, and that boolean."""
    switch = data.get("zero_optimization")
    if not isinstance(switch, bool):
        return dict(data), None
    block: dict[str, Any] = {"stage": int(switch)}
    if switch:
        block["allgather_bucket_size"] = data.get("allgather_size") or _LEGACY_ALLGATHER_SIZE
    return {**data, "zero_optimization": block}, switch
