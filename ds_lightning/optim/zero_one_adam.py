"""0/1 Adam."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch

from ds_lightning.optim.blocks import Average, Block, Extent, Span, Work
from ds_lightning.optim.onebit import OneBitOptimizer


class ZeroOneAdam(OneBitOptimizer):
    """0/1 Adam (arXiv:2202.06009): variance updates grow rare, then steps that communicate grow rare.

    Up to step `var_freeze_step` the variance is updated at steps that are multiples of an interval, which doubles after
    every `var_update_scaler` updates; these steps average gradients as ever. At the others momenta are averaged with
    one bit per element ([Note: the compressed mean]). The update is `p -= lr * (m / (sqrt(v) + eps) + weight_decay *
    p)`.

    Then the variance is frozen and ranks make local steps: each updates parameters with its own momentum and adds
    `lr * m` up in `u`. At steps that are multiples of an interval the `u` are averaged with one bit per element, and
    parameters and momentum follow from the result: `p = q - u / (sqrt(v) + eps)`, where `q` are the parameters of the
    last such step, and `m = u / sum(lr)` (Algorithm 1). The interval doubles every `local_step_scaler` steps, up to
    `local_step_clipper`. The other steps send nothing but one bit per parameter about who has a gradient.

    So between these steps parameters and momenta differ between ranks. Whatever shows values to others ends the window
    first, by an exact mean of the `u` instead of a compressed one (an all-reduce of 4 bytes per element): a validation
    or test loop, a checkpoint, `gathered`, `full_param` and the like, the end of training. All ranks are equal then,
    and the schedule of later steps stays as it is. In between, `p.data` and callbacks see the values of their own rank,
    and what they write there is lost with the next step.

    Differences from DeepSpeed's, in favour of the paper or of equal ranks: at steps between variance updates momenta
    are compressed and not gradients; weight decay acts on `q` (`q * (1 - weight_decay * sum(lr))`) and stays out of
    `u`, from which it would come back through `m` once more in every step; parameters are computed from `q`, which
    costs 4 bytes per element, and not by taking steps back, which leaves ranks apart by rounding; no step is lost to
    initialising buffers. Stage 0 only. States are "exp_avg", "exp_avg_sq", "worker_error" and "server_error"; "anchor"
    (q) and "local_update" (u) live from one common step to the next.

    Args:
        params: parameters or groups of them; see `OneBitOptimizer` for `exp_avg_mask`.
        lr: learning rate.
        betas: decays of the two moments.
        eps: added to the root of the second moment.
        weight_decay: factor of the weight decay.
        var_freeze_step: number of steps with variance updates, at least 1.
        var_update_scaler: updates of the variance after which their interval doubles.
        local_step_scaler: steps after which the interval of common steps doubles.
        local_step_clipper: longest interval of common steps.
        bias_correction: whether to correct the moments for their start at zero.
        eps_inside_sqrt: add eps to the second moment before the root is taken.
        amsgrad: only False.
        cuda_aware: of no effect; for configurations of DeepSpeed.
        comm_backend_name: of no effect; communication is the run's own.

    Raises:
        ConfigError: for amsgrad, an unknown backend or a mask that does not fit.
        ValueError: for hyper-parameters out of range.
    """

    extents: ClassVar = {
        "exp_avg": Extent.WHOLE,
        "exp_avg_sq": Extent.UPDATED,
        "worker_error": Extent.WHOLE,
        "server_error": Extent.OWNED,
        "anchor": Extent.WHOLE,
        "local_update": Extent.WHOLE,
    }

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,
        local_step_clipper: int = 16,
        bias_correction: bool = False,
        eps_inside_sqrt: bool = False,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
    ) -> None:
        for name, value in (
            ("var_freeze_step", var_freeze_step),
            ("var_update_scaler", var_update_scaler),
            ("local_step_scaler", local_step_scaler),
            ("local_step_clipper", local_step_clipper),
        ):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        self.var_freeze_step = int(var_freeze_step)
        self.var_update_scaler = int(var_update_scaler)
        self.local_step_scaler = int(local_step_scaler)
        self.local_step_clipper = int(local_step_clipper)
        self._window: dict[Block, set[int]] = {}  # slots that were stepped on since the last common step
        self._rates: list[float] = []  # by group: the sum of learning rates since then; empty after a common step
        self._decays: list[float] = []
        schedule = {
            "var_interval": 1,
            "var_counter": 0,
            "var_updates": 0,
            "local_step_interval": 1,
            "local_step_counter": 0,
        }
        super().__init__(
            params,
            schedule,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            bias_correction=bias_correction,
            eps_inside_sqrt=eps_inside_sqrt,
            amsgrad=amsgrad,
            cuda_aware=cuda_aware,
            comm_backend_name=comm_backend_name,
        )

    def shared_keys(self) -> tuple[str, ...]:
        """Where the optimizer is in its two schedules."""
        counters = ("var_interval", "var_counter", "var_updates", "local_step_interval", "local_step_counter")
        return ("step", *counters)

    @property
    def local_gradients(self) -> bool:
        """False at the steps that update the variance."""
        return not self._varies(self.steps + 1)

    def _varies(self, count: int) -> bool:
        return not self._is_frozen(count) and count % self._at("var_interval") == 0

    def _is_frozen(self, count: int) -> bool:
        return count > self.var_freeze_step

    def _at(self, key: str) -> int:
        return int(self.param_groups[0][key])

    def _set(self, **values: int) -> None:
        for group in self.param_groups:
            group.update(values)

    def _update(self, work: Work, count: int) -> None:
        if self._is_frozen(count):
            self._step_locally(work, count)
            return
        varies = self._varies(count)
        if varies:
            self._set(var_updates=self._at("var_updates") + 1)
            for block in work.blocks:
                for span in block.spans():
                    gradient = block.part_of_gradient(span)
                    self._advance(block, span, "exp_avg", gradient)
                    self._vary(block, span, gradient)
                self._apply(block, count)
        else:
            for block in work.blocks:
                for span in block.spans():
                    self._advance(block, span, "worker_error", block.part_of_gradient(span))
            for block, mean in work.means():
                self._mask(block, mean)
                for span in block.spans():
                    block.part("exp_avg", span).copy_(mean[span.start : span.stop])
                self._apply(block, count)
        if varies:
            counter = self._at("var_counter") + 1
            if counter == self.var_update_scaler:
                self._set(var_interval=2 * self._at("var_interval"))
                counter = 0
            self._set(var_counter=counter)

    def _apply(self, block: Block, count: int) -> None:
        for span in block.spans():
            update = self._over_root(block, span, block.part("exp_avg", span))
            self._descend(block, span, update, count)

    def _over_root(self, block: Block, span: Span, values: torch.Tensor) -> torch.Tensor:
        root = self._denominator(block, span, self._at("var_updates"))
        return torch.div(values, root, out=root)

    # Local steps ------------------------------------------------------------------------------------------------------

    def _step_locally(self, work: Work, count: int) -> None:
        if count == self.var_freeze_step + 1:
            for block in work.blocks:  # so far they were of momenta, now they are of sums of lr * momentum
                block.state("worker_error").zero_()
                block.state("server_error").zero_()
        if not self._rates:
            self._open(work.blocks)
        for number, group in enumerate(self.param_groups):
            self._rates[number] += self._rate(number, count)
            self._decays[number] += float(group["lr"]) * group["weight_decay"]
        common = count % self._at("local_step_interval") == 0
        for block in work.blocks:
            self._window.setdefault(block, set()).update(block.present)
            for span in block.spans():
                self._advance(block, span, "exp_avg", block.part_of_gradient(span))
                update = block.part("local_update", span)
                update.add_(block.part("exp_avg", span), alpha=self._rate(span.group, count))
                if not common:
                    self._place(block, span, update)
        if common:
            self._meet(work)
        counter = self._at("local_step_counter") + 1
        if counter == self.local_step_scaler:
            longer = min(self.local_step_clipper, 2 * self._at("local_step_interval"))
            self._set(local_step_interval=longer)
            counter = 0
        self._set(local_step_counter=counter)

    def _open(self, blocks: Sequence[Block]) -> None:
        """Ranks are equal: remember where they are."""
        self._rates = [0.0] * len(self.param_groups)
        self._decays = [0.0] * len(self.param_groups)
        for block in blocks:
            block.state("anchor").copy_(block.master)
            block.state("local_update").zero_()

    def _close(self) -> None:
        self._window.clear()
        self._rates, self._decays = [], []

    def restart(self) -> None:
        """A window that is open is forgotten: parameters and states are others now."""
        self._close()

    def _place(self, block: Block, span: Span, update: torch.Tensor) -> None:
        """The parameters that are `update` away from where ranks were equal."""
        anchor = block.part("anchor", span)
        moved = self._over_root(block, span, update)
        block.part_of_master(span).copy_(anchor.mul(1 - self._decays[span.group]).sub_(moved))

    def _moving(self, block: Block) -> list[int]:
        """Slots of a window that have moved: with a learning rate of 0 there is nothing to tell."""
        groups = [slot.group - block.first_group for slot in block.unit.slots]
        return sorted(place for place in self._window.get(block, ()) if self._rates[groups[place]])

    def _meet(self, work: Work) -> None:
        """A common step: average what ranks have moved since the last one."""
        for block in work.blocks:
            block.choose(self._moving(block))
            for span in block.spans():
                block.part("worker_error", span).add_(block.part("local_update", span))
        for block, mean in work.means():
            self._arrive(block, self._mask(block, mean))
        self._close()

    def _arrive(self, block: Block, mean: torch.Tensor) -> None:
        """Parameters and momentum from the average `[unit.numel]` of `local_update`."""
        for span in block.spans():
            update = mean[span.start : span.stop]
            self._place(block, span, update)
            torch.div(update, self._rates[span.group], out=block.part("exp_avg", span))

    def settle(self, blocks: Sequence[Block], average: Average, everything: bool) -> bool:
        """End a window with an exact mean; see `OneBitOptimizer.settle`."""
        super().settle(blocks, average, everything)
        moved = bool(self._rates)
        if moved:
            for block in blocks:
                block.choose(self._moving(block))
            moving = [block for block in blocks if block.present]
            average([block.state("local_update") for block in moving])
            for block in moving:
                self._arrive(block, self._mask(block, block.state("local_update")))
            self._close()
        for block in blocks:
            for key in ("anchor", "local_update"):  # made anew when it is needed
                block.elements.pop(key, None)
        return moved
