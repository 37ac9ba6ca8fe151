"""The 1-bit family as published, in float64, all ranks in one process, one parameter after the other.

Nothing here knows flat buffers; of the layout it takes only which elements of a parameter each rank serves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Cells = dict[str, list[tuple[int, int]]]
"""By parameter the ranges that ranks serve, not empty."""


class Vectors(nn.Module):
    """Parameters whose gradients are what the test says, whatever their values: sizes that divide badly, and none."""

    SIZES = (1, 7, 8, 9, 15, 17, 1000, 0, 33)

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.blocks = nn.ModuleList(nn.Module() for _ in range(2))
        for place, block in enumerate(self.blocks):
            for size in self.SIZES[place * 4 : place * 4 + 5]:
                block.register_parameter(f"p{size}", nn.Parameter(torch.randn(size, generator=generator)))
        self.matrix = nn.Parameter(torch.randn(3, 5, generator=generator))
        self.zeros = nn.Parameter(torch.zeros(4))
        self.rare = nn.Parameter(torch.randn(11, generator=generator))
        self.picky = nn.Parameter(torch.randn(6, generator=generator))
        self.never = nn.Parameter(torch.randn(5, generator=generator))
        self.to(dtype)

    def groups(self) -> list[dict[str, Any]]:
        named = dict(self.named_parameters())
        first = [p for name, p in named.items() if "p" in name.rpartition(".")[2][:1] and name != "picky"]
        rest = [p for p in named.values() if all(p is not other for other in first)]
        return [{"params": first, "weight_decay": 0.05}, {"params": rest, "lr": 0.004, "betas": (0.8, 0.98)}]

    def gradients(self, rank: int, step: int, micro: int = 0) -> dict[str, Tensor]:
        """By name; those that are missing have none."""
        generator = torch.Generator().manual_seed(1 + 10_000 * micro + 100 * step + rank)
        common = torch.Generator().manual_seed(7)
        found = {}
        for place, (name, p) in enumerate(self.named_parameters()):
            drawn = torch.randn(p.shape, generator=generator) + 0.5 * torch.randn(p.shape, generator=common)
            if name == "never" or (name == "rare" and step % 3 == 1) or (name == "picky" and (rank or step % 2)):
                continue
            found[name] = (drawn * 10.0 ** (place % 4 - 2)).bfloat16().float()  # exact in every precision
        return found

    def forward(self, rank: int, step: int, micro: int = 0) -> Tensor:
        named = dict(self.named_parameters())
        gradients = self.gradients(rank, step, micro)
        return sum((named[name] * g.to(named[name].dtype)).sum() for name, g in gradients.items())


def signs(x: Tensor) -> Tensor:
    return torch.where(x >= 0, 1.0, -1.0).double()


def scale(x: Tensor) -> Tensor:
    return x.norm() / x.numel() ** 0.5


@dataclass
class Reference:
    """One optimizer on all ranks. States are by parameter, lists are by rank."""

    module: Vectors
    world: int
    cells: Cells
    options: dict[str, Any]
    masks: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        groups = self.module.groups()
        self.hyper = {}
        for name, p in self.module.named_parameters():
            group = next(g for g in groups if any(p is other for other in g["params"]))
            defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
            self.hyper[name] = {**defaults, **self.options, **{k: v for k, v in group.items() if k != "params"}}
        self.p = {n: [p.detach().double().flatten()] * self.world for n, p in self.module.named_parameters()}
        zero = {n: torch.zeros(p.numel()).double() for n, p in self.module.named_parameters()}
        self.m = {n: [z] * self.world for n, z in zero.items()}
        self.v = dict(zero)
        self.error = {n: [z] * self.world for n, z in zero.items()}
        self.server = {n: z.clone() for n, z in zero.items()}
        self.step = 0

    def mean_of(self, name: str, values: list[Tensor]) -> Tensor:
        """The compressed mean, with error feedback on both sides."""
        compensated = [v + e for v, e in zip(values, self.error[name], strict=True)]
        sent = [scale(x) * signs(x) for x in compensated]
        self.error[name] = [x - s for x, s in zip(compensated, sent, strict=True)]
        total = sum(sent) / self.world + self.server[name]
        result = torch.zeros_like(total)
        for start, stop in self.cells[name]:
            result[start:stop] = scale(total[start:stop]) * signs(total[start:stop])
        self.server[name] = total - result
        return result * self.masks.get(name, 1.0)

    def run(self, gradients: list[dict[str, Tensor]]) -> None:
        """One step with the gradients of each rank."""
        self.step += 1
        present = [name for name in self.p if any(name in g for g in gradients) and self.v[name].numel()]
        local = {
            name: [g[name].double().flatten() if name in g else torch.zeros_like(self.v[name]) for g in gradients]
            for name in present
        }
        self.update(present, local)

    def update(self, present: list[str], local: dict[str, list[Tensor]]) -> None:
        raise NotImplementedError

    def root(self, name: str, second_moments: int) -> Tensor:
        hyper = self.hyper[name]
        v = self.v[name] / ((1 - hyper["betas"][1] ** second_moments) if hyper.get("bias_correction") else 1)
        return (v + hyper["eps"]).sqrt() if hyper.get("eps_inside_sqrt") else v.sqrt() + hyper["eps"]

    def rate(self, name: str) -> float:
        hyper = self.hyper[name]
        return hyper["lr"] / ((1 - hyper["betas"][0] ** self.step) if hyper.get("bias_correction") else 1)

    def vary(self, name: str, gradient: Tensor) -> None:
        beta = self.hyper[name]["betas"][1]
        self.v[name] = beta * self.v[name] + (1 - beta) * gradient**2

    def moved(self, name: str, gradient: Tensor, rank: int = 0) -> Tensor:
        beta = self.hyper[name]["betas"][0]
        return beta * self.m[name][rank] + (1 - beta) * gradient

    def descend(self, name: str, m: Tensor, second_moments: int) -> None:
        """Every rank is at the same place, and goes on alike."""
        hyper, p = self.hyper[name], self.p[name][0]
        p = p - self.rate(name) * m / self.root(name, second_moments) - hyper["lr"] * hyper["weight_decay"] * p
        self.m[name], self.p[name] = self.everywhere(m), self.everywhere(p)

    def everywhere(self, value: Tensor) -> list[Tensor]:
        return [value] * self.world


class Adam1(Reference):
    """1-bit Adam (arXiv:2102.02888), Algorithm 1."""

    def update(self, present: list[str], local: dict[str, list[Tensor]]) -> None:
        freeze = self.options["freeze_step"]
        for name in present:
            if self.step <= freeze:
                gradient = sum(local[name]) / self.world
                m = self.moved(name, gradient)
                self.vary(name, gradient)
            else:
                m = self.mean_of(name, [self.moved(name, g) for g in local[name]])
            self.descend(name, m, min(self.step, freeze))


class Adam01(Reference):
    """0/1 Adam (arXiv:2202.06009), Algorithm 1, with the policies of its section 6."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.interval, self.updates, self.local_interval = 1, 0, 1
        self.u: dict[str, list[Tensor]] = {}
        self.anchor: dict[str, Tensor] = {}
        self.rates: dict[str, float] = {}
        self.decays: dict[str, float] = {}
        self.common = True

    def update(self, present: list[str], local: dict[str, list[Tensor]]) -> None:
        if self.step > self.options["var_freeze_step"]:
            self.locally(present, local)
            return
        full = self.step % self.interval == 0
        self.updates += full
        for name in present:
            if full:
                gradient = sum(local[name]) / self.world
                m = self.moved(name, gradient)
                self.vary(name, gradient)
            else:
                m = self.mean_of(name, [self.moved(name, g) for g in local[name]])
            self.descend(name, m, self.updates)
        if full and self.updates % self.options["var_update_scaler"] == 0:
            self.interval *= 2

    def locally(self, present: list[str], local: dict[str, list[Tensor]]) -> None:
        done = self.step - self.options["var_freeze_step"]
        if done == 1:
            for name, zero in self.v.items():
                self.error[name], self.server[name] = self.everywhere(0 * zero), 0 * zero
        if self.common:
            self.u = {name: self.everywhere(0 * v) for name, v in self.v.items()}
            self.anchor = {name: p[0] for name, p in self.p.items()}
            self.rates = dict.fromkeys(self.p, 0.0)
            self.decays = dict.fromkeys(self.p, 0.0)
            self.moving: set[str] = set()
        self.moving |= set(present)
        for name, hyper in self.hyper.items():
            self.rates[name] += self.rate(name)
            self.decays[name] += hyper["lr"] * hyper["weight_decay"]
        for name in present:
            self.m[name] = [self.moved(name, g, rank) for rank, g in enumerate(local[name])]
            self.u[name] = [u + self.rate(name) * m for u, m in zip(self.u[name], self.m[name], strict=True)]
            self.p[name] = [self.at(name, u) for u in self.u[name]]
        self.common = self.step % self.local_interval == 0
        if self.common:
            for name in self.p:
                if name in self.moving:
                    self.arrive(name, self.mean_of(name, self.u[name]))
        if done % self.options["local_step_scaler"] == 0:
            self.local_interval = min(self.options["local_step_clipper"], 2 * self.local_interval)

    def at(self, name: str, u: Tensor) -> Tensor:
        return self.anchor[name] * (1 - self.decays[name]) - u / self.root(name, self.updates)

    def arrive(self, name: str, u: Tensor) -> None:
        self.p[name] = self.everywhere(self.at(name, u))
        self.m[name] = self.everywhere(u / self.rates[name])

    def settle(self) -> None:
        """An exact mean ends the local steps."""
        if not self.common:
            for name in self.moving:
                self.arrive(name, sum(self.u[name]) / self.world)
        self.common = True


class Lamb1(Reference):
    """1-bit LAMB (arXiv:2104.06069), Algorithm 1, with the scaling of momenta to one size that the paper has."""

    BOUNDS = {
        "max_coeff": 10.0,
        "min_coeff": 0.01,
        "coeff_beta": 0.9,
        "factor_max": 4.0,
        "factor_min": 0.5,
        "factor_threshold": 0.1,
    }

    def __post_init__(self) -> None:
        self.options = {**self.BOUNDS, **self.options}
        super().__post_init__()
        self.coefficient = dict.fromkeys(self.p, 0.0)
        self.factor = dict.fromkeys(self.p, 1.0)
        self.used: dict[str, float] = {}

    def update(self, present: list[str], local: dict[str, list[Tensor]]) -> None:
        self.used = {}
        if self.step <= self.options["freeze_step"]:
            for name in present:
                self.warm(name, sum(local[name]) / self.world)
            self.fresh = dict(self.v)
            return
        if self.step == self.options["freeze_step"] + 1:
            sizes = {name: float(scale(m[0])) for name, m in self.m.items() if m[0].any()}
            mean = sum(sizes.values()) / len(sizes)
            self.scaling = {name: mean / size for name, size in sizes.items()}
        for name in present:
            factor = self.scaling[name]
            m = self.mean_of(name, [factor * self.moved(name, g) for g in local[name]]) / factor
            self.go_on(name, m)

    def warm(self, name: str, gradient: Tensor) -> None:
        hyper, m = self.hyper[name], self.moved(name, gradient)
        self.vary(name, gradient)
        p = self.p[name][0]
        u = self.corrected(name, m) / self.root(name, self.step) + hyper["weight_decay"] * p
        coefficient = 1.0
        if p.norm() > 0 and u.norm() > 0:
            coefficient = min(max(float(p.norm() / u.norm()), hyper["min_coeff"]), hyper["max_coeff"])
            beta = hyper["coeff_beta"]
            self.coefficient[name] = beta * self.coefficient[name] + (1 - beta) * coefficient
        self.goto(name, m, u, coefficient)

    def go_on(self, name: str, m: Tensor) -> None:
        hyper = self.hyper[name]
        beta1, beta2 = hyper["betas"]
        gradient = (m - beta1 * self.m[name][0]) / (1 - beta1)
        self.fresh[name] = beta2 * self.fresh[name] + (1 - beta2) * gradient**2
        root = self.root(name, self.options["freeze_step"])
        frozen, self.v[name] = self.v[name], self.fresh[name]
        fresh_root = self.root(name, self.step)
        self.v[name] = frozen
        adaptive = self.corrected(name, m) / root
        u = adaptive + hyper["weight_decay"] * self.p[name][0]
        factor = float((root / fresh_root).max())
        if hyper["weight_decay"] > 0:
            share = min(1.0, float(adaptive.norm() / u.norm()))
            factor = factor * share + (1 - share)
        factor = min(max(factor, hyper["factor_min"]), hyper["factor_max"])
        allowed, last = hyper["factor_threshold"], self.factor[name]
        factor = self.factor[name] = min(max(factor, last * (1 - allowed)), last * (1 + allowed))
        self.goto(name, m, u, (self.coefficient[name] or 1.0) * factor)

    def corrected(self, name: str, m: Tensor) -> Tensor:
        hyper = self.hyper[name]
        return m / (1 - hyper["betas"][0] ** self.step) if hyper.get("bias_correction") else m

    def goto(self, name: str, m: Tensor, u: Tensor, coefficient: float) -> None:
        self.used[name] = coefficient
        self.m[name] = self.everywhere(m)
        self.p[name] = self.everywhere(self.p[name][0] - self.hyper[name]["lr"] * coefficient * u)
