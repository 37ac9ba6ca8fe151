"""Names in checkpoints, compared with those of a module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ds_lightning.errors import CheckpointError

COMPILED = "_orig_mod."


def strip_compiled(values: dict[str, Any]) -> dict[str, Any]:
    """Names without the marks of compiled sub-modules, so that the file loads anywhere."""
    if not any(COMPILED in key for key in values):
        return values
    return {without_compiled(key): value for key, value in values.items()}


def without_compiled(name: str) -> str:
    """A name without the marks of compiled sub-modules."""
    return name.replace(COMPILED, "")


def align_compiled(saved: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    """Saved names as this module spells them."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in module.named_buffers(remove_duplicate=False)]
    if not any(COMPILED in name for name in (*names, *saved)):
        return saved
    spelt = {name.replace(COMPILED, ""): name for name in names}
    return {spelt.get(key.replace(COMPILED, ""), key): value for key, value in saved.items()}


def loads_as_usual(module: nn.Module) -> bool:
    """Whether `load_state_dict` does what torch's does: it may be overridden, and hooks may rename keys."""
    return type(module).load_state_dict is nn.Module.load_state_dict and not any(
        child._load_state_dict_pre_hooks for child in module.modules()
    )


def differences(module: nn.Module, saved: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Names that a module has and a state lacks, and the other way round."""
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)} | set(_saved_buffers(module))
    own = formats_of_their_own(module)
    return (
        [name for name in names if name not in saved],
        [name for name in saved if name not in names and not name.startswith(own)],
    )


def prefix_between(module: nn.Module, saved: Iterable[str]) -> str:
    """What is in front of all saved names in a module that holds the saved one as a child; "" when that is not so."""
    saved = list(saved)
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)} | set(_saved_buffers(module))
    if not saved or any(name in names for name in saved):
        return ""
    own = formats_of_their_own(module)
    found = {name.removesuffix(saved[0]) for name in names if name.endswith(f".{saved[0]}")}
    fitting = [p for p in sorted(found) if all(p + name in names or (p + name).startswith(own) for name in saved)]
    return fitting[0] if len(fitting) == 1 else ""


def with_prefix(checkpoint: dict[str, Any], prefix: str) -> dict[str, Any]:
    """A checkpoint of a module as one of a module that holds it as a child."""
    own = dict(checkpoint.get("ds_lightning", {}))
    for key in ("excluded_parameters", "frozen_parameters"):
        if key in own:
            own[key] = [prefix + name for name in own[key]]
    names = own.get("optimizer_parameter_names") or []
    own["optimizer_parameter_names"] = [[prefix + name for name in group] for group in names]
    weights = {prefix + name: value for name, value in checkpoint["state_dict"].items()}
    return {**checkpoint, "state_dict": weights, "ds_lightning": own}


def check_keys(module: nn.Module, saved: Mapping[str, Any], optional: set[str]) -> None:
    """Compare a state with a module without changing either.

    Raises:
        CheckpointError: naming missing and unexpected keys and other shapes.
    """
    if not loads_as_usual(module):
        return
    shapes = {name: p.shape for name, p in module.named_parameters(remove_duplicate=False)}
    shapes.update(_saved_buffers(module))
    problems = [
        f"{name}: {tuple(saved[name].shape)} in the checkpoint, {tuple(shape)} in the model"
        for name, shape in shapes.items()
        if torch.is_tensor(saved.get(name)) and saved[name].shape != shape
    ]
    problems += [f"{name}: missing in the checkpoint" for name in shapes if name not in saved and name not in optional]
    problems += [f"{name}: not in the model" for name in differences(module, saved)[1]]
    if problems:
        shown = "\n  ".join(problems[:20]) + ("\n  ..." if len(problems) > 20 else "")
        advice = "It belongs to another model, or set `strict_loading = False` on the module to load what fits."
        if not any(name in saved for name in shapes):
            prefix = prefix_between(module, saved)
            advice = "It belongs to another model: no name is in both."
            if prefix:
                advice = f"All names fit with {prefix!r} in front: put it there in on_load_checkpoint."
        raise CheckpointError(
            f"The checkpoint does not fit {type(module).__name__}; nothing was loaded:\n  {shown}\n{advice}"
        )


def formats_of_their_own(module: nn.Module) -> tuple[str, ...]:
    """Prefixes of what modules with a format of their own (metrics, extra state) may have saved; theirs to judge."""
    return tuple(f"{name}." if name else "" for name, child in module.named_modules() if not _saves_as_usual(child))


def _saves_as_usual(module: nn.Module) -> bool:
    kind = type(module)
    return kind.state_dict is nn.Module.state_dict and all(
        getattr(kind, name) is getattr(nn.Module, name)
        for name in ("_save_to_state_dict", "_load_from_state_dict", "get_extra_state")
    )


def saved_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, and buffers that belong to a state, under all their names."""
    return {**dict(module.named_parameters(remove_duplicate=False)), **_buffers(module)}


def _saved_buffers(module: nn.Module) -> dict[str, torch.Size]:
    """Shapes of the buffers that belong to a state, of modules that save them as usual."""
    return {name: buffer.shape for name, buffer in _buffers(module).items()}


def _buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, child in module.named_modules(remove_duplicate=False)
        for name, buffer in child._buffers.items()
        if buffer is not None and name not in child._non_persistent_buffers_set and _saves_as_usual(child)
    }
