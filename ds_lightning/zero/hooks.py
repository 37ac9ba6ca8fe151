"""Registers everything that calls into the engine from outside: modules, parameters and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ds_lightning.zero.gradients import UnitGradients


class PassListener(Protocol):
    """What the hooks on forward and backward call."""

    def before_scope(self, scope: str) -> None:
        """A scope's forward begins."""

    def after_scope(self, scope: str, args: Any, output: Any) -> None:
        """A scope's forward is over, or failed (`output` is None)."""

    def before_root(self) -> None:
        """The model's own forward begins."""

    def after_root(self) -> None:
        """The model's own forward is over, or failed."""

    def gradient_arrived(self, gradients: UnitGradients) -> None:
        """The first, or the last expected, parameter of a unit has its gradient."""


class StateDictListener(Protocol):
    """What the hooks on `state_dict` call."""

    def before_state_dict(self) -> None:
        """Some module's `state_dict` begins."""

    def after_state_dict(self, module: nn.Module, destination: dict[str, Any], prefix: str) -> None:
        """Some module's `state_dict` is filled."""


class OptimizerStateListener(Protocol):
    """What the hooks on an optimizer's state call."""

    def before_state_dict(self, optimizer: torch.optim.Optimizer) -> None:
        """`state_dict` begins."""

    def after_state_dict(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """`state_dict` is made."""

    def before_load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """`load_state_dict` begins."""

    def after_load(self, optimizer: torch.optim.Optimizer) -> None:
        """`load_state_dict` is over."""


class MoveListener(Protocol):
    """What the hook on conversions calls."""

    def before_move(self) -> None:
        """Someone converts the model as a whole: `to`, `cpu`, `half`."""


class _Moves:
    """Stands for a module's `_apply` on the instance: torch has no hook for it."""

    def __init__(self, module: nn.Module, listener: MoveListener) -> None:
        self._module = ref(module)
        self._listener = ref(listener)

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Module:
        module, listener = self._module(), self._listener()
        assert module is not None
        if listener is not None:
            listener.before_move()
        moved: nn.Module = type(module)._apply(module, *args, **kwargs)
        return moved

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copied module is an ordinary one."""
        return memo[id(self._module())]._apply

    def __reduce__(self) -> Any:
        """So is one that is pickled."""
        return getattr, (self._module(), "_apply")


class _Hook:
    """A hook of the engine's on a module; in a copy of the module, also a pickled one, it does nothing."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if self._call is not None:
            self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook()

    def __reduce__(self) -> Any:
        return _Hook, ()


class HookSet:
    """Owns the registrations of one engine."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._by_unit: dict[int, list[RemovableHandle]] = {}
        self._resting: list[RemovableHandle] = []
        self._optimizers: list[tuple[torch.optim.Optimizer, list[RemovableHandle]]] = []
        self._moved: nn.Module | None = None

    def moves(self, module: nn.Module, listener: MoveListener) -> None:
        """Hook conversions of the whole model, such as another strategy's `module.to(device)`."""
        module._apply = _Moves(module, listener)  # type: ignore[method-assign]
        self._moved = module

    def scopes(self, modules: Mapping[str, nn.Module], listener: PassListener) -> None:
        """Hook the forward of gathered modules."""
        for scope, module in modules.items():

            def before(_: nn.Module, __: Any, scope: str = scope) -> None:
                listener.before_scope(scope)

            def after(_: nn.Module, args: Any, output: Any, scope: str = scope) -> None:
                listener.after_scope(scope, args, output)

            self._handles.append(module.register_forward_pre_hook(_Hook(before)))
            self._handles.append(module.register_forward_hook(_Hook(after), always_call=True))

    def root(self, module: nn.Module, listener: PassListener) -> None:
        """Hook the model's own forward."""
        self._handles.append(module.register_forward_pre_hook(_Hook(lambda _, __: listener.before_root())))
        after = _Hook(lambda _, __, ___: listener.after_root())
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def state_dicts(self, modules: Iterable[nn.Module], listener: StateDictListener) -> None:
        """Hook `state_dict` of every module that may own a sharded parameter."""
        for module in modules:
            before = _Hook(lambda *_: listener.before_state_dict())
            self._handles.append(module.register_state_dict_pre_hook(before))

            def after(module: nn.Module, destination: dict[str, Any], prefix: str, _: Any) -> None:
                listener.after_state_dict(module, destination, prefix)

            self._handles.append(module.register_state_dict_post_hook(_Hook(after)))

    def gradients(self, gradients: UnitGradients, listener: PassListener) -> None:
        """Hook the gradients of a unit's parameters.

        The garbage collector does not see what autograd holds, so a hook must not keep its own parameter alive.
        """
        owner, unit = ref(listener), ref(gradients)

        def arrived(_: torch.Tensor) -> None:  # runs for every parameter in every backward: one frame, no more
            arrivals = unit()
            if arrivals is None:
                return
            arrivals.ready += 1
            if arrivals.ready == 1 or arrivals.ready >= arrivals.expected:
                engine = owner()
                if engine is not None:
                    engine.gradient_arrived(arrivals)

        handles = self._by_unit[gradients.unit.index] = []
        for parameter in gradients.parameters:
            if not parameter.is_floating_point():
                continue
            handles.append(_on_gradient(parameter, arrived))

    def resting(self, arrived: Iterable[tuple[nn.Parameter, Callable[[torch.Tensor], None]]]) -> None:
        """Hook gradients of frozen parameters that are in no unit with gradients, instead of those hooked before.

        Args:
            arrived: by parameter, what is called when it has got one.
        """
        for handle in self._resting:
            handle.remove()
        self._resting = [_on_gradient(p, call) for p, call in arrived if p.is_floating_point()]

    def optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        before_step: Callable[[Any, Any], None],
        after_step: Callable[[], None],
        after_zero_grad: Callable[[], None],
        states: OptimizerStateListener,
    ) -> None:
        """Hook an optimizer's `step`, `zero_grad`, `state_dict` and `load_state_dict`.

        torch has no hook for `zero_grad`, so the instance (not the class) gets one of its own that calls the original.
        """
        original = optimizer.zero_grad

        def zero_grad(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            after_zero_grad()

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        handles = [
            optimizer.register_step_pre_hook(lambda _, args, kwargs: before_step(args, kwargs)),
            optimizer.register_step_post_hook(lambda _, __, ___: after_step()),
            optimizer.register_state_dict_pre_hook(states.before_state_dict),
            optimizer.register_state_dict_post_hook(states.after_state_dict),
            optimizer.register_load_state_dict_pre_hook(states.before_load),
            optimizer.register_load_state_dict_post_hook(states.after_load),
        ]
        self._optimizers.append((optimizer, handles))

    def remove_gradients(self, index: int) -> None:
        """Unhook a unit's parameters."""
        for handle in self._by_unit.pop(index, []):
            handle.remove()

    def remove_optimizers(self) -> None:
        """Unhook all optimizers."""
        for optimizer, handles in self._optimizers:
            optimizer.__dict__.pop("zero_grad", None)
            for handle in handles:
                handle.remove()
        self._optimizers = []

    def remove(self) -> None:
        """Unhook everything."""
        self.remove_optimizers()
        if self._moved is not None:
            self._moved.__dict__.pop("_apply", None)
            self._moved = None
        for index in list(self._by_unit):
            self.remove_gradients(index)
        for handle in (*self._resting, *self._handles):
            handle.remove()
        self._resting = []
        self._handles = []


def _on_gradient(parameter: nn.Parameter, arrived: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Hook a parameter's gradient. It may be frozen and unfrozen at any time; torch takes hooks of others only."""
    wanted = parameter.requires_grad
    parameter.requires_grad_(True)
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(arrived)
    parameter.requires_grad_(wanted)
    return handle


def tensors_in(value: Any, depth: int = 0) -> list[torch.Tensor]:
    """All tensors in nested outputs: tuples, lists, dicts, dataclasses and plain objects."""
    if isinstance(value, torch.Tensor):
        return [value]
    if depth > 6 or value is None or isinstance(value, str | bytes | int | float | nn.Module):
        return []
    if isinstance(value, Mapping):
        members: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        members = value
    elif hasattr(value, "__dict__"):
        members = vars(value).values()
    else:
        members = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
    return [tensor for member in members for tensor in tensors_in(member, depth + 1)]


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_MOST_KEPT = 64  # longer lists are data


def tensors_kept(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Tensors with a graph in attributes of modules: an auxiliary loss that the model adds up later."""
    found: list[torch.Tensor] = []
    for module in modules:
        attributes = vars(module)
        for name in attributes.keys() - _MODULE_ATTRIBUTES:
            value = attributes[name]
            if isinstance(value, list | tuple | dict) and len(value) <= _MOST_KEPT:
                members: Iterable[Any] = value.values() if isinstance(value, dict) else value
            else:
                members = (value,)
            found += [m for m in members if isinstance(m, torch.Tensor) and m.grad_fn is not None]
    return found
