"""Muon for matrices, Adam for the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_lightning.errors import ConfigError
from ds_lightning.optim.adam import AdamSteps, checked_betas
from ds_lightning.optim.muon_params import ADAM, MUON, split_groups
from ds_lightning.optim.native import Preparation, Slices, check_positive, moment_dtype_name
from ds_lightning.optim.newton_schulz import EPS, check_method, compute_dtype, cost, orthogonalize
from ds_lightning.optim.parts import Parts, Whole, WholeTensors

_OF_MUON = ("momentum", "ns_method", "ns_dtype")
_OF_ADAM = ("betas", "eps")
_NS_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Muon(AdamSteps):
    """Muon (K. Jordan et al., 2024; arXiv:2502.16982 for sharded matrices) with an auxiliary AdamW.

        M = lerp(M, g, 1 - momentum)
        d = lerp(g, M, momentum)
        o = newton_schulz(d / (|d| + 1e-7))
        p = p (1 - lr weight_decay) - lr sqrt(max(1, rows / cols)) o

    Tensors of more than two dimensions (kernels of convolutions) are matrices of as many rows as their first one has.
    Embeddings, output layers and vectors are updated by AdamW in the same step. The state of a matrix is
    "momentum_buffer", that of the others "step", "exp_avg" and "exp_avg_sq".

    [Note: Muon on shards] Momenta stay sharded as everything else is. In a step each matrix is put together on one
    rank, chosen such that all have equally much to do, is orthogonalised there, and goes back in slices: two exchanges
    of P / N elements, less than the reduction of gradients moves. At stage 0 only the results travel, to everybody.

    Args:
        params: `model.named_parameters()`, whose names tell what is a matrix for Muon: two dimensions or more, and
            neither "embed" nor "lm_head" in the name; or groups, each with `use_muon=True` or False;
            `ds_lightning.optim.muon_groups(model)` makes them and knows embeddings by their class too.
        lr: of both where given; otherwise 0.02 for Muon and 3e-4 for Adam.
        momentum: of Muon.
        weight_decay: decoupled, of both.
        betas: of Adam.
        eps: of Adam.
        ns_method: "gram" or "standard", see `newton_schulz`.
        muon_lr: of Muon, instead of `lr`.
        adam_lr: of Adam, instead of `lr`.
        ns_dtype: in which Newton-Schulz computes and matrices travel: "fp32", "bf16", "fp16", or "auto": fp16 for
            "gram" and bf16 for "standard" on GPUs, fp32 on CPUs, fp64 for fp64 parameters.
        moment_dtype: "fp32", "bf16" or "param", the dtype of the parameter. 16 bits are rounded to nearest in the
            buffer of momenta, whose steps they have digits for, and stochastically in the moments of Adam.

    Raises:
        ConfigError: where nothing says which parameters are Muon's, or a vector is to be; for an unknown method.
        ValueError: for hyper-parameters out of range.
    """

    moments = ("momentum_buffer", "exp_avg", "exp_avg_sq")
    needs_parts = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor | None = None,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        betas: Sequence[float] = (0.9, 0.95),
        eps: float = 1e-10,
        ns_method: str = "gram",
        *,
        muon_lr: float | Tensor | None = None,
        adam_lr: float | Tensor | None = None,
        ns_dtype: str = "auto",
        moment_dtype: str | torch.dtype = "fp32",
    ) -> None:
        muon_lr = _first(muon_lr, lr, 0.02)
        adam_lr = _first(adam_lr, lr, 3e-4)
        check_positive(muon_lr=muon_lr, adam_lr=adam_lr, momentum=momentum, eps=eps, weight_decay=weight_decay)
        if momentum >= 1:
            raise ValueError(f"momentum={momentum!r} is not below 1.")
        if ns_dtype not in ("auto", *_NS_DTYPES):
            raise ConfigError(f"ns_dtype={ns_dtype!r} is not one of auto, {', '.join(_NS_DTYPES)}.")
        check_method(ns_method)
        self._learning_rates = {True: muon_lr, False: adam_lr}
        defaults = {
            "lr": muon_lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "betas": checked_betas(betas),
            "eps": eps,
            "ns_method": ns_method,
            "ns_dtype": ns_dtype,
            "moment_dtype": moment_dtype_name(moment_dtype),
        }
        super().__init__(split_groups(params), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As that of torch; the group says `use_muon`, or has one of the names "muon-params" and "adam-params".

        Raises:
            ConfigError: where it does not, or where a vector is to be Muon's.
        """
        group = dict(param_group)
        if "use_muon" not in group:
            if group.get("name") not in (MUON, ADAM):
                raise ConfigError(
                    "A group of Muon does not say whether its parameters are updated by Muon or by Adam. Give it "
                    "use_muon=True or use_muon=False."
                )
            group["use_muon"] = group["name"] == MUON
        members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        group["params"] = members
        vectors = [tuple(p.shape) for p in members if group["use_muon"] and p.ndim < 2]
        if vectors:
            raise ConfigError(
                f"use_muon=True for parameters of the shapes {vectors[:5]}, but Muon is for matrices. Put them into a "
                "group with use_muon=False."
            )
        check_method(group.get("ns_method", self.defaults["ns_method"]))
        group.setdefault("lr", self._learning_rates[bool(group["use_muon"])])
        super().add_param_group(group)
        _keep_own(self.param_groups[-1])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            _keep_own(group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_learning_rates": self._learning_rates}

    def _step_groups(self, slices: Sequence[Slices], preparation: Preparation) -> None:
        parts = preparation.parts or WholeTensors([each.params for each in slices])
        matrices = [(group, each) for group, each in zip(self.param_groups, slices, strict=True) if group["use_muon"]]
        directions: dict[Tensor, Tensor] = {}
        for group, each in matrices:
            if each.params:
                directions.update(self._directions(group, each, preparation.grad_scale))
        self._orthogonalize(directions, parts)
        for group, each in matrices:
            if each.params:
                _apply(group, each, directions, parts)
        for group, each in zip(self.param_groups, slices, strict=True):
            if each.params and not group["use_muon"]:
                self._step_adam(group, each, preparation.grad_scale)

    # Muon -------------------------------------------------------------------------------------------------------------

    def _directions(self, group: dict[str, Any], slices: Slices, grad_scale: float) -> Iterable[tuple[Tensor, Tensor]]:
        """Update the momenta; gives d, flat, by tensor."""
        momentum = float(group["momentum"])
        kept = self._moments(group, slices, "momentum_buffer")
        wide = [_wide(value) for value in kept]
        grads = [grad.to(value.dtype).reshape(value.shape) for grad, value in zip(slices.grads, wide, strict=True)]
        if grad_scale != 1:
            grads = list(torch._foreach_mul(grads, grad_scale))
        torch._foreach_lerp_(wide, grads, 1 - momentum)
        for stored, value in zip(kept, wide, strict=True):
            if stored is not value:
                stored.copy_(value)
        found = torch._foreach_lerp(grads, wide, momentum)
        return zip(slices.params, [each.reshape(-1) for each in found], strict=True)

    def _orthogonalize(self, directions: dict[Tensor, Tensor], parts: Parts) -> None:
        """Put o in the place of d. Collective."""
        chosen = [n for n, whole in enumerate(parts.parameters) if self.param_groups[whole.group]["use_muon"]]
        if not chosen:
            return
        norms = parts.total(_squares(directions, parts)).sqrt()
        factors = (1.0 / (norms + EPS)).tolist()
        dtypes = {number: self._dtype(parts.parameters[number], parts.device) for number in chosen}

        def work(numbers: Sequence[int], values: Tensor) -> Tensor:
            whole = parts.parameters[numbers[0]]
            shape = _matrix(whole.shape)
            method = self.param_groups[whole.group]["ns_method"]
            return orthogonalize(values.view(-1, *shape), method).reshape(len(numbers), -1)

        for dtype in dict.fromkeys(dtypes.values()):
            here: dict[Tensor, Tensor] = {}
            for tensor in list(directions):
                segments = parts.segments(tensor)
                if segments and dtypes[segments[0].parameter] == dtype:
                    flat = directions.pop(tensor)  # 16 bits take its place
                    views = [flat[s.start : s.stop] for s in segments]
                    torch._foreach_mul_(views, [factors[s.parameter] for s in segments])
                    here[tensor] = flat.to(dtype)
            numbers = [number for number in chosen if dtypes[number] == dtype]
            costs = [cost(*_matrix(parts.parameters[number].shape)) for number in numbers]
            parts.on_wholes(here, numbers, costs, dtype, work)
            directions.update(here)

    def _dtype(self, whole: Whole, device: torch.device) -> torch.dtype:
        group = self.param_groups[whole.group]
        wanted = group["ns_dtype"]
        return compute_dtype(group["ns_method"], device, whole.dtype) if wanted == "auto" else _NS_DTYPES[wanted]


def _keep_own(group: dict[str, Any]) -> None:
    """Leave in a group what its rule reads: schedules, monitors and readers take the rest for a setting."""
    for key in _OF_ADAM if group["use_muon"] else _OF_MUON:
        group.pop(key, None)


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _wide(value: Tensor) -> Tensor:
    return value if value.dtype == torch.float64 else value.float()


def _matrix(shape: torch.Size) -> tuple[int, int]:
    """Rows and columns."""
    return shape[0], shape[1:].numel()


def _squares(directions: Mapping[Tensor, Tensor], parts: Parts) -> Tensor:
    """Squares of norms of the parts that this rank counts, by parameter."""
    numbers, views = [], []
    for tensor, flat in directions.items():
        for segment in parts.segments(tensor):
            if segment.counted:
                numbers.append(segment.parameter)
                views.append(flat[segment.start : segment.stop])
    squares = torch.zeros(len(parts.parameters), dtype=torch.float64)
    by_device: dict[torch.device, list[int]] = {}
    for k, view in enumerate(views):
        by_device.setdefault(view.device, []).append(k)
    for places in by_device.values():
        norms = torch.stack(torch._foreach_norm([views[k] for k in places], 2.0, dtype=torch.float64)).cpu()
        squares.index_add_(0, torch.tensor([numbers[k] for k in places]), norms.square_())
    return squares


def _apply(group: Mapping[str, Any], slices: Slices, directions: Mapping[Tensor, Tensor], parts: Parts) -> None:
    """The last line of the formula, and the copies of p."""
    lr = float(group["lr"])
    for k, param in enumerate(slices.params):
        wide = _wide(param.detach())
        flat = wide.reshape(-1)
        if group["weight_decay"] != 0:
            flat.mul_(1 - lr * group["weight_decay"])
        segments = [segment for segment in parts.segments(param) if segment.stop > segment.start]
        if segments:
            found = directions[param].to(flat.dtype)
            moves = [found[s.start : s.stop] for s in segments]
            shapes = [_matrix(parts.parameters[s.parameter].shape) for s in segments]
            torch._foreach_mul_(moves, [lr * max(1.0, rows / cols) ** 0.5 for rows, cols in shapes])
            torch._foreach_sub_([flat[s.start : s.stop] for s in segments], moves)
        if flat.data_ptr() != param.data_ptr():
            param.detach().copy_(flat.view(param.shape))
        copy = slices.copies[k] if slices.copies else None
        if copy is not None:
            copy.copy_(flat.view(copy.shape))
