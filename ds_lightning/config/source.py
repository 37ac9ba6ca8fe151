"""Reads a ds_config from wherever the user keeps it, into a fresh plain dict."""

from __future__ import annotations

import base64
import binascii
import copy
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

from ds_lightning.config.schema.base import Block, default_of
from ds_lightning.config.suggest import did_you_mean
from ds_lightning.errors import ConfigError

Pairs = list[tuple[Any, Any]]


@dataclass(frozen=True)
class Source:
    """A configuration as it was given.

    Attributes:
        name: How errors call it: a path, or a word like "the config dict".
        data: A plain copy; nothing of the user's is shared.
        is_absent: There was no configuration at all.
    """

    name: str
    data: dict[str, Any]
    is_absent: bool = False


def read(source: Any) -> Source:
    """Read any accepted kind of source.

    Args:
        source: None, a mapping, a path, the URL-safe base64 of a JSON document, an OmegaConf config
            or a `DeepSpeedConfig`.

    Raises:
        ConfigError: It cannot be found or understood.
    """
    if source is None:
        return Source("no configuration", {}, is_absent=True)
    if isinstance(source, Block):
        return Source(f"the {type(source).__name__} object", changed_values(source))
    if _is_omegaconf(source):
        return Source("the OmegaConf config", _as_object(_from_omegaconf(source), "the OmegaConf config"))
    if isinstance(source, Mapping):
        return Source("the config dict", _as_object(source, "the config dict"))
    if isinstance(source, Path):
        return _read_file(os.fspath(source))
    if isinstance(source, str):
        return _read_text(source)
    raise ConfigError(
        "a configuration can be a dict, a path, the base64 of a JSON document, an OmegaConf config "
        f"or None, got {type(source).__name__}"
    )


def changed_values(block: Block) -> dict[str, Any]:
    """The keys of a block whose values differ from the defaults, as a plain dict."""
    changed: dict[str, Any] = {}
    for item in fields(block):
        value, default = getattr(block, item.name), default_of(item)
        if value == default:
            continue
        changed[item.name] = changed_values(value) if isinstance(value, Block) else _plain(value)
    return changed


def _as_object(value: Any, name: str) -> dict[str, Any]:
    plain = _plain(value)
    if not isinstance(plain, dict):
        kind = {list: "a list", str: "a string", type(None): "null"}.get(type(plain), type(plain).__name__)
        raise ConfigError(f"{name}: a ds_config is one JSON object, got {kind}")
    return plain


def _plain(value: Any) -> Any:
    """A deep copy in dicts, lists and scalars."""
    if isinstance(value, Block):
        return changed_values(value)
    if _is_omegaconf(value):
        return _plain(_from_omegaconf(value))
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise ConfigError(f"the keys of a configuration are strings, got {name!r}")
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return copy.deepcopy(value)


def _is_omegaconf(value: Any) -> bool:
    omegaconf = sys.modules.get("omegaconf")
    return omegaconf is not None and isinstance(value, omegaconf.Container)


def _from_omegaconf(value: Any) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(value, resolve=True, throw_on_missing=True, enum_to_str=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"the OmegaConf config cannot be resolved: {error}") from error


def _read_text(text: str) -> Source:
    path = _expanded(text)
    if len(path) < 4096 and "\0" not in path and os.path.exists(path):
        return _read_file(text)
    document = _from_base64(text)
    if document is None:
        return _read_file(text)
    name = "the base64 configuration"
    return Source(name, _as_object(_parse(document, name), name))


def _from_base64(text: str) -> str | None:
    """The JSON document inside, or None when the text is no base64 of an object."""
    try:
        padded = text + "=" * (-len(text) % 4)
        document = base64.b64decode(padded.encode("ascii"), altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, UnicodeError):
        return None
    return document if document.lstrip().startswith("{") else None


def _expanded(path: str) -> str:
    return os.path.expanduser(os.path.expandvars(path))


def _read_file(given: str) -> Source:
    path = Path(_expanded(given))
    if unset := re.search(r"\$(\w+|\{\w+\})", str(path)):
        raise ConfigError(f"{given}: the environment variable {unset[1].strip('{}')} is not set")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except IsADirectoryError as error:
        raise ConfigError(f"{path} is a directory; name the JSON file inside it") from error
    except FileNotFoundError as error:
        raise ConfigError(_not_found(path)) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)[:200]} cannot be read: {error}") from error
    return Source(str(path), _as_object(_parse(text, str(path)), str(path)))


def _not_found(path: Path) -> str:
    where = path.parent.absolute()
    if not where.is_dir():
        return f"no configuration file at {path}: the directory {where} does not exist"
    guess = did_you_mean(path.name, sorted(item.name for item in where.iterdir()))
    return f"no configuration file at {path} (looked in {where})" + (f"; {guess}" if guess else "")


def _parse(text: str, name: str) -> Any:
    """Plain JSON first; HJSON (comments, trailing commas) where the library is installed."""
    if not text.strip():
        raise ConfigError(f"{name} is empty; a ds_config is one JSON object")
    try:
        return json.loads(text, object_pairs_hook=_unique_pairs(text, name))
    except json.JSONDecodeError as error:
        return _parse_hjson(text, name, error)


def _parse_hjson(text: str, name: str, json_error: json.JSONDecodeError) -> Any:
    try:
        import hjson
    except ImportError:
        raise ConfigError(
            f"{name}:{json_error.lineno}:{json_error.colno}: broken JSON: {json_error.msg} "
            "(files with comments or trailing commas need `pip install hjson`)"
        ) from json_error
    try:
        return hjson.loads(text, object_pairs_hook=_unique_pairs(text, name))
    except hjson.HjsonDecodeError:
        # HJSON reads on past a mistake; the JSON parser stops at it, so its position helps more.
        line, column = json_error.lineno, json_error.colno
        raise ConfigError(f"{name}:{line}:{column}: broken JSON: {json_error.msg}") from json_error


def _unique_pairs(text: str, name: str) -> Callable[[Pairs], dict[Any, Any]]:
    def build(pairs: Pairs) -> dict[Any, Any]:
        counts = Counter(key for key, _ in pairs)
        if len(counts) < len(pairs):
            twice = [f"'{key}'{_lines_of(key, text)}" for key, times in counts.items() if times > 1]
            raise ConfigError(f"{name}: given twice in one object: {', '.join(twice)}")
        return dict(pairs)

    return build


def _lines_of(key: str, text: str) -> str:
    """Where a key stands in the text, in parentheses; empty when it is spelt in an unusual way."""
    pattern = re.compile(rf"""(?<![\w-])["']?{re.escape(key)}["']?\s*:""")
    lines = [str(number) for number, line in enumerate(text.splitlines(), 1) for _ in pattern.finditer(line)]
    return f" (line {', '.join(lines)})" if lines else ""
