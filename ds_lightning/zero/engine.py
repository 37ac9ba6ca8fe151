"""One model's runtime: wires layout, buffers, residency, reduction and optimizers together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_lightning.comm.agreement import Agreement, agreed
from ds_lightning.comm.collectives import Collectives, Pending
from ds_lightning.comm.ledger import Ledger
from ds_lightning.errors import ConfigError, ReleasedParameterError
from ds_lightning.layout.flat import Layout, Unit, build_layout
from ds_lightning.layout.units import ParamSpec, check_parameters, find_scopes, named_parameters, scope_of
from ds_lightning.offload.homes import Homes, UnitHome
from ds_lightning.offload.policy import Home
from ds_lightning.optim.apart import StepsApart, copy_out, prepare
from ds_lightning.optim.blockwise import BlockwiseOptimizer, check_blockwise
from ds_lightning.optim.clip import GradientNorms
from ds_lightning.optim.elementwise import check_supported, element_states, takes_parts
from ds_lightning.optim.narrow import NarrowMasters, check_narrow
from ds_lightning.optim.onebit import OneBitOptimizer
from ds_lightning.optim.run_parts import PartsOfSteps
from ds_lightning.optim.sharded import GROUPS, ShardedOptimizer, check_optimizers
from ds_lightning.optim.speculation import Speculation, speculation
from ds_lightning.topology import Topology, stay_at_exit
from ds_lightning.zero.broadcast import BufferSync
from ds_lightning.zero.buffers import ScratchPool, UnitBuffers
from ds_lightning.zero.companions import Companion
from ds_lightning.zero.hooks import HookSet
from ds_lightning.zero.optimizer_states import OptimizerStates
from ds_lightning.zero.options import EngineOptions
from ds_lightning.zero.passes import Passes
from ds_lightning.zero.plan import StagePlan
from ds_lightning.zero.reduce import GradientReducer
from ds_lightning.zero.residency import ResidencyManager
from ds_lightning.zero.resting import RestingParameters
from ds_lightning.zero.state_dicts import StateDicts
from ds_lightning.zero.table import ParameterTable
from ds_lightning.zero.transport import Transport
from ds_lightning.zero.values import FullValues
from ds_lightning.zero.watch import GRAD_GETTER, check_gradient


class ZeroEngine:
    """Shards one module and its optimizers. Construction is collective.

    Args:
        module: its parameters become views of flat buffers; rank 0's values win on every rank.
        optimizers: the user's; none for evaluation.
        topology: ranks and groups.
        plan: the stage.
        options: from the configuration.
        read: gives the full value of a parameter, for modules that were built sharded.
        tell: tells the user something.

    Attributes:
        table: names and places of parameters.
        passes: forward, backward and evaluation.
        values: full values, and changes to them.
        state_dicts: loading and saving.
        norms: gradient norms.
        resting: frozen parameters in groups.
        steps: optimizer steps that were made, of all optimizers; skipped ones do not count.
        speculation: begins steps on the host during backward; None where steps wait for it.
        companions: what has a value for each element and follows when units are laid out anew.

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
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.module = module
        self.topology = topology
        self.plan = plan
        self.options = options or EngineOptions()
        self.dissolved = False
        self.steps = 0
        self._state_dicts_hooked = False
        self._tell = tell
        self._told_of_rounding = False
        self.speculation: Speculation | None = None
        self.companions: list[Companion] = []
        named = named_parameters(module)
        check_parameters(named)
        if not self.options.sparse:
            _check_modules(module)
        self.table = ParameterTable(named)
        self.ledger = Ledger()
        self.agreement = Agreement(topology)
        self.collectives = Collectives.create(topology, self.ledger)
        self.optimizers = self._wrap(optimizers)
        scopes = find_scopes(module, self.options.leaves)
        modules = dict(module.named_modules())
        self._scopes = {scope: modules[scope] for scope in scopes}
        self._owners = _owners(module)

        offload = self.options.offload
        self.pool = ScratchPool(topology.device, lean=offload is not None and offload.uses_disk)
        self.hooks = HookSet()
        self.resting = RestingParameters(self.table, self.hooks, self._relayout)
        self.homes = self._make_homes()
        self.norms = GradientNorms(self.agreement)
        self.units: dict[int, UnitBuffers] = {}
        self.transport = Transport(self.collectives, self.pool, self.options.transport)
        self.residency = ResidencyManager((), self.transport, self.options.allgather_piece, self._touch)
        self.reducer = GradientReducer(
            (),
            plan,
            self.collectives,
            self.transport,
            self.agreement,
            self.pool,
            self.options.reduce,
            self.residency.release,
        )
        self.reducer.keeps_local = self._keeps_local
        dtypes = self.options.dtypes
        narrow_states = torch.bfloat16 if dtypes.narrow_states else None
        self._narrow = NarrowMasters(narrow_states) if dtypes.narrow_masters else None
        self._apart = StepsApart(self.homes, self.residency, self._narrow) if self.homes is not None else None
        self._publishing: list[Pending] = []
        self._copied = False  # whether the step under way puts new values where parameters are
        self._steps_within = 0
        self._parts = PartsOfSteps(self.collectives, self.agreement)
        buffer_sync = BufferSync(module, self.collectives)
        self.passes = Passes(
            self.units,
            self.residency,
            self.reducer,
            self.norms,
            self.agreement,
            self.options,
            buffer_sync,
            before_step=self.follow_groups,
        )
        self.values = FullValues(
            self.units,
            self.table,
            self.passes,
            self.residency,
            self.reducer,
            self.collectives,
            self.agreement,
            plan,
        )
        self.state_dicts = StateDicts(self.units, self.table, self.values, self.residency, self.agreement)
        specs = self._specs(named, self.resting.groups(self.optimizers))
        self._add_units(self._lay_out(specs), read or _value)
        self._speculate()
        buffer_sync.run()
        self._hook_everything()
        self._take_stock()

    @property
    def scopes(self) -> Mapping[str, nn.Module]:
        """The modules that are gathered as one, by name."""
        return self._scopes

    # Layout ---------------------------------------------------------------------------------------------------------

    def _wrap(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[ShardedOptimizer]:
        check_optimizers(list(optimizers), self.table)
        check_blockwise(optimizers, self.plan.stage, self.options.offload)
        offload = self.options.offload
        on_disk = offload is not None and offload.optimizer is Home.DISK and self.plan.shard_optimizer
        for optimizer in optimizers:
            if self.options.dtypes.narrow_masters:
                check_narrow(optimizer, on_disk)
            if self.topology.teams.replicas.size > 1 and takes_parts(optimizer):
                raise ConfigError(
                    f"{type(optimizer).__name__} looks at whole parameters, put together from all ranks, "
                    "and does not go with zero_optimization.mics_shard_size, where several ranks have each part. Set "
                    "mics_shard_size to -1, or use an element-wise optimizer (AdamW)."
                )
        return [
            BlockwiseOptimizer(optimizer, place * GROUPS, self.collectives)
            if isinstance(optimizer, OneBitOptimizer)
            else ShardedOptimizer(
                optimizer,
                place * GROUPS,
                check_supported(optimizer, self.plan.stage, self.options.allow_untested_optimizer, on_disk),
                self.options.tile,
                takes_parts(optimizer),
            )
            for place, optimizer in enumerate(optimizers)
        ]

    def _specs(
        self, named: Sequence[tuple[tuple[str, ...], nn.Parameter]], groups: Mapping[int, int]
    ) -> list[ParamSpec]:
        policy = self.options.dtypes
        scopes = list(self._scopes)
        specs = []
        for names, parameter in named:
            group = groups.get(id(parameter), -1)
            if group >= 0 and not parameter.is_floating_point():
                raise ConfigError(f"{names[0]} ({parameter.dtype}) is in an optimizer, but has no gradient.")
            frozen = group < 0 and not parameter.requires_grad
            current = self.table.place_of(names[0])
            given = parameter.dtype if current is None else current[0].given_dtype
            dtype, master = policy.of(self._owners[names[0]], given, parameter.ndim, frozen)
            wide = policy.compute is not None and not policy.narrow_masters
            if current is not None and group >= 0 and master.itemsize < 4 and wide:
                master = torch.float32  # given in 16 bit and unfrozen
            scope = scope_of(names, scopes)
            active = parameter.requires_grad
            holders = self._holders(names)
            travels = policy.travels(holders, given) if group >= 0 else None
            row = _row(parameter.shape, holders) if group >= 0 and self.options.sparse else 0
            specs.append(
                ParamSpec(
                    names[0],
                    tuple(names[1:]),
                    parameter.shape,
                    dtype,
                    master,
                    group,
                    scope,
                    active,
                    given,
                    travels,
                    row,
                )
            )
        return specs

    def _holders(self, names: Sequence[str]) -> list[nn.Module]:
        """All modules that register a parameter of these names."""
        return [self._owners[name] for name in names if name in self._owners]

    def _make_homes(self) -> Homes | None:
        policy, plan = self.options.offload, self.plan
        if policy is None or not plan.shard_optimizer:
            return None
        return Homes(policy, self.topology.device, plan.shard_params, self.options.tile, self.topology.shard_rank)

    def _lay_out(self, specs: Sequence[ParamSpec], first: int = 0) -> Layout:
        options = replace(self.options.layout, alignment=self.options.transport.alignment(self.topology))
        layout = build_layout(specs, self.topology.shard_count, options, first)
        for unit in layout.units:
            self.transport.check(unit)
        return layout

    def _admit(self, units: Sequence[Unit]) -> Mapping[int, UnitHome]:
        """Homes for new units. Collective: a disk that is too small on one rank is an error on all."""
        homes = self.homes
        if homes is None:
            return {}
        try:
            return agreed(lambda: homes.admit(units, self._element_states), self.topology)
        except ConfigError:
            homes.close()
            raise

    def _element_states(self, unit: Unit) -> dict[str, torch.dtype]:
        """Optimizer states of a unit with one value per element."""
        found: dict[str, torch.dtype] = {}
        for group in sorted({slot.group for slot in unit.slots if slot.group >= 0}):
            for sharded in self.optimizers:
                if group in sharded.groups:
                    place = group - sharded.first_group
                    found.update(element_states(sharded.optimizer, place, unit.master_dtype))
        return found

    def _add_units(self, layout: Layout, read: Callable[[nn.Parameter], torch.Tensor]) -> None:
        homes = self._admit(layout.units)
        for unit in layout.units:
            parameters = [self.table.parameter(slot.name) for slot in unit.slots]
            packed = self.plan.shard_params and self.transport.packs(unit)
            buffers = UnitBuffers(unit, parameters, self.plan, self.topology.shard_rank, homes.get(unit.index), packed)
            buffers.fill(read, partial(self.collectives.broadcast, what=unit.name), self.topology.device)
            self.units[unit.index] = buffers
            self.table.place(unit)
            self.residency.add(buffers)
            if unit.trainable:
                self.reducer.add(buffers)
                gradients = self.reducer.units[unit.index]
                self.hooks.gradients(gradients, self.passes)
                for sharded in self.optimizers:
                    sharded.adopt(gradients)
        self._tell_of_rounding(layout)
        self.passes.follow(self._scopes)
        for sharded in self.optimizers:
            groups = sharded.groups
            sharded.units = tuple(
                gradients
                for gradients in self.reducer.units.values()
                if any(slot.group in groups for slot in gradients.unit.slots)
            )

    def _speculate(self) -> None:
        """Begin steps during backward from now on, if that is asked for and possible."""
        policy = self.options.offload
        if self.speculation is not None:
            self.speculation.close()
            self.speculation = None
        if policy is None or self._apart is None:
            return
        narrow, timeout = self.options.dtypes.narrow_masters, self.topology.timeout.total_seconds()
        units = self.reducer.units.values()
        self.speculation = speculation(policy, self.optimizers, units, narrow, timeout, self._tell)
        if self.speculation is not None:
            self.reducer.on_landing, self._apart.take = self.speculation.landed, self.speculation.take

    def scaled(self, scale: float) -> None:
        """The gradients of the backward that comes are `scale` times too large."""
        if self.speculation is not None:
            self.speculation.factor = 1.0 / scale

    def unscaling(self, factor: float) -> AbstractContextManager[None]:
        """Around the multiplication of all gradients by `factor`."""
        return nullcontext() if self.speculation is None else self.speculation.unscaling(factor)

    def rounded(self) -> set[str]:
        """Parameters that were given in fp32 and are frozen, so that only their 16-bit values are kept."""
        kept = (b.unit for b in self.units.values() if not b.unit.trainable)
        narrow = (unit for unit in kept if unit.saved_dtype != unit.master_dtype)
        return {slot.name for unit in narrow for slot in unit.slots}

    def _tell_of_rounding(self, layout: Layout) -> None:
        """Once: what was given in fp32 is kept in 16 bit."""
        narrow = [unit for unit in layout.units if unit.saved_dtype != unit.master_dtype and not unit.trainable]
        if self._tell is None or self._told_of_rounding or not narrow:
            return
        self._told_of_rounding = True
        slots = [slot for unit in narrow for slot in unit.slots]
        dtype = str(narrow[0].dtype).removeprefix("torch.")
        self._tell(
            f"{len(slots)} frozen parameters ({sum(slot.numel for slot in slots):,} elements: {slots[0].name} ...) are "
            f"kept in {dtype} alone, in which they compute: their fp32 values are rounded, also in checkpoints. "
            "ZeroStrategy(frozen_masters=True) keeps these."
        )

    def _hook_everything(self) -> None:
        self.hooks.moves(self.module, self)
        if any(buffers.sharded for buffers in self.units.values()) or self.options.dtypes.compute is not None:
            self.hooks.root(self.module, self.passes)
        if any(buffers.sharded for buffers in self.units.values()):
            self.hooks.scopes(self._scopes, self.passes)
        if any(buffers.sharded or not buffers.aliased for buffers in self.units.values()):
            self._hook_state_dicts()
        for sharded in self.optimizers:
            self._hook_optimizer(sharded)

    def _hook_state_dicts(self) -> None:
        if not self._state_dicts_hooked:
            self._state_dicts_hooked = True
            self.hooks.state_dicts(self.module.modules(), self.state_dicts)

    def accompany(self, companion: Companion) -> None:
        """Let something follow the parameters from now on."""
        self.companions.append(companion)
        self._hook_state_dicts()  # a checkpoint may show other values than the module's

    def _hook_optimizer(self, sharded: ShardedOptimizer) -> None:
        self.hooks.optimizer(
            sharded.optimizer,
            before_step=lambda args, kwargs: self._before_step(sharded, args, kwargs),
            after_step=lambda: self._after_step(sharded),
            after_zero_grad=lambda: self._after_zero_grad(sharded),
            states=OptimizerStates(
                sharded,
                self.table,
                self.values,
                self.agreement,
                self.resting.wake_stateful,
                partial(self.settle, everything=True),
            ),
        )

    def _group_signature(self) -> list[list[int]]:
        return [[len(parameters) for parameters in sharded.user_params()] for sharded in self.optimizers]

    def set_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Train with other optimizers: a second `fit`, or a tuner that builds them anew. Collective."""
        old = self.optimizers
        known = {id(sharded.optimizer): sharded for sharded in old}
        if len(old) == len(optimizers) and all(id(optimizer) in known for optimizer in optimizers):
            return
        new = self._wrap(optimizers)
        self.settle()
        self.hooks.remove_optimizers()
        self.optimizers = new
        self._relayout(everything=True)
        self._speculate()
        for sharded in self.optimizers:
            self._hook_optimizer(sharded)

    def follow_groups(self) -> None:
        """Take in parameters that someone (a finetuning callback) has put into groups, or out of them. Collective."""
        self.give_up_step()
        publishing, self._publishing = self._publishing, []
        for work in publishing:
            work.wait()
        if self._signature != self._group_signature() or self.resting.unfrozen:
            if self.values.showing:
                raise ConfigError("Parameters joined or left a group while the module shows other values (averages).")
            self._relayout()

    def _relayout(self, everything: bool = False) -> None:
        """Lay out anew the units of which some parameter has come to, or left, a group. Collective."""
        self.settle(everything=True)
        groups = self.resting.groups(self.optimizers, anew=everything)
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
        named = [((name, *self.table.aliases(name)), self.table.parameter(name)) for name in names]
        specs = self._specs(named, groups)
        states = {} if everything else self._optimizer_states(affected)
        values: dict[int, torch.Tensor] = {}
        self.residency.release_all()
        kept = [companion.leave(sorted(affected)) for companion in self.companions]
        for index in sorted(affected):
            full = self.values.full_values(index)
            buffers = self.units[index]
            for slot, parameter in zip(buffers.unit.slots, buffers.parameters, strict=True):
                values[id(parameter)] = full[slot.start : slot.stop].view(slot.shape).clone()
            self._remove_unit(index)
        first = max(list(self.units) + sorted(affected)) + 1
        layout = self._lay_out(specs, first)
        self._add_units(layout, lambda parameter: values.pop(id(parameter)))
        for companion, elements in zip(self.companions, kept, strict=True):
            companion.enter([unit.index for unit in layout.units], elements)
        for sharded in self.optimizers:
            for unit in layout.units:
                found = {s.name: states[s.name] for s in unit.slots if s.name in states}
                if found and unit.trainable:
                    sharded.load_unit(self.reducer.units[unit.index], found)
        self._take_stock()

    def _take_stock(self) -> None:
        """Note which parameters are in groups now."""
        self._signature = self._group_signature()
        self.resting.take_stock(self.optimizers)

    def _optimizer_states(self, units: set[int]) -> dict[str, dict[str, Any]]:
        """Full optimizer states of all parameters of these units. Collective."""
        found: dict[str, dict[str, Any]] = {}
        for index in sorted(units):
            if index in self.reducer.units:
                for sharded in self.optimizers:
                    found.update(self.values.full_unit_state(sharded, index))
        return found

    def _remove_unit(self, index: int) -> None:
        buffers = self.units.pop(index)
        for parameter in buffers.parameters:
            parameter.__class__ = nn.Parameter
        self.hooks.remove_gradients(index)
        self._parts.forget()
        if self.speculation is not None:
            self.speculation.remove(index)
        if index in self.reducer.units:
            for sharded in self.optimizers:
                sharded.drop(self.reducer.units[index])
            self.reducer.remove(index)
        self.residency.remove(index)
        if self.homes is not None:
            self.homes.drop(index)

    def _touch(self, index: int, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Someone wants values of a released parameter. See [Note: a released parameter is safe]."""
        if self.state_dicts.answers(func):
            return self.state_dicts.answer(index, func, args, kwargs)
        if func == GRAD_GETTER:
            with torch._C.DisableTorchFunctionSubclass():
                gradient = func(*args, **kwargs)
            return check_gradient(gradient, 4) if self.reducer.hides(index) else gradient
        if func is torch.Tensor.__repr__:
            with torch._C.DisableTorchFunctionSubclass():
                return f"Parameter(sharded by ds_lightning, shape={tuple(args[0].shape)}, dtype={args[0].dtype})"
        if self.passes.together:
            self.passes.fetch(index)
            return func(*args, **kwargs)
        if func in (torch.equal, torch.Tensor.equal) and all(a in self.table for a in args):
            return args[0] is args[1]  # Lightning's finetuning callbacks look for a parameter in this way
        names = [self.table.name_of(a) for a in _flat(args, kwargs) if a in self.table]
        raise ReleasedParameterError(
            f"{getattr(func, '__name__', func)} reads or writes {', '.join(names) or 'a parameter'}, of which this "
            f"rank holds only its shard (zero_optimization.stage={self.plan.stage}). Outside a training, validation, "
            "test or predict step wrap the access in `with ds_lightning.gathered(module_or_parameters):`, called on "
            "every rank; to change values there, pass modifier_rank."
        )

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
        if sharded.swapped:  # a class whose `step` calls that of another one, hooked as well
            self._steps_within += 1
            return
        if any(arg is not None for arg in args[1:]) or kwargs.get("closure") is not None:
            raise ConfigError(
                "optimizer.step(closure) would run backward while the optimizer's groups hold shards. Run the closure "
                "first and call step() without it; Lightning's own loops do."
            )
        if self.values.showing:
            raise ConfigError(
                "optimizer.step() while the module shows other values (averages), which would not be trained. Step "
                "outside of `swapped()`."
            )
        self.values.absorb()
        self.reducer.settle()
        self.norms.step_begins(sharded)
        self._steps_within = 0
        apart = sharded.swap_in()
        if self._apart is not None:
            self.residency.forget_expected()
            self._apart.step(sharded, apart, self._publishing)
        if self._narrow is not None:
            runs = self._narrow.chosen(sharded.near)
            self._narrow.step(sharded, runs)
            self._narrow.stepped(sharded)
            sharded.done(runs)
        if isinstance(sharded, BlockwiseOptimizer):
            sharded.prepare_step()
        self._copied = prepare(sharded, sharded.near, parts=self._parts.of(sharded))

    def _after_step(self, sharded: ShardedOptimizer) -> None:
        if self._steps_within:
            self._steps_within -= 1
            return
        if sharded.in_parts and not self._copied:
            copy_out(sharded.near)
        sharded.swap_out()
        if self.speculation is not None:
            self.speculation.drop()
        self.steps += 1
        if self.transport.feedback is not None:
            self.transport.feedback.stepped()
        touched = sharded.touched_units()
        publishing, self._publishing = self._publishing, []
        for index in touched:
            if sharded.in_parts or not self._steps_apart(index):
                publishing += self.residency.publish(index, self._copied)
        for work in publishing:
            work.wait()
        self.values.written(touched)

    def _keeps_local(self) -> bool:
        return any(sharded.local for sharded in self.optimizers)

    def settle(self, everything: bool = False) -> None:
        """Make equal what a 1-bit optimizer lets differ between ranks, by its mean. Collective.

        Args:
            everything: what a checkpoint holds; otherwise what parameters depend on, for an evaluation.
        """
        for sharded in self.optimizers:
            if isinstance(sharded, BlockwiseOptimizer) and not self.failed:
                changed = sharded.settle(everything)
                self.residency.republish(changed)
                self.values.written(changed)

    def give_up_step(self) -> None:
        """A step has raised, or may have: the groups are the user's again. What is being published still arrives."""
        self._steps_within = 0
        for sharded in self.optimizers:
            sharded.swap_out()

    def _steps_apart(self, index: int) -> bool:
        home = self.units[index].home
        return home is not None and home.steps_apart

    def _after_zero_grad(self, sharded: ShardedOptimizer) -> None:
        if self.speculation is not None:
            self.speculation.drop()
        self.reducer.zero(sharded.groups)
        self.residency.unwatch()
        self.residency.watch(self.reducer.hidden())
        self.norms.forget()

    # End ------------------------------------------------------------------------------------------------------------

    def model_state_bytes(self) -> int:
        """Bytes of parameters, reduced gradients and optimizer states that this rank has in memory between steps.

        On the device and, with offload, on the host; staging buffers included, files not.
        """
        return (
            sum(buffers.state_nbytes for buffers in self.units.values())
            + (self.homes.buffer_bytes if self.homes is not None else 0)
            + (self.speculation.nbytes if self.speculation is not None else 0)
            + self.transport.state_nbytes
            + self.reducer.state_nbytes
            + sum(sharded.state_nbytes for sharded in self.optimizers)
        )

    @property
    def swaps(self) -> bool:
        """Whether values of some unit are on disk, on any rank."""
        return self.homes is not None and self.homes.space is not None

    @property
    def failed(self) -> bool:
        """A rank has failed: nothing communicates any more."""
        return self.passes.failed

    def abort(self) -> None:
        """A rank has failed: communicate no more."""
        stay_at_exit()
        if self.speculation is not None:
            self.speculation.close(wait=False)
        self.passes.abort()
        self.residency.abandon()
        self.reducer.abandon()
        self._publishing = []
        self.give_up_step()

    def before_move(self) -> None:
        """The whole module is moved or cast, by its user or by another strategy: it becomes a plain one first."""
        if self.passes.depth:
            raise ConfigError("A module cannot be moved or cast inside a step while its parameters are sharded.")
        if any(not b.keeps_all and not b.aliased for b in self.units.values()):
            self.agreement.rendezvous(
                "moving or casting a sharded module", "It is made whole first; call `to`, `cpu` ... on every rank."
            )
        self.dissolve()

    def dissolve(self) -> None:
        """Turn the module into a plain one with full parameters, and forget it. Collective."""
        self.settle()
        if self.speculation is not None:
            self.speculation.close()
        self.dissolved = True
        self.values.hide()
        self.residency.release_all()
        for index in list(self.units):
            buffers = self.units[index]
            full = self.values.full_values(index).to(buffers.unit.saved_dtype, copy=True)
            self._remove_unit(index)
            buffers.dissolve(full)
        self.hooks.remove()
        if self.homes is not None:
            self.homes.close()


def _value(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.detach()


def _flat(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    found: list[Any] = []
    for value in (*args, *kwargs.values()):
        found += value if isinstance(value, list | tuple) else [value]
    return found


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
            f"{', '.join(sparse)}: nn.Embedding(sparse=True) makes sparse gradients, which are reduced as rows with "
            "sparse_gradients=true in the configuration only. Set the key, or use sparse=False."
        )


def _row(shape: torch.Size, holders: Sequence[nn.Module]) -> int:
    """Elements of a row of an embedding; 0 for what is none, or has dense gradients because it is a layer as well."""
    kinds = [isinstance(holder, nn.Embedding | nn.EmbeddingBag) for holder in holders]
    sparse = any(kind and holder.sparse for kind, holder in zip(kinds, holders, strict=True))
    return shape[1] if len(shape) == 2 and shape.numel() and (all(kinds) or sparse) else 0
