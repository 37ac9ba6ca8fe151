"""The base of the optimizers whose step is a native op on all tensors of a group at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ds_lightning.errors import ConfigError
from ds_lightning.ops.blocks import Blocks
from ds_lightning.ops.optim import increment
from ds_lightning.optim.codec import StateCodec
from ds_lightning.optim.parts import Parts

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_TORCH_ONLY = frozenset({"amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused"})


@dataclass(frozen=True, slots=True)
class Preparation:
    """What the next step does besides its own work; see `NativeOptimizer.prepare_step`."""

    grad_scale: float = 1.0
    copies: Mapping[Tensor, Tensor] = field(default_factory=dict)
    gradients: Mapping[Tensor, Tensor] = field(default_factory=dict)
    blocks: Mapping[Tensor, Blocks] = field(default_factory=dict)
    parts: Parts | None = None


_NOTHING = Preparation()


@dataclass(frozen=True, slots=True)
class Slices:
    """The parameters of a group that have a gradient, with all that a step reads and writes.

    Attributes:
        params: the parameters.
        grads: their gradients.
        states: their states.
        copies: what receives the updated values; empty where nothing does.
    """

    params: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Any]]
    copies: list[Tensor | None]

    def take(self, places: Sequence[int]) -> Slices:
        """Some of them, by index."""
        return Slices(
            [self.params[k] for k in places],
            [self.grads[k] for k in places],
            [self.states[k] for k in places],
            [self.copies[k] for k in places] if self.copies else [],
        )


class NativeOptimizer(torch.optim.Optimizer):
    """Steps on all tensors of a group by one native call, where there is a kernel, else by torch's operations.

    The kernels are for contiguous fp32 parameters on a CPU or CUDA device; other dtypes and layouts are updated by the
    op's reference, to the same formula. States have the keys and formats of `torch.optim`, so checkpoints can be
    exchanged with it; they are made when a parameter first has a gradient.

    Args:
        params: parameters or groups of them, as of any optimizer.
        defaults: values of the groups' keys.
        torch_only: switches of `torch.optim` that are refused, in words, where they are on.

    Raises:
        ConfigError: for a switch that only `torch.optim` has.
        TypeError: for an argument that nobody knows.
    """

    moments: ClassVar[tuple[str, ...]] = ()
    """Keys of the states with one value per element."""

    codec: ClassVar[StateCodec | None] = None
    """How states are kept, where that is not as `torch.optim` keeps them."""

    needs_parts: ClassVar[bool] = False
    """Whether a step looks at whole parameters, and so must know which of them lie in the tensors of the groups."""

    _preparation: Preparation = _NOTHING

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        torch_only: Mapping[str, Any] = {},
    ) -> None:
        for name in torch_only:
            if name not in _TORCH_ONLY:
                raise TypeError(f"{type(self).__name__} has no argument {name!r}.")
        self._refuse(torch_only)
        super().__init__(params, defaults)

    def prepare_step(
        self,
        *,
        grad_scale: float = 1.0,
        copies: Mapping[Tensor, Tensor] | None = None,
        gradients: Mapping[Tensor, Tensor] | None = None,
        blocks: Mapping[Tensor, Blocks] | None = None,
        parts: Parts | None = None,
    ) -> None:
        """Have the next `step()`, and no later one, do more in its pass over memory.

        Args:
            grad_scale: multiplies gradients on the way, as unscaling and clipping do; `p.grad` keeps its values.
            copies: tensors of the size of a parameter, bf16 or fp16 for the kernels, by parameter: they receive the
                updated values.
            gradients: what to use instead of `p.grad`, by parameter; they may be of 16 bits, which torch does not
                accept as `p.grad` of an fp32 parameter.
            blocks: for states that are made in this step and that are encoded in blocks, how to cut them, by parameter;
                one segment where nothing is said.
            parts: which parameters lie where in the tensors of the groups, for optimizers that look at whole ones;
                None: each tensor is a parameter.
        """
        self._preparation = Preparation(float(grad_scale), copies or {}, gradients or {}, blocks or {}, parts)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: computes gradients and returns the loss.

        Returns:
            What the closure returns, or None.
        """
        preparation, self._preparation = self._preparation, _NOTHING
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._refuse(group)
        self._step_groups([self._slices(group, preparation) for group in self.param_groups], preparation)
        return loss

    @torch.no_grad()
    def step_aside(self, group: dict[str, Any], slices: Slices, grad_scale: float = 1.0) -> None:
        """Step on tensors that are in no group, with states that are not in `state`. Any thread may call it.

        Args:
            group: hyper-parameters, with the keys of a group.
            slices: what the step reads and writes; states that are missing are made.
            grad_scale: multiplies gradients on the way.
        """
        self._refuse(group)
        if slices.params:
            self._step(group, slices, grad_scale)

    def _step_groups(self, slices: Sequence[Slices], preparation: Preparation) -> None:
        """Update the parameters of all groups."""
        for group, part in zip(self.param_groups, slices, strict=True):
            if part.params:
                self._step(group, part, preparation.grad_scale)

    def _step(self, group: dict[str, Any], slices: Slices, grad_scale: float) -> None:
        """Update the parameters of one group."""
        raise NotImplementedError

    def _initial(self, name: str, param: Tensor, dtype: torch.dtype, group: Mapping[str, Any]) -> Tensor:
        """The first value of a state with one value per element."""
        return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)

    def _slices(self, group: Mapping[str, Any], preparation: Preparation) -> Slices:
        params: list[Tensor] = group["params"]
        given = preparation.gradients
        found = [given.get(p, p.grad) for p in params] if given else [p.grad for p in params]
        if any([g is None for g in found]):
            params = [p for p, g in zip(params, found, strict=True) if g is not None]
        grads = [g for g in found if g is not None]
        copies: list[Tensor | None] = []
        if preparation.copies:
            copies = [preparation.copies.get(p) for p in params]
        return Slices(params, grads, [self.state[p] for p in params], copies)

    def _moments(self, group: Mapping[str, Any], slices: Slices, name: str) -> list[Tensor]:
        """One state of all slices, made where it is missing, in the dtype that the group asks for."""
        try:
            values = [state[name] for state in slices.states]
        except KeyError:
            for param, state in zip(slices.params, slices.states, strict=True):
                if state.get(name) is None:
                    state[name] = self._initial(name, param, _moment_dtype(group, param), group)
            values = [state[name] for state in slices.states]
        if group["moment_dtype"] != "fp32":
            for state, param, value in zip(slices.states, slices.params, values, strict=True):
                if value.dtype != _moment_dtype(group, param):  # loading may cast to the dtype of the parameter
                    state[name] = value.to(_moment_dtype(group, param))
            values = [state[name] for state in slices.states]
        return values

    def _counts(self, slices: Slices) -> dict[float, Slices]:
        """Add 1 to the step counts; the slices by their new count."""
        for state in slices.states:
            if "step" not in state:
                state["step"] = torch.tensor(0.0)
        values = increment([state["step"] for state in slices.states])
        if min(values) == max(values):
            return {values[0]: slices}
        places: dict[float, list[int]] = {}
        for k, value in enumerate(values):
            places.setdefault(value, []).append(k)
        return {value: slices.take(chosen) for value, chosen in places.items()}

    def _rounds(self, group: Mapping[str, Any], slices: Slices) -> Iterable[tuple[int, Slices]]:
        """Slices by the seed of their moments' rounding, in optimizers that count no steps otherwise."""
        if group["moment_dtype"] == "fp32":
            return ((0, slices),)
        return [(int(count), part) for count, part in self._counts(slices).items()]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of this class or of its counterpart in `torch.optim`.

        Raises:
            ConfigError: for groups that ask for what only `torch.optim` has.
        """
        for group in state_dict["param_groups"]:
            self._refuse(group)
        super().load_state_dict(state_dict)
        # It casts states to the dtype of the parameter, which may have fewer bits than its moments.
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for param, number in zip(group["params"], saved["params"], strict=True):
                for name, value in self.state.get(param, {}).items():
                    wanted = _moment_dtype(group, param)
                    if name in self.moments and torch.is_tensor(value) and value.dtype != wanted:
                        found = state_dict["state"][number][name]
                        self.state[param][name] = found.to(device=param.device, dtype=wanted, copy=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        for entry in self.state.values():
            step = entry.get("step")
            if step is not None and not (torch.is_tensor(step) and step.is_cpu and step.dtype == torch.float32):
                entry["step"] = torch.tensor(float(step))

    def _refuse(self, switches: Mapping[str, Any]) -> None:
        found = [name for name in ("amsgrad", "maximize", "capturable", "differentiable") if switches.get(name)]
        if found:
            raise ConfigError(
                f"{type(self).__name__} was asked for {', '.join(f'{name}=True' for name in found)}, which only "
                "torch.optim has. Leave it out, or use the class of torch.optim."
            )


def check_positive(**numbers: Any) -> None:
    """Refuse hyper-parameters below 0, by name.

    Raises:
        ValueError: for the first of them.
    """
    for name, value in numbers.items():
        if not float(value) >= 0:
            raise ValueError(f"{name}={value!r} is not a number of at least 0.")


def moment_dtype_name(moment_dtype: str | torch.dtype, fp32_optimizer_states: bool = True) -> str:
    """What a group keeps of the dtype of moments: "fp32", "bf16", or "param" for that of the parameter.

    Args:
        moment_dtype: a name or the dtype itself.
        fp32_optimizer_states: DeepSpeed's switch; False means the dtype of the parameter.

    Raises:
        ConfigError: for another dtype, or for two different wishes.
    """
    name = moment_dtype
    if isinstance(moment_dtype, torch.dtype):
        name = next((known for known, dtype in _DTYPES.items() if dtype == moment_dtype), moment_dtype)
    if name not in (*_DTYPES, "param"):
        raise ConfigError(f"moment_dtype={moment_dtype!r} is not one of fp32, bf16 and param (the parameter's own).")
    if not fp32_optimizer_states:
        if name == "bf16":
            raise ConfigError("moment_dtype='bf16' and fp32_optimizer_states=False exclude each other; give one.")
        return "param"
    return str(name)


def _moment_dtype(group: Mapping[str, Any], param: Tensor) -> torch.dtype:
    name = group.get("moment_dtype", "fp32")
    if name == "param" or param.dtype == torch.float64:
        return param.dtype
    return _DTYPES[name]
