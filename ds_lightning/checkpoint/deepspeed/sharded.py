"""What the optimizer's files of a DeepSpeed checkpoint hold, for stages 1 to 3 and for universal checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_lightning.checkpoint.deepspeed.files import Files
from ds_lightning.checkpoint.deepspeed.layout import (
    Contents,
    InFile,
    Pieces,
    cut,
    elementwise,
    head_to_tail,
    mapping_in,
    numbers,
    state_of,
    tensor_in,
    wide,
    with_step,
    without_parameters,
)
from ds_lightning.checkpoint.deepspeed.pickles import Record, read
from ds_lightning.checkpoint.deepspeed.unsharded import unsharded
from ds_lightning.errors import CheckpointError

_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}


def optimizer_of(files: Files, model: Mapping[str, Any]) -> Contents:
    """What the files of the optimizer hold.

    Args:
        files: the checkpoint.
        model: what the model file of rank 0 holds.

    Raises:
        CheckpointError: when a file is missing or damaged, or sizes in them disagree.
    """
    if files.universal:
        return _universal(files, model)
    if not files.optimizer:
        return unsharded(files, model)
    headers = [_header_in(path) for path in files.optimizer]
    count = headers[0].get("partition_count", len(headers))
    count = max(count, default=len(headers)) if isinstance(count, list | tuple) else count
    if count != len(headers):
        raise CheckpointError(
            f"{files.folder} was written by {count} ranks and has optimizer files of {len(headers)}: "
            f"{files.optimizer[-1].name} is the last. Copy all of them, and remove those of an older checkpoint."
        )
    stage = stage_in(headers[0].get("zero_stage", 1))  # DeepSpeed's BF16_Optimizer does not say; it is a stage 1
    if stage == 3 and len(files.model) != len(headers):
        raise CheckpointError(
            f"{files.folder} has optimizer files of {len(headers)} ranks and model files of {len(files.model)}: "
            f"{files.model[-1].name} is the last. Copy all of them, and remove those of an older checkpoint."
        )
    shapes = _shapes_in(model, files)
    return (_stage3 if stage == 3 else _stage12)(files, stage, headers, shapes)


def stage_in(value: Any) -> int:
    """A stage, which DeepSpeed saves as an object of an enum."""
    if isinstance(value, Record):
        value = value.args[-1] if value.args else -1
    return _STAGES[value] if isinstance(value, str) and value in _STAGES else int(value)


def _stage12(files: Files, stage: int, headers: Sequence[Mapping[str, Any]], shapes: list[dict[str, Any]]) -> Contents:
    """See [Note: layouts of DeepSpeed]."""
    result = Contents(stage, len(headers), header=headers[0])
    masters = [
        _entry(header, "single_partition_of_fp32_groups", files.optimizer[r]) for r, header in enumerate(headers)
    ]
    bases = [
        _base_state(_entry(header, "base_optimizer_state", files.optimizer[r])) for r, header in enumerate(headers)
    ]
    hyper = bases[0]["param_groups"] or [{"step": headers[0].get("base_optimizer_state_step", 0)} for _ in shapes]
    for number, group in enumerate(shapes):
        partitions = [masters[rank][number].detach().reshape(-1) for rank in range(len(headers))]
        paddings = headers[0].get("param_alignment_paddings")
        places = head_to_tail(group, paddings[number] if paddings else None)
        end = max((start + math.prod(shape) for start, shape in places.values()), default=0)
        available = sum(part.numel() for part in partitions)
        if not end <= available < end + sum(paddings[number] if paddings else ()) + 2 * len(headers):
            raise CheckpointError(
                f"{files.folder}: group {number} has {end} elements in param_shapes, and {available} in the optimizer "
                "files. They do not belong together: files of different checkpoints may have been mixed."
            )
        length = partitions[0].numel()
        states = [base["state"].get(number, {}) for base in bases]
        keys = elementwise(states, partitions)
        for name, (start, shape) in places.items():
            where = [(rank * length, values) for rank, values in enumerate(partitions)]
            result.weights[name] = cut(where, start, shape, files.optimizer)
            entry = dict(numbers(states[0]))
            for key in keys:
                where = [(rank * length, state_of(state, key)) for rank, state in enumerate(states)]
                entry[key] = cut(where, start, shape, files.optimizer)
            result.states[name] = with_step(entry, hyper[number])
        result.groups.append((without_parameters(hyper[number]), list(group)))
    return result


def _stage3(files: Files, stage: int, headers: Sequence[Mapping[str, Any]], shapes: list[dict[str, Any]]) -> Contents:
    """See [Note: layouts of DeepSpeed]."""
    world = len(headers)
    result = Contents(stage, world, header=headers[0])
    flats = [
        [part.detach().reshape(-1) for part in _entry(header, "fp32_flat_groups", files.optimizer[rank])]
        for rank, header in enumerate(headers)
    ]
    bases = [_entry(header, "optimizer_state_dict", files.optimizer[rank]) for rank, header in enumerate(headers)]
    whole_shapes = {name: shape for group in shapes for name, shape in group.items()}
    each = {name: -(-math.prod(shape) // world) for name, shape in whole_shapes.items()}
    for rank, parts in enumerate(flats):
        found = sum(part.numel() for part in parts)
        if found != sum(each.values()):
            raise CheckpointError(
                f"{files.optimizer[rank]} has {found} elements, while param_shapes in {files.model[0].name} asks for "
                f"{sum(each.values())} on each of {world} ranks. Files of different checkpoints may have been mixed, "
                "or the parameters were partitioned among a part of the ranks (MiCS, experts), which is not supported."
            )
    starts = [sum(part.numel() for part in flats[0][:number]) for number in range(len(flats[0]))]
    states = [[base["state"].get(number, {}) for number in range(len(starts))] for base in bases]
    keys = [elementwise([of_rank[n] for of_rank in states], [p[n] for p in flats]) for n in range(len(starts))]
    members: list[list[str]] = [[] for _ in starts]
    offset = 0
    for name, shape in whole_shapes.items():
        home = max((n for n, start in enumerate(starts) if start <= offset and flats[0][n].numel()), default=0)
        members[home].append(name)
        gather = _Slices(offset, each[name], shape, starts, files.optimizer)
        result.weights[name] = gather(flats)
        entry: dict[str, Any] = dict(numbers(states[0][home]))
        for key in keys[home]:
            entry[key] = gather([[state_of(state, key) for state in of_rank] for of_rank in states])
        result.states[name] = entry
        offset += each[name]
    for hyper in bases[0]["param_groups"]:
        names = [name for number in hyper["params"] for name in members[number]]
        for name in names:
            result.states[name] = with_step(result.states[name], hyper)
        result.groups.append((without_parameters(hyper), names))
    return result


@dataclass(frozen=True)
class _Slices:
    """The slices of one parameter at stage 3: `[offset, offset + length)` of the sub-groups of each rank."""

    offset: int
    length: int
    shape: torch.Size
    starts: Sequence[int]
    paths: Sequence[Path]

    def __call__(self, flats: Sequence[Sequence[torch.Tensor | None]]) -> Pieces:
        """Pieces of the values that `flats` has by rank and sub-group."""
        where: list[tuple[int, torch.Tensor | None]] = []
        for rank, parts in enumerate(flats):
            for start, values in zip(self.starts, parts, strict=True):
                if values is None:
                    continue
                first = max(self.offset - start, 0)
                found = values[first : max(self.offset + self.length - start, 0)]
                where.append((rank * self.length + start + first - self.offset, found))
        return cut(where, 0, self.shape, self.paths)


def _universal(files: Files, model: Mapping[str, Any]) -> Contents:
    """A folder for each parameter, with whole tensors, which stage 3 leaves flat."""
    zero = files.folder / "zero"
    header = mapping_in(zero / "optimizer_state.pt")
    stage = stage_in(header.get("zero_stage", 1))
    result = Contents(stage, int(model.get("dp_world_size") or len(files.model)), header=header)
    inner = header.get("optimizer_state_dict") or {}
    hyper = header.get("param_groups") or inner.get("param_groups") or []
    shapes = _shapes_in(model, files)
    if stage == 3:
        parts = [(group, [n for number in group["params"] for n in shapes[number].items()]) for group in hyper]
    else:
        parts = [(group, list(shapes[number].items())) for number, group in enumerate(hyper)]
    for group, entries in parts:
        for name, shape in entries:
            folder, numel = zero / name, math.prod(shape)
            dtype = wide(tensor_in(folder / "fp32.pt", numel).dtype)
            result.weights[name] = InFile(torch.Size(shape), dtype, folder / "fp32.pt")
            state: dict[str, Any] = dict(numbers(next(iter(inner.get("state", {}).values()), {})))
            for path in sorted(folder.glob("*.pt")):
                if path.name == "step.pt":
                    state["step"] = read(path)
                elif path.name != "fp32.pt":
                    tensor_in(path, numel)
                    state[path.stem] = InFile(torch.Size(shape), torch.float32, path)
            result.states[name] = with_step(state, group)
        result.groups.append((without_parameters(group), [name for name, _ in entries]))
    _check_complete(zero, result)
    return result


def _check_complete(zero: Path, contents: Contents) -> None:
    """Parameters have all moments, or none, as when they never had a gradient.

    Raises:
        CheckpointError: naming a file that is missing.
    """
    kinds = {key for state in contents.states.values() for key, value in state.items() if isinstance(value, InFile)}
    for name, state in contents.states.items():
        if kinds.isdisjoint(state):
            contents.states[name] = {}
        for kind in sorted(kinds - set(contents.states[name]) if contents.states[name] else ()):
            raise CheckpointError(
                f"{zero / name / (kind + '.pt')} is missing. Convert the checkpoint again with ds_to_universal."
            )


def _base_state(base: Any) -> Mapping[str, Any]:
    """The legacy "elastic" form is a list of the groups' states."""
    if isinstance(base, list):
        return {"state": dict(enumerate(base)), "param_groups": None}
    state = base["state"]
    numbers = [group["params"][0] for group in base["param_groups"]]
    return {"state": {place: state.get(n, {}) for place, n in enumerate(numbers)}, "param_groups": base["param_groups"]}


def _shapes_in(model: Mapping[str, Any], files: Files) -> list[dict[str, Any]]:
    shapes = model.get("param_shapes")
    if shapes is None:
        raise CheckpointError(f"{files.model[0]} has no param_shapes, so the optimizer's files cannot be read.")
    return [dict(group) for group in ([shapes] if isinstance(shapes, Mapping) else shapes)]


def _entry(header: Mapping[str, Any], key: str, path: Path) -> Any:
    if key not in header:
        raise CheckpointError(f"{path} has no {key!r}; it is no optimizer file of this stage. Copy it again.")
    return header[key]


def _header_in(path: Path) -> Mapping[str, Any]:
    header = mapping_in(path).get("optimizer_state_dict")
    if not isinstance(header, Mapping):
        raise CheckpointError(f"{path} has no 'optimizer_state_dict'; it is no optimizer file of DeepSpeed.")
    return header
