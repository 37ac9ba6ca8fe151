"""One model's runtime: wires layout, buffers, residency, reduction and optimizers together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_lightning.comm.agreement import Agreement
from ds_lightning.comm.collectives import Collectives
from ds_lightning.comm.ledger import Ledger
from ds_lightning.errors import ConfigError, ReleasedParameterError
from ds_lightning.layout.flat import Layout, Unit, build_layout
from ds_lightning.layout.units import ROOT, ParamSpec, check_parameters, find_scopes, named_parameters, scope_of
from ds_lightning.optim.clip import GradientNorms
from ds_lightning.optim.elementwise import check_supported
from ds_lightning.optim.sharded import GROUPS, ShardedOptimizer, check_optimizers
from ds_lightning.topology import Topology
from ds_lightning.zero.broadcast import BufferSync
from ds_lightning.zero.buffers import ScratchPool, UnitBuffers
from ds_lightning.zero.hooks import HookSet, tensors_in, tensors_kept
from ds_lightning.zero.options import EngineOptions
from ds_lightning.zero.plan import StagePlan
from ds_lightning.zero.prefetch import GatherOrder
from ds_lightning.zero.reduce import GradientReducer, UnitGradients
from ds_lightning.zero.residency import TAGS, Residency, ResidencyManager
from ds_lightning.zero.uneven import UnevenEvaluation

VALUES_TAG = 3


class ZeroEngine:
    """Shards one module and its optimizers. Construction is collective.

    Args:
        module: its parameters become views of flat buffers; rank 0's values win on every rank.
        optimizers: the user's; none for evaluation.
        topology: ranks and groups.
        plan: the stage.
        options: from the configuration.
        read: gives the full value of a parameter, for modules that were built sharded.

    Raises:
        ConfigError: for parameters, modules or optimizers that cannot be sharded, before anything is changed.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        topology: Topology,
        plan: StagePlan,
        options: EngineOptions | None = None,
        read: Callable[[nn.Parameter], torch.Tensor] | None = None,
    ) -> None:
        self.module = module
        self.topology = topology
        self.plan = plan
        self.options = options or EngineOptions()
        self.ledger = Ledger()
        self.agreement = Agreement(topology)
        self.collectives = Collectives.create(topology, self.ledger)
        self.pool = ScratchPool(topology.device)
        self.hooks = HookSet()
        self.norms = GradientNorms(self.agreement)
        self.backwards = 0  # that are over
        self.failed = False
        self.dissolved = False

        named = named_parameters(module)
        check_parameters(named)
        _check_modules(module)
        self._names = {id(parameter): names[0] for names, parameter in named}
        self.optimizers = self._wrap(optimizers)
        self._scopes = find_scopes(module, self.options.leaves)
        self._parameters = {names[0]: parameter for names, parameter in named}
        self._aliases = {names[0]: names[1:] for names, _ in named}
        self._owners = _owners(module)

        self._depth = 0
        self._opened: list[str] = []  # forwards outside a step that opened a scope of their own
        self._touched: set[int] = set()
        self._in_backward = False
        self._entered: tuple[int, ...] = ()  # the units that backward entered last
        self._bracketed = False
        self._tasks: set[int] = set()
        self._evaluating = False
        self._uneven: UnevenEvaluation | None = None
        self._state_dict_depth = 0
        self._collected: Mapping[str, torch.Tensor] | None = None
        self._loading = False
        self._versions: dict[int, tuple[int, ...]] = {}
        self._scope_units: dict[str, list[int]] = {}
        self._scope_modules: dict[str, list[nn.Module]] = {}

        self.units: dict[int, UnitBuffers] = {}
        self._where: dict[str, tuple[int, int]] = {}
        self.residency = ResidencyManager((), self.collectives, self.options.allgather_piece, self._touch)
        self.reducer = GradientReducer(
            (), plan, self.collectives, self.agreement, self.pool, self.options.reduce, self.residency.release
        )
        self._add_units(build_layout(self._specs(named), topology.world_size, self.options.layout), read or _value)
        self._orders = {True: GatherOrder(self._numels()), False: GatherOrder(self._numels())}
        self._buffer_sync = BufferSync(module, self.collectives)
        self._buffer_sync.run()
        self._hook_everything()
        self._signature = self._group_signature()

    # Set-up ---------------------------------------------------------------------------------------------------------

    def _wrap(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[ShardedOptimizer]:
        check_optimizers(list(optimizers), self._names, self.name_of)
        return [
            ShardedOptimizer(
                optimizer,
                place * GROUPS,
                check_supported(optimizer, self.plan.stage, self.options.allow_untested_optimizer),
                self.options.tile,
            )
            for place, optimizer in enumerate(optimizers)
        ]

    def _groups(self) -> dict[int, int]:
        """Parameter group by `id` of the parameter."""
        return {
            id(parameter): sharded.first_group + place
            for sharded in self.optimizers
            for place, parameters in enumerate(sharded.user_params())
            for parameter in parameters
        }

    def _specs(self, named: Sequence[tuple[tuple[str, ...], nn.Parameter]]) -> list[ParamSpec]:
        groups = self._groups()
        specs = []
        for names, parameter in named:
            group = groups.get(id(parameter), -1)
            if group >= 0 and not parameter.is_floating_point():
                raise ConfigError(f"{names[0]} ({parameter.dtype}) is in an optimizer, but has no gradient.")
            current = self._where.get(names[0])
            if current is None:
                dtype, master = self.options.dtypes.of(self._owners[names[0]], parameter)
            else:  # laid out before: it computes as it did
                unit = self.units[current[0]].unit
                dtype, master = unit.dtype, unit.master_dtype
                if group >= 0 and master != torch.float32 and self.options.dtypes.compute is not None:
                    master = torch.float32
            scope = scope_of(names, self._scopes)
            specs.append(
                ParamSpec(
                    names[0], tuple(names[1:]), parameter.shape, dtype, master, group, scope, parameter.requires_grad
                )
            )
        return specs

    def _add_units(self, layout: Layout, read: Callable[[nn.Parameter], torch.Tensor]) -> None:
        for unit in layout.units:
            parameters = [self._parameters[slot.name] for slot in unit.slots]
            buffers = UnitBuffers(unit, parameters, self.plan, self.topology.rank)
            buffers.fill(read, partial(self.collectives.broadcast, what=unit.name), self.topology.device)
            self.units[unit.index] = buffers
            for place, slot in enumerate(unit.slots):
                self._where[slot.name] = (unit.index, place)
            self.residency.add(buffers)
            if unit.trainable:
                self.reducer.add(buffers)
                gradients = self.reducer.units[unit.index]
                self.hooks.gradients(gradients, self)
                for sharded in self.optimizers:
                    sharded.adopt(gradients)
        self._scope_units = {}
        for index, buffers in self.units.items():
            if buffers.sharded:
                self._scope_units.setdefault(buffers.unit.scope, []).append(index)
        for sharded in self.optimizers:
            groups = sharded.groups
            sharded.units = tuple(
                gradients
                for gradients in self.reducer.units.values()
                if any(slot.group in groups for slot in gradients.unit.slots)
            )

    def _hook_everything(self) -> None:
        self.hooks.moves(self.module, self)
        if any(buffers.sharded for buffers in self.units.values()):
            modules = dict(self.module.named_modules())
            self.hooks.root(self.module, self)
            self.hooks.scopes({scope: modules[scope] for scope in self._scopes}, self)
            self._scope_modules = {scope: list(modules[scope].modules()) for scope in self._scopes}
        if any(buffers.sharded or not buffers.aliased for buffers in self.units.values()):
            self.hooks.state_dicts(self.module.modules(), self)
        for sharded in self.optimizers:
            self._hook_optimizer(sharded)

    def _hook_optimizer(self, sharded: ShardedOptimizer) -> None:
        self.hooks.optimizer(
            sharded.optimizer,
            before_step=lambda args, kwargs: self._before_step(sharded, args, kwargs),
            after_step=lambda: self._after_step(sharded),
            after_zero_grad=lambda: self._after_zero_grad(sharded),
        )

    def _numels(self) -> dict[int, int]:
        return {index: buffers.unit.numel for index, buffers in self.units.items()}

    def _group_signature(self) -> list[list[int]]:
        return [[len(parameters) for parameters in sharded.user_params()] for sharded in self.optimizers]

    def set_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Train with other optimizers: a second `fit`, or a tuner that builds them anew. Collective."""
        old = self.optimizers
        known = {id(sharded.optimizer): sharded for sharded in old}
        if len(old) == len(optimizers) and all(id(optimizer) in known for optimizer in optimizers):
            return
        new = self._wrap(optimizers)
        self.hooks.remove_optimizers()
        self.optimizers = new
        self._relayout(everything=True)
        for sharded in self.optimizers:
            self._hook_optimizer(sharded)

    def follow_groups(self) -> None:
        """Take in parameters that someone (a finetuning callback) has put into groups, or out of them. Collective."""
        if self._signature != self._group_signature():
            self._relayout()

    def _relayout(self, everything: bool = False) -> None:
        """Lay out anew the units of which some parameter has come to, or left, a group. Collective."""
        groups = self._groups()
        affected = {
            index
            for index, buffers in self.units.items()
            if everything
            or any(
                groups.get(id(parameter), -1) != slot.group
                for slot, parameter in zip(buffers.unit.slots, buffers.parameters, strict=True)
            )
        }
        names = [slot.name for index in sorted(affected) for slot in self.units[index].unit.slots]
        specs = self._specs([((name, *self._aliases[name]), self._parameters[name]) for name in names])
        states = {} if everything else self._optimizer_states(affected)
        values: dict[int, torch.Tensor] = {}
        self.residency.release_all()
        for index in sorted(affected):
            full = self.full_values(index)
            buffers = self.units[index]
            for slot, parameter in zip(buffers.unit.slots, buffers.parameters, strict=True):
                values[id(parameter)] = full[slot.start : slot.stop].view(slot.shape).clone()
            self._remove_unit(index)
        first = max(list(self.units) + sorted(affected)) + 1
        layout = build_layout(specs, self.topology.world_size, self.options.layout, first)
        self._add_units(layout, lambda parameter: values.pop(id(parameter)))
        for sharded in self.optimizers:
            for unit in layout.units:
                found = {s.name: states[s.name] for s in unit.slots if s.name in states}
                if found and unit.trainable:
                    sharded.load_unit(self.reducer.units[unit.index], found)
        self._orders = {True: GatherOrder(self._numels()), False: GatherOrder(self._numels())}
        self._signature = self._group_signature()

    def _optimizer_states(self, units: set[int]) -> dict[str, dict[str, Any]]:
        """Full optimizer states of all parameters of these units. Collective."""
        found: dict[str, dict[str, Any]] = {}
        for index in sorted(units):
            if index in self.reducer.units:
                for sharded in self.optimizers:
                    found.update(self.full_unit_state(sharded, index))
        return found

    def _remove_unit(self, index: int) -> None:
        buffers = self.units.pop(index)
        for parameter in buffers.parameters:
            parameter.__class__ = nn.Parameter
        self.hooks.remove_gradients(index)
        if index in self.reducer.units:
            for sharded in self.optimizers:
                sharded.drop(self.reducer.units[index])
            self.reducer.remove(index)
        self.residency.units.pop(index)

    # Names ----------------------------------------------------------------------------------------------------------

    def name_of(self, parameter: nn.Parameter) -> str:
        """Canonical name of a parameter."""
        return self._names[id(parameter)]

    def unit_of(self, parameter: nn.Parameter) -> int:
        """Index of the unit that holds a parameter."""
        return self._where[self.name_of(parameter)][0]

    def slot_of(self, name: str) -> tuple[Unit, int]:
        """Unit and slot index of a parameter, by canonical name."""
        index, place = self._where[name]
        return self.units[index].unit, place

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter once, by canonical name."""
        yield from self._parameters.items()

    def aliases(self, name: str) -> tuple[str, ...]:
        """Further names of a tied parameter."""
        return tuple(self._aliases[name])

    # A step ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def step_scope(self) -> Iterator[None]:
        """All ranks run the same code inside: values of sharded parameters may be gathered on demand."""
        self._enter()
        try:
            yield
        except BaseException:
            if self._depth == 1 and not self._evaluating:
                self.residency.release_present()  # no backward comes
            raise
        finally:
            self._leave()

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self.follow_groups()
        if not self._evaluating:
            self.residency.release_all()
        self._touched.clear()
        self._order.restart()
        self._buffer_sync.before_forward(torch.is_grad_enabled() and self.reducer.sync)

    def _leave(self) -> None:
        self._depth -= 1
        # With gradients, what was gathered on demand is needed by a backward that comes later.
        if not self._depth and not torch.is_grad_enabled() and not self._evaluating and not self.failed:
            self.residency.release_all()

    @property
    def _order(self) -> GatherOrder:
        return self._orders[torch.is_grad_enabled() or self._in_backward]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside do not communicate where the stage lets gradients accumulate locally (0 and 1)."""
        before, self.reducer.sync = self.reducer.sync, False
        try:
            yield
        finally:
            self.reducer.sync = before

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """An evaluation loop, see `begin_evaluation`."""
        self.begin_evaluation()
        try:
            yield
        finally:
            self.end_evaluation()

    def begin_evaluation(self) -> None:
        """An evaluation loop begins: ranks may have different numbers of batches, or generate different lengths.

        The whole model is gathered once, if it fits into `stage3_max_live_parameters`; then no forward communicates.
        Otherwise ranks announce what they gather, see `UnevenEvaluation`. Collective.
        """
        if self._evaluating or self._uneven is not None:
            return
        self._buffer_sync.before_forward(False)  # now, because a rank may have no batch at all
        total = sum(buffers.unit.numel for buffers in self.units.values() if buffers.sharded)
        if total and total <= self.options.max_live:
            self._evaluating = True
            for index, buffers in self.units.items():
                if buffers.sharded:
                    self.residency.gather(index)
        elif total and self.topology.world_size > 1:
            self.residency.release_all()
            self._uneven = UnevenEvaluation(self.residency, self.agreement)

    def meet(self) -> None:
        """All ranks are about to communicate for a reason of their own: let those catch up that still evaluate."""
        if self._uneven is not None and not self.failed:
            self._uneven.serve()

    def end_evaluation(self) -> None:
        """The evaluation loop is over. Collective."""
        if self._uneven is not None:
            self.meet()
            self._uneven.close()
            self._uneven = None
        if self._evaluating:
            self._evaluating = False
            if not self.failed:
                self.residency.release_all()

    # Forward --------------------------------------------------------------------------------------------------------

    def before_root(self) -> None:
        """The model's own forward begins; outside a step it is one of its own."""
        if not self._depth and not _in_backward_pass() and not self._evaluating:
            self._open("the model's forward")

    def after_root(self) -> None:
        """Close what `before_root` opened."""
        if self._opened and self._depth == 1 and self._opened[-1] == "the model's forward":
            self._opened.pop()
            self._leave()

    def _open(self, what: str) -> None:
        self.agreement.rendezvous(
            f"{what} outside a training, validation, test or predict step",
            "Parameters are sharded, so all ranks must call it together, or inside ds_lightning.gathered(module).",
        )
        self._enter()
        self._opened.append(what)

    def before_scope(self, scope: str) -> None:
        """Gather what the scope's forward needs, and start on what comes after."""
        units = self._scope_units.get(scope, ())
        if not units or self._evaluating:
            return
        backward = _in_backward_pass()
        if not self._depth and not backward:
            if all(self.residency.state(index) is Residency.FULL for index in units):
                return  # inside `gathered`
            self._open(scope)
        self._need(units)

    def _need(self, units: Sequence[int]) -> None:
        order = self._order
        if self._in_backward:
            left, self._entered = self._entered, tuple(units)
            if left != self._entered:  # all ranks enter the same scopes, so they leave them alike
                self.reducer.close([index for index in left if order.reuse_distance(index) is None])
        for index in units:
            order.note(index)
            self.residency.prefetch(index)
        for index in units:
            self.residency.gather(index)
        budget = self.options.prefetch
        if budget is None:
            budget = max(self.units[index].unit.numel for index in self._sharded())
        for index in order.upcoming(min(budget, self.options.max_live - self.residency.live_numel())):
            self.residency.prefetch(index)

    def _sharded(self) -> list[int]:
        return [index for units in self._scope_units.values() for index in units]

    def after_scope(self, scope: str, args: Any, output: Any) -> None:
        """Release the scope, and see to it that it is gathered again before its backward."""
        units = self._scope_units.get(scope, ())
        if not units or self._evaluating:
            return
        opened = bool(self._opened) and self._opened[-1] == scope and self._depth == 1
        if not _in_backward_pass():
            self._release_after_forward(scope, units, output)
        if opened:
            self._opened.pop()
            self._leave()

    def _release_after_forward(self, scope: str, units: Sequence[int], output: Any) -> None:
        if torch.is_grad_enabled():
            tensors = tensors_in(output) + tensors_kept(self._scope_modules[scope])
            with_graph = [tensor for tensor in tensors if tensor.requires_grad]
            failed = output is None and sys.exc_info()[1] is not None
            hidden = not with_graph and not failed and self._requires_grad(units)
            if hidden or any(tensor.is_leaf for tensor in with_graph):
                # Nothing tells when backward enters this scope: keep it.
                for index in units:
                    self.residency.units[index].sticky = True
                    self._touched.add(index)
                return
            for tensor in with_graph:
                tensor.register_hook(lambda _, units=tuple(units): self._before_backward(units))
        limit = self.options.max_reuse_distance or 0
        for index in units:
            distance = self._order.reuse_distance(index)
            if distance is None or distance > limit or not torch.is_grad_enabled():
                self.residency.release(index)

    def _requires_grad(self, units: Sequence[int]) -> bool:
        return any(parameter.requires_grad for index in units for parameter in self.units[index].parameters)

    def _touch(self, index: int, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Someone wants values of a released parameter. See [Note: a released parameter is safe]."""
        if self._loading and func is torch.Tensor.copy_:
            return self._load_parameter(index, args[0], args[1])
        if self._loading or (self._state_dict_depth and func is torch.Tensor.detach):
            with torch._C.DisableTorchFunctionSubclass():
                if self.residency.state(index) is Residency.FULL:
                    return func(*args, **kwargs)
                shape = args[0].shape
                return torch.zeros((), dtype=args[0].dtype, device=args[0].device).expand(shape)
        if func is torch.Tensor.__repr__:
            with torch._C.DisableTorchFunctionSubclass():
                return f"Parameter(sharded by ds_lightning, shape={tuple(args[0].shape)}, dtype={args[0].dtype})"
        if (self._depth or _in_backward_pass()) and not self.failed:
            self.residency.gather(index)
            self.residency.units[index].sticky = True
            self._touched.add(index)
            return func(*args, **kwargs)
        if func in (torch.equal, torch.Tensor.equal) and all(id(a) in self._names for a in args):
            return args[0] is args[1]  # Lightning's finetuning callbacks look for a parameter in this way
        names = [self.name_of(a) for a in _flat(args, kwargs) if id(a) in self._names]
        raise ReleasedParameterError(
            f"{getattr(func, '__name__', func)} reads or writes {', '.join(names) or 'a parameter'}, of which this "
            f"rank holds only its shard (zero_optimization.stage={self.plan.stage}). Outside a training, validation, "
            "test or predict step wrap the access in `with ds_lightning.gathered(module_or_parameters):`, called on "
            "every rank; to change values there, pass modifier_rank."
        )

    # Backward -------------------------------------------------------------------------------------------------------

    @contextmanager
    def backward_scope(self) -> Iterator[None]:
        """The whole of one backward, so that its end is known. Without it, autograd's callback tells."""
        for index in sorted(self._touched):
            if index in self.units:
                self.residency.gather(index)
                self.residency.units[index].sticky = True
        before, self._bracketed = self._bracketed, True
        try:
            yield
        except BaseException:
            self._in_backward = False
            self._entered = ()
            self.reducer.fail()
            raise
        finally:
            self._bracketed = before
        self._finish_backward(release_sticky=True)

    def _begin_backward(self) -> None:
        self._in_backward = True
        if self._bracketed:
            return
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            self._tasks.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._task_is_over(task))

    def _task_is_over(self, task: int) -> None:
        """A nested backward (reentrant checkpointing) ends before the one around it, if that is known."""
        self._tasks.discard(task)
        if not self._tasks and not self._bracketed:
            self._finish_backward(release_sticky=not self._depth)

    def _before_backward(self, units: Sequence[int]) -> None:
        """Autograd is about to enter a scope."""
        self._begin_backward()
        if not self._evaluating:
            self._need([index for index in units if index in self.units])

    def gradient_arrived(self, gradients: UnitGradients) -> None:
        """The first, or the last expected, parameter of a unit has its gradient."""
        if not self._in_backward or not self._bracketed:
            self._begin_backward()
        self.reducer.arrived(gradients)

    def _finish_backward(self, release_sticky: bool) -> None:
        self._in_backward = False
        self._entered = ()
        self.backwards += 1
        self.norms.forget()
        self.reducer.finish()
        if self._evaluating:
            return
        if release_sticky:
            self.residency.release_all()
        else:
            for index in self._sharded():
                self.residency.release(index)

    # Step -----------------------------------------------------------------------------------------------------------

    def sharded(self, optimizer: torch.optim.Optimizer) -> ShardedOptimizer:
        """What runs `optimizer` on this rank."""
        for candidate in self.optimizers:
            if candidate.optimizer is optimizer or candidate.optimizer is getattr(optimizer, "optimizer", None):
                return candidate
        raise ConfigError(
            f"{type(optimizer).__name__} is not one of the optimizers that were sharded. Return every optimizer from "
            "configure_optimizers."
        )

    def _before_step(self, sharded: ShardedOptimizer, args: Any, kwargs: Any) -> None:
        if any(arg is not None for arg in args[1:]) or kwargs.get("closure") is not None:
            raise ConfigError(
                "optimizer.step(closure) would run backward while the optimizer's groups hold shards. Run the closure "
                "first and call step() without it; Lightning's own loops do."
            )
        self.absorb()
        self.norms.step_begins(sharded)
        sharded.swap_in()

    def _after_step(self, sharded: ShardedOptimizer) -> None:
        sharded.swap_out()
        touched = sharded.touched_units()
        self.residency.republish(touched)
        for index in touched:
            if index in self._versions:  # our own writes are no news to `absorb`
                self._versions[index] = _versions_of(self.units[index])

    def _after_zero_grad(self, sharded: ShardedOptimizer) -> None:
        self.reducer.zero(sharded.groups)
        self.norms.forget()

    def absorb(self) -> None:
        """Take over what users wrote into 16-bit parameters that are not sharded (weight averaging, constraints)."""
        for index, buffers in self.units.items():
            if buffers.sharded or buffers.aliased or not buffers.unit.trainable:
                continue
            versions = _versions_of(buffers)
            if versions != self._versions.get(index, versions):
                self._absorb_unit(index)
            self._versions[index] = versions

    def _absorb_unit(self, index: int) -> None:
        """Master values follow `full` where the two differ by more than rounding."""
        buffers = self.units[index]
        with torch.no_grad():
            if buffers.full.dtype == buffers.master.dtype:
                if buffers.sharded:
                    buffers.master.copy_(buffers.own_chunk())
                return
            current = buffers.full[buffers.start : buffers.stop]
            changed = current.ne(buffers.master.to(current.dtype))
            buffers.master.copy_(torch.where(changed, current.to(buffers.master.dtype), buffers.master))

    # Full values ----------------------------------------------------------------------------------------------------

    def full_values(self, index: int, everywhere: bool = True) -> torch.Tensor:
        """Master values of a whole unit, `[unit.numel]`. Collective.

        Args:
            index: the unit.
            everywhere: on every rank; otherwise only rank 0's result means anything.
        """
        buffers = self.units[index]
        if buffers.master.numel() == buffers.unit.numel:
            return buffers.master
        if buffers.aliased:
            return buffers.full
        return self.spread(index, buffers.master, buffers.master.dtype, everywhere)

    def spread(self, index: int, own: torch.Tensor | None, dtype: torch.dtype, everywhere: bool = True) -> torch.Tensor:
        """Put every rank's chunk of a unit-sized tensor together, zeros where a rank has none. Collective."""
        buffers = self.units[index]
        self.meet()
        with torch.no_grad(), torch.inference_mode(False):
            full = torch.zeros(buffers.unit.numel, dtype=dtype, device=self.topology.device)
            if own is not None:
                full[buffers.owned[0] : buffers.owned[1]].copy_(own)
            tag, name = index * TAGS + VALUES_TAG, buffers.unit.name
            if everywhere:
                self.collectives.all_gather(full, name, tag, full.numel()).wait()
            else:
                self.collectives.collect(full, name, tag).wait()
        return full

    def full_unit_state(
        self, sharded: ShardedOptimizer, index: int, everywhere: bool = True
    ) -> dict[str, dict[str, Any]]:
        """Optimizer state of a unit's parameters in logical shapes, by name and key. Collective.

        On other ranks than 0 it is empty unless `everywhere`.
        """
        gradients = self.reducer.units[index]
        unit = gradients.unit
        mine = sharded.unit_state(gradients)
        outline = {
            name: {
                key: ("elements", value[1].dtype) if isinstance(value, tuple) else ("value", _portable(value))
                for key, value in entry.items()
            }
            for name, entry in mine.items()
        }
        known: dict[str, dict[str, Any]] = {}
        for other in self.agreement.everyone(outline):
            for name, entry in other.items():
                known.setdefault(name, {}).update(entry)
        keys = sorted({(k, v[1]) for entry in known.values() for k, v in entry.items() if v[0] == "elements"}, key=str)
        whole: dict[str, torch.Tensor] = {}
        buffers = self.units[index]
        for key, dtype in keys:
            local = torch.zeros(unit.numel, dtype=dtype, device=self.topology.device)
            for entry in mine.values():
                if isinstance(entry.get(key), tuple):
                    start, values = entry[key]
                    local[start : start + values.numel()].copy_(values)
            if self.plan.shard_optimizer:
                own = local[buffers.owned[0] : buffers.owned[1]]
                local = self.spread(index, own, dtype, everywhere)
            whole[key] = local
        if not everywhere and self.topology.rank:
            return {}
        result: dict[str, dict[str, Any]] = {}
        template = next(iter(known.values()), {})
        for slot in unit.slots:
            entry = known.get(slot.name)
            if entry is None and not slot.numel and slot.group in sharded.groups:
                entry = template  # a parameter without elements lies on no rank
            if entry:
                result[slot.name] = {
                    key: whole[key][slot.start : slot.stop].view(slot.shape) if kind == "elements" else value
                    for key, (kind, value) in entry.items()
                }
        return result

    # Loading and saving ---------------------------------------------------------------------------------------------

    @contextmanager
    def loading(self) -> Iterator[None]:
        """`load_state_dict` inside writes every rank's shard, without communication; all ranks load the same values."""
        for entry in self.residency.units.values():
            for parameter in entry.buffers.parameters:
                parameter.__class__ = entry.released
        self._loading = True
        try:
            yield
        finally:
            self._loading = False
            for entry in self.residency.units.values():
                if entry.state is Residency.FULL:
                    for parameter in entry.buffers.parameters:
                        parameter.__class__ = nn.Parameter

    def _load_parameter(self, index: int, parameter: nn.Parameter, source: torch.Tensor) -> nn.Parameter:
        buffers = self.units[index]
        unit = buffers.unit
        slot = unit.slots[self._where[self.name_of(parameter)][1]]
        flat = source.detach().reshape(-1)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            if self.residency.state(index) is Residency.FULL:
                buffers.full[slot.start : slot.stop].copy_(flat)
                torch.autograd.graph.increment_version(parameter)
            start, stop = max(slot.start, buffers.start), min(slot.stop, buffers.stop)
            if stop > start:
                target = buffers.master[start - buffers.start : stop - buffers.start]
                target.copy_(flat[start - slot.start : stop - slot.start])
        self._versions.pop(index, None)
        return parameter

    def before_state_dict(self) -> None:
        """Some module's `state_dict` begins."""
        direct = not self._state_dict_depth and self._collected is None
        if direct and any(len(b.master) < b.unit.numel and not self._is_current(i) for i, b in self.units.items()):
            self.agreement.rendezvous(
                "state_dict() of a sharded module", "Call it on every rank, or save with trainer.save_checkpoint."
            )
        self._state_dict_depth += 1

    def _is_current(self, index: int) -> bool:
        """Whether a unit's parameters show its master values, or what `gathered` promises instead."""
        return self.units[index].aliased or self.residency.units[index].pins > 0

    def after_state_dict(self, module: nn.Module, destination: dict[str, Any], prefix: str) -> None:
        """Some module's `state_dict` is filled: put full master values where only shards, or 16-bit values, are."""
        self._state_dict_depth -= 1
        for local, parameter in module._parameters.items():
            if parameter is None or prefix + local not in destination or id(parameter) not in self._names:
                continue
            name = self.name_of(parameter)
            if self._collected is not None:
                if name in self._collected:
                    destination[prefix + local] = self._collected[name]
                continue
            unit, place = self.slot_of(name)
            if not self._is_current(unit.index):
                slot = unit.slots[place]
                full = self.full_values(unit.index)
                destination[prefix + local] = full[slot.start : slot.stop].view(slot.shape).clone()

    @contextmanager
    def collected(self, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """`state_dict` inside shows these values, by canonical name, and does not communicate."""
        self._collected = values
        try:
            yield
        finally:
            self._collected = None

    # `gathered` -----------------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self, parameters: Sequence[nn.Parameter], modifier_rank: int | None = None) -> Iterator[None]:
        """Full values inside. Collective on entry, and on exit with `modifier_rank`; see `ds_lightning.gathered`."""
        units = sorted({self.unit_of(parameter) for parameter in parameters})
        for index in units:
            self.residency.prefetch(index)
        for index in units:
            self.residency.gather(index)
            self.residency.units[index].pins += 1
        versions = [parameter._version for parameter in parameters]
        try:
            yield
            changed = [p for p, version in zip(parameters, versions, strict=True) if p._version != version]
            if modifier_rank is not None:
                self._keep_changes(parameters, units, modifier_rank)
            elif changed:
                raise ReleasedParameterError(
                    f"{', '.join(self.name_of(p) for p in changed[:5])} changed inside ds_lightning.gathered(...). "
                    "Changes are kept only with modifier_rank: the values of that rank are then sent to all others."
                )
        finally:
            for index in units:
                entry = self.residency.units[index]
                entry.pins -= 1
                if not self._depth and not self._evaluating:
                    self.residency.release(index)

    def _keep_changes(self, parameters: Sequence[nn.Parameter], units: Sequence[int], modifier_rank: int) -> None:
        with torch.no_grad():
            for parameter in parameters:
                self.collectives.broadcast(parameter.detach(), self.name_of(parameter), modifier_rank)
            for index in units:
                self._absorb_unit(index)

    # End ------------------------------------------------------------------------------------------------------------

    def model_state_bytes(self) -> int:
        """Bytes of parameters, reduced gradients and optimizer states that this rank holds between steps."""
        return (
            sum(buffers.state_nbytes for buffers in self.units.values())
            + self.reducer.state_nbytes
            + sum(sharded.state_nbytes for sharded in self.optimizers)
        )

    def abort(self) -> None:
        """A rank has failed: communicate no more."""
        self.failed = True
        if self._uneven is not None:
            self._uneven.close()
            self._uneven = None
        self.residency.abandon()
        self.reducer.abandon()
        for sharded in self.optimizers:
            sharded.swap_out()

    def before_move(self) -> None:
        """The whole module is moved or cast, by its user or by another strategy: it becomes a plain one first."""
        if self._depth:
            raise ConfigError("A module cannot be moved or cast inside a step while its parameters are sharded.")
        if any(len(b.master) < b.unit.numel and not b.aliased for b in self.units.values()):
            self.agreement.rendezvous(
                "moving or casting a sharded module", "It is made whole first; call `to`, `cpu` ... on every rank."
            )
        self.dissolve()

    def dissolve(self) -> None:
        """Turn the module into a plain one with full parameters, and forget it. Collective."""
        self.dissolved = True
        self.residency.release_all()
        for index in list(self.units):
            full = self.full_values(index).clone()
            buffers = self.units[index]
            self._remove_unit(index)
            buffers.dissolve(full)
        self.hooks.remove()


def _value(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.detach()


def _versions_of(buffers: UnitBuffers) -> tuple[int, ...]:
    return tuple(parameter._version for parameter in buffers.parameters)


def _in_backward_pass() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _flat(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    found: list[Any] = []
    for value in (*args, *kwargs.values()):
        found += value if isinstance(value, list | tuple) else [value]
    return found


def _portable(value: Any) -> Any:
    return value.detach().cpu() if torch.is_tensor(value) else value


def _owners(module: nn.Module) -> dict[str, nn.Module]:
    """The module that registers each parameter, by canonical name."""
    owners: dict[str, nn.Module] = {}
    for prefix, owner in module.named_modules():
        for local in owner._parameters:
            owners[f"{prefix}.{local}" if prefix else local] = owner
    return owners


def _check_modules(module: nn.Module) -> None:
    sparse = [
        name
        for name, child in module.named_modules()
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse
    ]
    if sparse:
        raise ConfigError(
            f"{', '.join(sparse)}: nn.Embedding(sparse=True) makes sparse gradients, which are not supported yet "
            "(sparse_gradients). Use sparse=False."
        )


__all__ = ["ROOT", "ZeroEngine"]
