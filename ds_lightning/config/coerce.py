"""Turns one JSON value into the type a key asks for, or says in words why not."""

from __future__ import annotations

import math
import numbers
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Union, get_args, get_origin

from ds_lightning.config.suggest import did_you_mean, listed

_BOOL_WORDS = {"true": True, "false": False}


@dataclass(frozen=True)
class Limits:
    """The values a key allows.

    Attributes:
        spellings: Folded spelling -> canonical word; empty for "anything".
        is_open: Words outside `spellings` pass unchanged.
        at_least: Smallest allowed number.
        at_most: Largest allowed number.
        above: Exclusive lower bound.
    """

    spellings: Mapping[str, str] = field(default_factory=dict)
    is_open: bool = False
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None


@dataclass(frozen=True)
class Coerced:
    """A value of the right type, and a remark when it had to be read generously."""

    value: Any
    remark: str = ""


_ANY = Limits()


def coerce(value: Any, hint: Any, limits: Limits = _ANY) -> Coerced:
    """The value as `hint`.

    Raises:
        ValueError: The value has another type or lies outside the limits; the text is for users.
    """
    if hint is Any:
        return Coerced(value)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _coerce_union(value, args, limits)
    if origin is list:
        return _coerce_list(value, args[0], limits)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"expected an object, got {shown(value)}")
        return Coerced(dict(value))
    if hint is bool:
        return _coerce_bool(value)
    if hint is str:
        return _coerce_str(value, limits)
    assert hint in (int, float), hint
    return _coerce_number(value, hint, limits)


def shown(value: Any) -> str:
    """A value as the user wrote it, with its JSON type where that helps."""
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, str):
        return f"the string {value!r}"
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return f"the list {list(value)!r}"
    return repr(value)


def _coerce_union(value: Any, args: tuple[Any, ...], limits: Limits) -> Coerced:
    kinds = [arg for arg in args if arg is not types.NoneType]
    if value is None and len(kinds) < len(args):
        return Coerced(None)
    for kind in kinds[:-1]:
        try:
            return coerce(value, kind, limits)
        except ValueError:
            continue
    return coerce(value, kinds[-1], limits)


def _coerce_list(value: Any, item_hint: Any, limits: Limits) -> Coerced:
    if isinstance(value, str) and item_hint is str:
        return Coerced([value], "one string read as a list of one")
    if not isinstance(value, list | tuple):
        raise ValueError(f"expected a list, got {shown(value)}")
    items = []
    for index, item in enumerate(value):
        try:
            items.append(coerce(item, item_hint, limits))
        except ValueError as error:
            raise ValueError(f"entry {index}: {error}") from error
    return Coerced(
        [item.value for item in items],
        "; ".join(dict.fromkeys(i.remark for i in items if i.remark)),
    )


def _coerce_bool(value: Any) -> Coerced:
    if isinstance(value, bool):
        return Coerced(value)
    if isinstance(value, str) and value.strip().lower() in _BOOL_WORDS:
        return Coerced(_BOOL_WORDS[value.strip().lower()], f"the string {value!r} is read as a boolean")
    raise ValueError(f"expected true or false, got {shown(value)}")


def _coerce_str(value: Any, limits: Limits) -> Coerced:
    if not isinstance(value, str):
        raise ValueError(f"expected a string, got {shown(value)}")
    if not limits.spellings:
        return Coerced(value)
    canonical = limits.spellings.get(value.casefold())
    if canonical is not None:
        return Coerced(canonical, f"read as {canonical!r}" if canonical.casefold() != value.casefold() else "")
    if limits.is_open:
        return Coerced(value)
    words = list(dict.fromkeys(limits.spellings.values()))
    guess = did_you_mean(value, limits.spellings)
    raise ValueError(f"expected {listed(words)}, got {shown(value)}" + (f"; {guess}" if guess else ""))


def _coerce_number(value: Any, kind: type, limits: Limits) -> Coerced:
    number, remark = value, ""
    wanted = "a whole number" if kind is int else "a number"
    if isinstance(value, str):
        number = _number_in(value)
        if number is None:
            raise ValueError(f"expected {wanted}, got {shown(value)}")
        remark = f"the string {value!r} is read as a number"
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise ValueError(f"expected {wanted}, got {shown(value)}")
    if not _is_finite(number):
        raise ValueError(f"expected a finite number, got {shown(value)}")
    if kind is int:
        whole = math.trunc(number)
        if number != whole:
            raise ValueError(f"expected a whole number, got {shown(value)}; round it to {round(float(number))}")
        number = int(whole)
    else:
        number = float(number)
    _check_range(number, limits)
    return Coerced(number, remark)


def _number_in(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text.strip())
        except ValueError:
            continue
    return None


def _is_finite(number: Any) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def _check_range(number: float, limits: Limits) -> None:
    if limits.above is not None and not number > limits.above:
        raise ValueError(f"must be above {limits.above:g}, got {number}")
    if limits.at_least is not None and number < limits.at_least:
        raise ValueError(f"must be at least {limits.at_least:g}, got {number}")
    if limits.at_most is not None and number > limits.at_most:
        raise ValueError(f"must be at most {limits.at_most:g}, got {number}")
