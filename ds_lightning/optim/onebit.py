"""What the 1-bit optimizers have in common: phases, and blocks instead of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ds_lightning.config.schema.optimizer import COMMUNICATION_BACKENDS
from ds_lightning.errors import ConfigError
from ds_lightning.optim.adam import checked_betas
from ds_lightning.optim.blocks import Average, Block, Extent, Span, Work
from ds_lightning.optim.native import check_positive
from ds_lightning.optim.plain_blocks import PlainBlocks


class OneBitOptimizer(torch.optim.Optimizer):
    """Base of the optimizers that send one bit per element once they have warmed up.

    Under `ZeroStrategy` they step on whole units at once; the strategy hands them gradients, averaged ones or, where
    `local_gradients` says so, this rank's own, and the exchange. Without it they serve a single process.

    Every group counts the steps in `group["step"]`; the phase follows from it, so it comes back with a checkpoint.

    Args:
        params: parameters or groups of them. A group may have `exp_avg_mask`, a tensor with as many elements as each of
            its parameters: it multiplies what was averaged. Set it where gradients are always zero (embeddings of
            positions that never come), which no sign can say. Loading a checkpoint keeps the masks that are set.
        defaults: values of the groups' keys.
        lr: learning rate.
        betas: decays of the two moments.
        eps: added to the root of the second moment.
        weight_decay: factor of the decoupled weight decay.
        amsgrad: only False.
        comm_backend_name: one of DeepSpeed's; communication is the run's own, whatever it says.

    Raises:
        ConfigError: for amsgrad, an unknown backend or a mask that does not fit.
        ValueError: for hyper-parameters out of range.
    """

    stages: ClassVar[tuple[int, ...]] = (0,)
    """The ZeRO stages at which it works."""
    extents: ClassVar[Mapping[str, Extent]] = {}
    """Its states with one value per element."""
    per_parameter: ClassVar[Mapping[str, float]] = {}
    """Its states with one value per parameter, and how they begin."""
    kept_keys: ClassVar[frozenset[str]] = frozenset({"exp_avg_mask"})
    """Keys of groups that belong to the run, not to its checkpoints."""

    _work: Work | None = None

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        lr: float | torch.Tensor,
        betas: Sequence[float],
        eps: float,
        eps_inside_sqrt: bool,
        weight_decay: float,
        bias_correction: bool,
        amsgrad: bool,
        cuda_aware: bool,
        comm_backend_name: str,
    ) -> None:
        name = type(self).__name__
        if amsgrad:
            raise ConfigError(f"{name} has no amsgrad variant. Leave amsgrad out, or use torch.optim.Adam.")
        if comm_backend_name not in COMMUNICATION_BACKENDS:
            raise ConfigError(
                f"comm_backend_name={comm_backend_name!r} is not one of {', '.join(COMMUNICATION_BACKENDS)}. Leave it "
                f"out: {name} communicates over the backend of the run."
            )
        check_positive(lr=lr, eps=eps, weight_decay=weight_decay)
        common = {
            "lr": lr,
            "betas": checked_betas(betas),
            "eps": eps,
            "eps_inside_sqrt": bool(eps_inside_sqrt),
            "weight_decay": weight_decay,
            "bias_correction": bool(bias_correction),
            "step": 0,
        }
        self._plain: PlainBlocks | None = None
        super().__init__(params, {**common, **defaults})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of any optimizer; a group that joins late counts on from where the others are."""
        before = len(self.param_groups)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if before:
            for key in self.shared_keys():
                group[key] = self.param_groups[0][key]
        mask = group.get("exp_avg_mask")
        if mask is not None and any(p.numel() != mask.numel() for p in group["params"]):
            sizes = ", ".join(str(tuple(p.shape)) for p in group["params"])
            raise ConfigError(
                f"exp_avg_mask of group {before} has {mask.numel()} elements, its parameters are {sizes}. Give a mask "
                "of the size of the parameter; parameters of other sizes belong into groups of their own."
            )

    def shared_keys(self) -> tuple[str, ...]:
        """Keys of groups that tell where in its phases the optimizer is; equal in all of them."""
        return ("step",)

    @property
    def steps(self) -> int:
        """Steps that were made."""
        return int(self.param_groups[0]["step"])

    @property
    def local_gradients(self) -> bool:
        """Whether the next step takes this rank's own gradients; the same on every rank."""
        raise NotImplementedError

    def prepare_step(self, work: Work) -> None:
        """Have the next `step()`, and no later one, update these blocks instead of the groups' parameters."""
        self._work = work

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Collective under `ZeroStrategy`.

        Args:
            closure: computes gradients and returns the loss.

        Returns:
            What the closure returns, or None.

        Raises:
            ConfigError: on several ranks without `ZeroStrategy`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work, self._work = self._work, None
        if work is not None:
            self._make(work)
            return loss
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise ConfigError(
                f"{type(self).__name__} exchanges momenta between ranks through ZeroStrategy. Use it there (stage "
                f"{' or '.join(map(str, self.stages))}), or in a single process."
            )
        self._plain = self._plain or PlainBlocks(self)
        with self._plain.step() as plain:
            self._make(plain)
        return loss

    def _make(self, work: Work) -> None:
        count = self.steps + 1
        new = [name for block in work.blocks for name in block.new]
        if new and self._is_frozen(count):
            raise ConfigError(
                f"{', '.join(new[:5])}{' ...' if len(new) > 5 else ''}: the first gradient comes in step {count}, when "
                f"{type(self).__name__} has frozen its variances, so nothing is known of theirs. Freeze later, or let "
                "these parameters have gradients from the beginning."
            )
        for group in self.param_groups:
            group["step"] = count
        try:
            self._update(work, count)
        finally:
            for block in work.blocks:
                block.end()

    def _is_frozen(self, count: int) -> bool:
        """Whether variances do not change any more in step number `count`."""
        raise NotImplementedError

    def _update(self, work: Work, count: int) -> None:
        """Step number `count`, counted from 1."""
        raise NotImplementedError

    def settle(self, blocks: Sequence[Block], average: Average, everything: bool) -> bool:
        """Replace what differs between ranks by its mean. Collective.

        Args:
            blocks: all of the optimizer's, with their masters.
            average: replaces tensors by their means over ranks.
            everything: worker errors too, as for a checkpoint; otherwise only what parameters depend on.

        Returns:
            Whether parameters have changed.
        """
        if everything:
            average([block.elements["worker_error"] for block in blocks if "worker_error" in block.elements])
        return False

    def restart(self) -> None:
        """States have been loaded: ranks are equal now."""

    def state_dict(self) -> dict[str, Any]:
        """As of any optimizer; whole states, see `settle`. Collective under `ZeroStrategy`."""
        if self._plain is not None:
            self._plain.settle()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of any optimizer; masks that are set stay."""
        self.restart()
        masks = [group.get("exp_avg_mask") for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, mask in zip(self.param_groups, masks, strict=True):
            group.pop("exp_avg_mask", None)
            if mask is not None:
                group["exp_avg_mask"] = mask

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    # For the steps of subclasses --------------------------------------------------------------------------------------

    def _denominator(self, block: Block, span: Span, second_moments: int, name: str = "exp_avg_sq") -> torch.Tensor:
        """The root of the second moment plus eps, a new tensor; with bias correction where the group asks for it.

        Infinity where the second moment is zero: an element that never had a gradient stays where it is. A compressed
        momentum is never zero, and over eps it would throw such an element (of an embedding of what never came) away.
        """
        group = self.param_groups[span.group]
        variance = block.part(name, span)
        correction = 1 - group["betas"][1] ** second_moments if group["bias_correction"] else 1.0
        root = variance / correction if correction != 1.0 else variance
        root = (root + group["eps"]).sqrt_() if group["eps_inside_sqrt"] else root.sqrt().add_(group["eps"])
        return root.masked_fill_(variance == 0, torch.inf)

    def _rate(self, number: int, count: int) -> float:
        """The learning rate of a group over the bias correction of the first moment."""
        group = self.param_groups[number]
        rate = float(group["lr"])
        return rate / (1 - group["betas"][0] ** count) if group["bias_correction"] else rate

    def _advance(self, block: Block, span: Span, target: str, gradient: torch.Tensor) -> None:
        """The first moment takes the gradient in; it is put, or added where that is another state, into `target`."""
        beta = self.param_groups[span.group]["betas"][0]
        momentum = block.part("exp_avg", span)
        if target == "exp_avg":
            momentum.mul_(beta).add_(gradient, alpha=1 - beta)
        else:
            block.part(target, span).add_(momentum, alpha=beta).add_(gradient, alpha=1 - beta)

    def _vary(self, block: Block, span: Span, gradient: torch.Tensor, name: str = "exp_avg_sq") -> None:
        """The second moment takes the gradient in."""
        beta = self.param_groups[span.group]["betas"][1]
        gradient = gradient.to(block.dtype)
        block.part(name, span).mul_(beta).addcmul_(gradient, gradient, value=1 - beta)

    def _descend(self, block: Block, span: Span, update: torch.Tensor, count: int) -> None:
        """`p -= lr * (update + weight_decay * p)`; `update` is used up."""
        group = self.param_groups[span.group]
        master = block.part_of_master(span)
        update.mul_(self._rate(span.group, count))
        if group["weight_decay"]:
            update.add_(master, alpha=float(group["lr"]) * group["weight_decay"])
        master.sub_(update)

    def _mask(self, block: Block, mean: torch.Tensor) -> torch.Tensor:
        """Apply the masks of groups to an average, `[unit.numel]`, if there are any."""
        if all(group.get("exp_avg_mask") is None for group in self.param_groups):
            return mean
        for start, stop in block.ranges:
            place = next(k for k in block.present if block.unit.slots[k].start == start)
            mask = self.param_groups[block.unit.slots[place].group - block.first_group].get("exp_avg_mask")
            if mask is not None:
                mean[start:stop].mul_(mask.reshape(-1).to(device=mean.device, dtype=mean.dtype))
        return mean


class FreezingOptimizer(OneBitOptimizer):
    """Base of those that freeze the variance after `freeze_step` steps, and send one bit per element from then on.

    Args:
        params: parameters or groups of them.
        defaults: values of the groups' keys.
        freeze_step: number of warm-up steps, at least 1.
        common: of `OneBitOptimizer`.

    Raises:
        ValueError: for no warm-up at all.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], *, freeze_step: int, **common: Any) -> None:
        if freeze_step < 1:
            raise ValueError(f"freeze_step={freeze_step} leaves no step to learn the variance from; it is at least 1.")
        self.freeze_step = int(freeze_step)
        super().__init__(params, defaults, **common)

    @property
    def local_gradients(self) -> bool:
        """True once the variance is frozen."""
        return self._is_frozen(self.steps + 1)

    def _is_frozen(self, count: int) -> bool:
        return count > self.freeze_step
