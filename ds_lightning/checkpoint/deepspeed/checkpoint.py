"""A checkpoint that DeepSpeed wrote, by name and logical shape."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ds_lightning.checkpoint.deepspeed.files import Files, find_files
from ds_lightning.checkpoint.deepspeed.layout import (
    Contents,
    StoredTensor,
    cut,
    mapping_in,
    read_value,
    stored,
    whole,
)
from ds_lightning.checkpoint.deepspeed.pickles import Record
from ds_lightning.checkpoint.deepspeed.sharded import optimizer_of
from ds_lightning.errors import CheckpointError

# What the engine itself writes into model files; everything else there is the user's client state.
_ENGINE_KEYS = frozenset(
    [
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
        "num_experts",
        "csr_tensor_module_names",
        "universal_checkpoint_info",
    ]
)
_SCALER = {
    "scale": "cur_scale",
    "iteration": "cur_iter",
    "last_overflow": "last_overflow_iter",
    "tolerance": "cur_hysteresis",
    "window": "scale_window",
    "minimum": "min_scale",
    "factor": "scale_factor",
}
_WRAPPER = "_forward_module."
_OLD_WRAPPER = "module."


class DeepSpeedCheckpoint:
    """A checkpoint of DeepSpeed's stages 0 to 3, or a universal one, opened for reading.

    Opening reads the files' descriptions; tensors stay in them until asked for, and only what is asked for is read.
    (Files in the format that torch had before 1.6 are read as a whole.) Names are those of the user's module: what
    Lightning and `torch.compile` put before them is taken off.

    Attributes:
        folder: the folder of the tag.
        stage: 0 to 3; for a universal checkpoint, the stage that it was converted from.
        world_size: the number of ranks that wrote it.
        universal: whether it is a universal checkpoint.
        precision: "32-true", "16-mixed" or "bf16-mixed".
        version: of DeepSpeed.
        from_lightning: whether Lightning's DeepSpeedStrategy wrote it.
        frozen: names of parameters that no optimizer had.
        tied: the further names of shared parameters, and the name that each is saved under.
        buffers: names of buffers.
        param_groups: hyper-parameters of each group, without `params`.
        group_names: names of the parameters of each group, in the order of the optimizer; None where they are not
            known, which is so at stage 0 in fp32 with several groups.
        global_steps: optimizer steps, skipped ones included.
        skipped_steps: those that overflowed.
        global_samples: samples seen.
        loss_scale: the scaler's numbers (`scale`, `dynamic`, and where there are any `iteration`, `last_overflow`,
            `tolerance`, `window`, `minimum`, `factor`); None unless training was in fp16.
        lr_scheduler: the state of the scheduler that DeepSpeed stepped; None if there was none.
        client_state: what the user passed to `save_checkpoint`, in plain containers.
    """

    def __init__(self, path: str | Path, tag: str | None = None, strip_prefix: str | None = None) -> None:
        """Open a checkpoint.

        Args:
            path: the folder that `save_checkpoint` was given, the folder of a tag, or a universal folder.
            tag: which checkpoint in the folder; by default the one that `latest`, or `latest_universal`, names.
            strip_prefix: what to take off every name; by default what Lightning's wrappers have put there.

        Raises:
            CheckpointError: when a file is missing, damaged or of another checkpoint, or the layout is not supported;
                it names the file and says what to do.
        """
        self._files: Files = find_files(path, tag)
        self._model = mapping_in(self._files.model[0])
        self.folder, self.universal = self._files.folder, self._files.universal
        if not isinstance(self._model.get("module"), Mapping):
            raise CheckpointError(f"{self._files.model[0]} has no 'module'; it is no model file of DeepSpeed.")
        try:
            self._open(strip_prefix)
        except CheckpointError:
            raise
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.folder} is not laid out as DeepSpeed's checkpoints are: {type(error).__name__}: {error}. A "
                "file may have been edited, or is of a version that is not known here."
            ) from error

    def _open(self, strip_prefix: str | None) -> None:
        model = self._model
        contents = optimizer_of(self._files, model)
        self.client_state = {key: _plain(value) for key, value in model.items() if key not in _ENGINE_KEYS}
        self.from_lightning = "pytorch-lightning_version" in self.client_state
        self.stage, self.world_size = contents.stage, contents.world_size
        self.version = str(model.get("ds_version"))
        self.precision = _precision(model)
        self.global_steps = int(model.get("global_steps") or 0)
        self.skipped_steps = int(model.get("skipped_steps") or 0)
        self.global_samples = int(model.get("global_samples") or 0)
        self.lr_scheduler = _plain(model.get("lr_scheduler"))
        self.loss_scale = _loss_scale(contents.header) if self.precision == "16-mixed" else None

        tensors, tied = _tensors(self._files, model, contents)
        prefix = self._prefix(list(tensors), strip_prefix)

        def mine(name: str) -> str:
            return name.removeprefix(prefix).replace("_orig_mod.", "")

        buffers = set(model.get("buffer_names") or ())
        self._tensors: dict[str, StoredTensor] = {mine(name): tensor for name, tensor in tensors.items()}
        self.tied = {mine(name): mine(source) for name, source in tied.items()}
        self.buffers = tuple(mine(name) for name in tensors if name in buffers)
        self.group_names = [names and [mine(name) for name in names] for _, names in contents.groups]
        self.param_groups = [hyper for hyper, _ in contents.groups]
        trained = {name for names in self.group_names for name in names or ()}
        unknown = None in self.group_names  # then it is not known what was frozen
        self.frozen = tuple(
            name
            for name in self._tensors
            if name not in trained and name not in self.tied and name not in self.buffers and not unknown
        )
        self._states = {mine(name): state for name, state in contents.states.items()}
        self._by_number = contents.by_number
        self._sizes = contents.numbers

    def _prefix(self, names: list[str], given: str | None) -> str:
        if given is not None:
            return given
        version = str(self.client_state.get("pytorch-lightning_version", ""))
        # Lightning 1.x had a wrapper whose only child was `module`; later, such a name is the user's.
        wrappers = [_WRAPPER, _OLD_WRAPPER] if version.startswith("1.") else [_WRAPPER]
        return next((w for w in wrappers if names and all(name.startswith(w) for name in names)), "")

    def names(self) -> tuple[str, ...]:
        """Parameters, tied ones by each of their names, and buffers that are saved, in the order of the module."""
        return tuple(self._tensors)

    def shapes(self) -> dict[str, torch.Size]:
        """Logical shapes of `names()`."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def stored(self, name: str) -> StoredTensor:
        """A parameter or buffer that stays in its files until parts of it are asked for.

        Raises:
            CheckpointError: when there is none of that name.
        """
        if name not in self._tensors:
            raise CheckpointError(f"{self.folder} has no parameter or buffer {name!r}.")
        return self._tensors[name]

    def parameter(self, name: str) -> torch.Tensor:
        """The master of a trainable parameter, or the values of a frozen one or a buffer, in the logical shape.

        fp32 if it was saved in fp16 or bf16, otherwise as saved; it may be a view of a private map of the file.

        Raises:
            CheckpointError: when there is none of that name.
        """
        return whole(self.stored(name))

    def stored_state(self, name: str) -> dict[str, Any]:
        """The optimizer's state of a parameter: a `StoredTensor` for what has a value per element, else the value.

        Buffers of compressed optimizers that belong to ranks (`worker_error`, `server_error`) are left out.

        Raises:
            CheckpointError: when the checkpoint has no such parameter, or does not say which state is whose.
        """
        self.stored(name)
        if None in self.group_names:
            raise CheckpointError(
                f"{self.folder} was written at stage 0 with several parameter groups, and its optimizer knows "
                "parameters by number only. Build the same optimizer and load its state by order, as to_lightning "
                "gives it."
            )
        return dict(self._states.get(self.tied.get(name, name), {}))

    def state(self, name: str) -> dict[str, Any]:
        """As `stored_state`, read: `exp_avg` and the like in the logical shape, `step` as a 0-dim fp32 tensor.

        Empty for frozen parameters and buffers, and before the first step.
        """
        return {key: read_value(value, whole) for key, value in self.stored_state(name).items()}

    def numbered_states(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """States as `stored_state` gives them, by the number that the parameter has through all groups."""
        if None in self.group_names:
            yield from self._by_number.items()
            return
        for number, name in enumerate(name for names in self.group_names for name in names or ()):
            yield number, self._states.get(name, {})

    def group_sizes(self) -> list[int]:
        """How many parameters each group has. Frozen ones belong to none, except at stage 0."""
        if None in self.group_names:
            return list(self._sizes)
        return [len(names or ()) for names in self.group_names]


def _tensors(
    files: Files, model: Mapping[str, Any], contents: Contents
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Every tensor of the module by the names in the files, and whose the further names of tied ones are."""
    module = model["module"]
    tied = dict(model.get("shared_params") or {})
    buffers = set(model.get("buffer_names") or ())
    shapes = model.get("frozen_param_shapes") or {}
    frozen = _frozen(files, model, shapes)
    by_memory = {
        (values.data_ptr(), values.shape): name
        for name, values in reversed(module.items())
        if torch.is_tensor(values) and values.numel() and name not in buffers
    }
    found: dict[str, StoredTensor] = {}
    for name, values in module.items():
        if not torch.is_tensor(values):
            continue  # extra state of the user's modules
        first = by_memory.get((values.data_ptr(), values.shape), name) if values.numel() else name
        if name not in tied and name not in buffers and first != name:
            tied[name] = first
        source = tied.get(name, name)
        if source in contents.weights:
            found[name] = contents.weights[source]
        elif source in frozen:
            found[name] = frozen[source]
        elif contents.stage < 3 or name in buffers:
            # Stage 1 has no list of frozen parameters, but they are here.
            found[name] = found[source] if source in found else stored(values)
        else:
            raise CheckpointError(
                f"{files.model[0]} has only an empty stand-in for {name}: its values are in none of the files. Save "
                "the checkpoint again with the parameter in the optimizer, or frozen before the engine is made."
            )
    for name, tensor in {**contents.weights, **frozen}.items():
        found.setdefault(name, tensor)
    return found, {name: source for name, source in tied.items() if name in found}


def _frozen(files: Files, model: Mapping[str, Any], shapes: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Parameters that no optimizer has: frozen ones, and ones without elements."""
    if not shapes:
        return {}
    fragments = [model["frozen_param_fragments"]]
    if len(files.model) == 1:
        return {name: stored(fragments[0][name].detach().view(torch.Size(shape))) for name, shape in shapes.items()}
    fragments += [mapping_in(path)["frozen_param_fragments"] for path in files.model[1:]]
    result: dict[str, StoredTensor] = {}
    for name, shape in shapes.items():
        each = -(-math.prod(shape) // len(fragments))
        where = [(rank * each, part[name].detach().reshape(-1)) for rank, part in enumerate(fragments)]
        result[name] = cut(where, 0, torch.Size(shape), files.model)
    return result


def _precision(model: Mapping[str, Any]) -> str:
    config = model.get("ds_config")
    config = config if isinstance(config, Mapping) else {}
    for keys, name in ((("fp16",), "16-mixed"), (("bf16", "bfloat16"), "bf16-mixed")):
        for key in keys:
            block = config.get(key)
            if isinstance(block, Mapping) and block.get("enabled") is True:
                return name
    dtypes = {values.dtype for values in model["module"].values() if torch.is_tensor(values)}
    if torch.float16 in dtypes:
        return "16-mixed"
    return "bf16-mixed" if torch.bfloat16 in dtypes else "32-true"


def _loss_scale(header: Mapping[str, Any]) -> dict[str, Any]:
    """The scaler's numbers: an object's attributes at stages 1 to 3, entries of the optimizer's dict at stage 0."""
    scaler = header.get("loss_scaler")
    source = scaler.attributes if isinstance(scaler, Record) else header
    numbers = {key: source[theirs] for key, theirs in _SCALER.items() if theirs in source}
    return {"dynamic": bool(header.get("dynamic_loss_scale", source.get("dynamic", False))), **numbers}


def _plain(value: Any) -> Any:
    """Containers and paths that are kept as records, as what they were; other records stay."""
    if isinstance(value, Record):
        if value.kind.startswith("omegaconf."):
            return _from_omegaconf(value)
        if value.kind.startswith("pathlib"):
            return Path(*value.args)
        return value
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _plain(item)
        return value
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return tuple(_plain(item) for item in value) if type(value) is tuple else value


def _from_omegaconf(value: Any) -> Any:
    """A container of OmegaConf made anew from its content; Hydra's hyper-parameters are such."""

    def content(node: Any) -> Any:
        if not isinstance(node, Record):
            return _plain(node)
        if "_content" not in node.attributes:
            return _plain(node.attributes.get("_val"))
        inner = node.attributes["_content"]
        if isinstance(inner, dict):
            return {key: content(item) for key, item in inner.items()}
        return [content(item) for item in inner] if isinstance(inner, list) else inner

    found = content(value)
    if not isinstance(found, dict | list):
        return found
    from omegaconf import OmegaConf

    return OmegaConf.create(found)
