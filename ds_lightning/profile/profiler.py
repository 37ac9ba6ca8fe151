"""`FlopsProfiler`: what a model computes, in which module, and how long that takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ds_lightning.profile import report
from ds_lightning.profile.operations import Formula, formulas
from ds_lightning.profile.scopes import ModuleScopes, Phase
from ds_lightning.profile.tree import ModuleProfile, build
from ds_lightning.profile.units import flops_text, macs_text, number_text, seconds_text


class FlopsProfiler:
    """Counts the FLOPs, MACs and parameters of a model, and takes its time, per module, forward and backward.

    Operations are counted where torch dispatches them (`torch.utils.flop_counter`), so that whatever way a model
    calls them they count, in backward and in recomputation too; `profile/operations.py` says what costs what. Nothing
    of torch is patched. Parameters that are sharded count whole.

    Args:
        model: any module, also one that is being trained under ZeRO.

    Example:
        ```python
        profiler = FlopsProfiler(model)
        profiler.start_profile()
        model(batch).sum().backward()
        profiler.stop_profile()
        profiler.print_model_profile()
        profiler.end_profile()
        ```
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._nodes: dict[nn.Module, ModuleProfile] = {}
        self._running: ExitStack | None = None
        self._scopes: ModuleScopes | None = None

    # Sessions ---------------------------------------------------------------------------------------------------------

    def start_profile(
        self, ignore_list: Collection[type[nn.Module]] | None = None, *, count: bool = True, time: bool = True
    ) -> None:
        """Begin. What was measured before is added to; `reset_profile` forgets it.

        Args:
            ignore_list: classes of modules that count nothing.
            count: count operations, which costs some microseconds for each.
            time: take times, which waits for the device around each module.

        Raises:
            RuntimeError: when it has begun already.
        """
        if self._running is not None:
            raise RuntimeError("The profile has begun already; call stop_profile() or end_profile() first.")
        if not self._nodes:
            self._nodes = build(self.model)
        scopes = ModuleScopes(self._nodes, self.model, ignore_list or (), _synchronizer(self.model), timed=time)
        with ExitStack() as stack:
            stack.callback(scopes.close)
            scopes.open()
            if count:
                # What is compiled calls its kernels without torch's dispatcher; nn.TransformerEncoder has one for all.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
                torch.backends.mha.set_fastpath_enabled(False)
                stack.enter_context(FlopCounterMode(display=False, custom_mapping=_counting(scopes, self._nodes)))
            self._running = stack.pop_all()
            self._scopes = scopes

    def stop_profile(self) -> None:
        """Stop measuring, keep what was measured. Harmless when nothing runs."""
        running, self._running = self._running, None
        self._scopes = None
        if running is not None:
            running.close()

    def pause(self) -> None:
        """What follows does not belong to the model: an optimizer's step."""
        if self._scopes is not None:
            self._scopes.paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        if self._scopes is not None:
            self._scopes.paused = False

    def reset_profile(self) -> None:
        """Forget what was measured."""
        for node in self._nodes.values():
            node.own.clear()

    def end_profile(self) -> None:
        """Stop, and forget everything."""
        self.stop_profile()
        self._nodes = {}

    # Results ----------------------------------------------------------------------------------------------------------

    @property
    def tree(self) -> ModuleProfile:
        """What was measured, per module.

        Raises:
            RuntimeError: before the first `start_profile`, and after `end_profile`.
        """
        if not self._nodes:
            raise RuntimeError("Nothing was profiled; call start_profile(), run the model, and stop_profile() first.")
        return self._nodes[self.model]

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """FLOPs of forward."""
        flops = self.tree.total().forward_flops
        return flops_text(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Multiply-accumulates of forward."""
        macs = self.tree.total().forward_macs
        return macs_text(macs) if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Seconds of forward."""
        seconds = self.tree.total().forward_seconds
        return seconds_text(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Elements of all parameters, each counted once."""
        return number_text(self.tree.parameters) if as_string else self.tree.parameters

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | Path | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        """Print the report, or write it: as JSON where `output_file` ends in `.json`.

        Args:
            profile_step: shown in the title.
            module_depth: depth of the aggregated part; -1 is the deepest.
            top_modules: modules shown per depth there.
            detailed: show the tree.
            output_file: where to write; its folder is made.
            facts: further lines of the summary.
        """
        settings = report.Settings(profile_step, module_depth, top_modules, detailed, dict(facts or {}))
        report.give(self.tree, settings, output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print, for each depth, the classes of modules with most parameters, MACs and time."""
        print("\n".join(report.aggregated(self.tree, module_depth, top_modules)))


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | Path | None = None,
    ignore_modules: Collection[type[nn.Module]] | None = None,
    mode: Literal["forward", "generate"] = "forward",
) -> tuple[int | str, int | str, int | str]:
    """FLOPs, MACs and parameters of a forward of a model in evaluation mode.

    Args:
        model: it is left in the mode in which it is given.
        input_shape: shape of a random input, batch first, when there are no `args` or `kwargs`.
        args: positional arguments of the forward.
        kwargs: keyword arguments of the forward.
        print_profile: print the report.
        detailed: with the tree.
        module_depth: depth of the aggregated part; -1 is the deepest.
        top_modules: modules shown per depth there.
        warm_up: forwards before the one that is measured.
        as_string: as texts such as "866.08 M", instead of numbers.
        output_file: where the report is written instead of printed.
        ignore_modules: classes of modules that count nothing.
        mode: "forward" calls the model, "generate" its method `generate`.

    Raises:
        ValueError: for an `input_shape` that is no tuple, or where there is nothing to call the model with.
    """
    arguments = list(args)
    if input_shape is not None:
        if not isinstance(input_shape, tuple) or not input_shape:
            raise ValueError(f"input_shape={input_shape!r} is not a tuple of sizes with the batch first.")
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        arguments = [torch.ones(input_shape, device=device)]
    elif not arguments and not kwargs:
        raise ValueError("There is nothing to call the model with: pass input_shape, args or kwargs.")
    if mode not in ("forward", "generate"):
        raise ValueError(f"mode={mode!r} is neither 'forward' nor 'generate'.")
    call: Callable[..., Any] = model if mode == "forward" else model.generate  # type: ignore[assignment]
    profiler = FlopsProfiler(model)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(warm_up):
                call(*arguments, **(kwargs or {}))
            profiler.start_profile(ignore_modules)
            call(*arguments, **(kwargs or {}))
            profiler.stop_profile()
        if print_profile or output_file is not None:
            profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
        return (
            profiler.get_total_flops(as_string),
            profiler.get_total_macs(as_string),
            profiler.get_total_params(as_string),
        )
    finally:
        profiler.end_profile()
        for module in training:
            module.training = True


def _counting(scopes: ModuleScopes, nodes: Mapping[nn.Module, ModuleProfile]) -> dict[Any, Callable[..., int]]:
    """Formulas for `FlopCounterMode` that also note what they find with the module that runs."""

    def noting(formula: Formula) -> Callable[..., int]:
        def note(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
            module = scopes.module
            if not scopes.counts(module):
                return 0
            cost = formula(module, out_val, *args, **kwargs)
            own = nodes[module].own
            phase = scopes.phase
            if phase is Phase.FORWARD:
                own.forward_flops += cost.flops
                own.forward_macs += cost.macs
            elif phase is Phase.BACKWARD:
                own.backward_flops += cost.flops
            else:
                own.recomputed_flops += cost.flops
            return cost.flops

        note._get_raw = True  # type: ignore[attr-defined]  # torch's mark of a formula that takes tensors
        return note

    return {operation: noting(formula) for operation, formula in formulas().items()}


def _synchronizer(model: nn.Module) -> Callable[[], None]:
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}

    def synchronize() -> None:
        for device in devices:
            torch.cuda.synchronize(device)

    return synchronize
