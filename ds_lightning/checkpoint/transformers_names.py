"""What a model of transformers says of the names in its files, as its `from_pretrained` follows it.

The library is not imported: its models carry these tables as attributes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

_MARK = "_keys_to_ignore_on_load_missing"
_OF_OLD_FILES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


@dataclass(frozen=True, slots=True)
class TransformersNames:
    """Names of one model.

    Attributes:
        prefix: of the model in the module that was asked for.
        absent: patterns of names that files need not have.
        surplus: patterns of names that files may have for nothing.
        renamed: patterns of names in files, and what takes their place.
    """

    prefix: str = ""
    absent: tuple[str, ...] = ()
    surplus: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    known: bool = False

    @classmethod
    def of(cls, module: nn.Module) -> TransformersNames:
        """Those of a module, or of the one model in it."""
        for name, child in module.named_modules():
            if not hasattr(type(child), _MARK):
                continue
            mapping = getattr(child, "_checkpoint_conversion_mapping", None)
            return cls(
                f"{name}." if name else "",
                _patterns(getattr(child, _MARK, None)),
                _patterns(getattr(child, "_keys_to_ignore_on_load_unexpected", None)),
                tuple(mapping.items()) if isinstance(mapping, Mapping) else (),
                True,
            )
        return cls()

    def may_lack(self, name: str) -> bool:
        """Whether a file may be without a name of the module."""
        return self._found(self.absent, name)

    def may_have(self, name: str) -> bool:
        """Whether a file may have a name for nothing, spelt as one of the module."""
        return self._found(self.surplus, name)

    def _found(self, patterns: Iterable[str], name: str) -> bool:
        return any(re.search(pattern, name.removeprefix(self.prefix)) for pattern in patterns)

    def rename(self, name: str) -> str:
        """What a name of a file is in the model."""
        if not self.known:
            return name
        for old, new in _OF_OLD_FILES.items():
            if name.endswith(old):
                name = name.removesuffix(old) + new
        for pattern, place in self.renamed:
            name, count = re.subn(pattern, place, name)
            if count:
                break
        return name


def _patterns(values: object) -> tuple[str, ...]:
    return tuple(values) if isinstance(values, list | tuple | set) else ()
