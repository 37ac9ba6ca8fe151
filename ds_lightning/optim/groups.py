"""Parameter groups by description: names, classes of modules, numbers of axes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from ds_lightning.config.schema.optimizer import GROUP_SELECTORS
from ds_lightning.config.suggest import closest, listed
from ds_lightning.errors import ConfigError

DEFAULT_GROUP = "default"
HOOK = "configure_param_groups"
_REGEX = "regex:"
_COMPILED = "_orig_mod."


class _Candidate(NamedTuple):
    """A parameter, and what it can be told by."""

    parameter: nn.Parameter
    names: tuple[str, ...]
    classes: frozenset[str]


def param_groups(
    module: nn.Module, blocks: Sequence[Mapping[str, Any]], where: str = "param_groups"
) -> list[dict[str, Any]]:
    """The groups that blocks describe, ready for an optimizer: first what no block takes, then a group for each block.

    A parameter belongs to the first block that takes it. A block takes a parameter if one of its `names` fits a name of
    it or one of its `modules` a class of the module that holds it (its own or a base class), where the block has
    either, and if it has no more axes than `max_ndim` says. Patterns are globs (`*` takes dots too), or after `regex:`
    what `re.search` finds. Frozen parameters are in no group.

    Args:
        module: whose parameters.
        blocks: with any of `names`, `modules` (a pattern or a list of them), `max_ndim` and `name`; all other keys are
            values of the group, such as `lr` or `weight_decay`.
        where: the blocks come from, for messages.

    Returns:
        Groups with "params", and "name" where some block has one (what no block takes is called "default" then). The
        first group is missing where it would be empty.

    Raises:
        ConfigError: a block takes no parameter or says of none which, or names clash; all mistakes at once.
    """
    candidates = _candidates(module)
    free = {id(c.parameter): c for c in candidates if c.parameter.requires_grad}
    problems: list[str] = []
    groups: list[dict[str, Any]] = []
    for place, block in enumerate(blocks):
        title = f"{where}.{block.get('name') or place}"
        if not GROUP_SELECTORS.keys() - {"name"} & {key for key in block if block[key] is not None}:
            problems.append(f"{title}: does not say which parameters; it needs {_or(GROUP_SELECTORS, 'name')}")
            continue
        takes = _test_of(block)
        matching = [c for c in candidates if takes(c)]
        taken = [c for c in matching if free.pop(id(c.parameter), None) is not None]
        if not taken:
            problems.append(f"{title}: {_why_nothing(block, matching, candidates)}")
        values = {key: value for key, value in block.items() if key not in GROUP_SELECTORS and value is not None}
        named = {"name": block["name"]} if block.get("name") else {}
        groups.append({"params": [c.parameter for c in taken], **named, **values})
    names = [group["name"] for group in groups if "name" in group]
    rest: dict[str, Any] = {
        "params": [c.parameter for c in free.values()],
        **({"name": DEFAULT_GROUP} if names else {}),
    }
    clashes = sorted({name for name in names if names.count(name) > 1 or (name == DEFAULT_GROUP and rest["params"])})
    problems += [
        f"{where}: more than one group is called '{name}'"
        + (", the name of what no block takes" if name == DEFAULT_GROUP else "")
        for name in clashes
    ]
    if problems:
        raise ConfigError("The parameter groups do not fit the module:\n  " + "\n  ".join(problems))
    return [rest, *groups] if rest["params"] else groups


def groups_of_module(module: nn.Module) -> list[dict[str, Any]] | None:
    """What the module's `configure_param_groups()` returns; None where it has none.

    Raises:
        ConfigError: for what is no list of groups, foreign parameters, and trainable ones that are in no group.
    """
    hook: Callable[[], Any] | None = getattr(module, HOOK, None)
    if hook is None:
        return None
    here = f"{type(module).__name__}.{HOOK}()"
    returned = hook()
    groups = list(returned) if isinstance(returned, Iterable) and not isinstance(returned, Mapping) else None
    if groups is None or not all(isinstance(group, Mapping) and "params" in group for group in groups):
        raise ConfigError(
            f"{here} must return a list of groups, each a dict with 'params', as torch.optim takes them; it returned "
            f"{type(returned).__name__}."
        )
    found: list[dict[str, Any]] = []
    names = {id(c.parameter): c.names[0] for c in _candidates(module)}
    missing = {id(p): names[id(p)] for p in module.parameters() if p.requires_grad}
    for place, group in enumerate(groups):
        params = [group["params"]] if isinstance(group["params"], nn.Parameter) else list(group["params"])
        foreign = [p for p in params if id(p) not in names]
        if foreign:
            raise ConfigError(
                f"Group {place} of {here} holds {len(foreign)} tensors that are no parameters of the module. Give "
                "parameters, as in [p for n, p in self.named_parameters() if ...]."
            )
        for parameter in params:
            missing.pop(id(parameter), None)
        found.append({**group, "params": params})
    if missing:
        raise ConfigError(
            f"{here} leaves out {_some(list(missing.values()))}, which would not be trained. Put them into a "
            "group, or freeze them with requires_grad_(False)."
        )
    return found


def check_values(groups: Sequence[Mapping[str, Any]], known: Iterable[str], where: str, strict: bool) -> None:
    """Refuse values that an optimizer would not look at.

    Args:
        groups: with their values.
        known: keys of the optimizer's groups.
        where: the groups come from, for messages.
        strict: everything unknown is a mistake; otherwise only what looks like a slip of the pen.

    Raises:
        ConfigError: all mistakes at once.
    """
    known = [*known, "name"]
    problems = []
    for place, group in enumerate(groups):
        for key in group:
            guess = closest(key, known, cutoff=0.75)
            if key not in (*known, "params", "param_names") and (strict or guess):
                hint = f"did you mean '{guess}'?" if guess else f"groups have {listed(known, 30)}"
                problems.append(f"{where}.{group.get('name') or place}.{key}: is no value of a group; {hint}")
    if problems:
        raise ConfigError("The parameter groups do not fit the optimizer:\n  " + "\n  ".join(problems))


def _candidates(module: nn.Module) -> list[_Candidate]:
    """All parameters in order, a tied one once, with all its names."""
    names: dict[int, list[str]] = {}
    classes: dict[int, set[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            full = f"{prefix}.{name}" if prefix else name
            parameters.setdefault(id(parameter), parameter)
            names.setdefault(id(parameter), []).append(full.replace(_COMPILED, ""))
            classes.setdefault(id(parameter), set()).update(cls.__name__ for cls in type(owner).__mro__)
    order = [id(parameter) for parameter in module.parameters()]
    return [_Candidate(parameters[k], tuple(dict.fromkeys(names[k])), frozenset(classes[k])) for k in order]


def _patterns(block: Mapping[str, Any], key: str) -> list[str]:
    found = block.get(key)
    return [found] if isinstance(found, str) else list(found or [])


def _fits(pattern: str, text: str) -> bool:
    if pattern.startswith(_REGEX):
        return re.search(pattern.removeprefix(_REGEX), text) is not None
    return fnmatchcase(text, pattern)


def _test_of(block: Mapping[str, Any]) -> Callable[[_Candidate], bool]:
    names, classes, most = _patterns(block, "names"), _patterns(block, "modules"), block.get("max_ndim")
    try:
        for pattern in (*names, *classes):
            _fits(pattern, "")
    except re.error as error:
        raise ConfigError(f"{pattern!r} is no regular expression: {error}.") from error

    def takes(candidate: _Candidate) -> bool:
        if most is not None and candidate.parameter.ndim > most:
            return False
        by_name = any(_fits(pattern, name) for pattern in names for name in candidate.names)
        by_class = any(_fits(pattern, name) for pattern in classes for name in candidate.classes)
        return by_name or by_class or not (names or classes)

    return takes


def _why_nothing(block: Mapping[str, Any], matching: Sequence[_Candidate], candidates: Sequence[_Candidate]) -> str:
    if matching and not any(c.parameter.requires_grad for c in matching):
        return f"matches frozen parameters alone ({_some([c.names[0] for c in matching])})"
    if matching:
        return f"an earlier block takes all that it matches ({_some([c.names[0] for c in matching])})"
    hints = []
    for key, known in (
        ("names", [name for c in candidates for name in c.names]),
        ("modules", sorted({name for c in candidates for name in c.classes})),
    ):
        for pattern in _patterns(block, key):
            plain = pattern.removeprefix(_REGEX).strip("*^$.")
            ends = {end: name for name in known for end in (name, name.rpartition(".")[2])}
            guess = closest(plain, ends)
            if guess and not any(_fits(pattern, name) for name in known):
                shown = ends[guess] if plain.count(".") else guess
                hints.append(f"'{pattern}' fits nothing, did you mean '{shown}'?")
    return "matches no parameter" + (
        f": {' '.join(hints)}" if hints else f" (there are {_some([c.names[0] for c in candidates])})"
    )


def _some(names: Sequence[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _or(selectors: Iterable[str], *but: str) -> str:
    return listed([name for name in selectors if name not in but])
