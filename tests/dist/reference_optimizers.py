"""LAMB and Muon as they are published, in fp64, one whole tensor at a time: nothing of ours, nothing of torch.optim."""

import torch


def lamb(p, g, state, *, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, max_coeff=10.0, min_coeff=0.01, **flags):
    """arXiv:1904.00962, algorithm 2, with DeepSpeed's bounds and bias correction."""
    m, v, t = state.get("m", torch.zeros_like(p)), state.get("v", torch.zeros_like(p)), state.get("t", 0) + 1
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g**2
    state.update(m=m, v=v, t=t)
    root = (v + eps).sqrt() if flags.get("eps_inside_sqrt") else v.sqrt() + eps
    u = m / root + weight_decay * p
    step = lr
    if flags.get("bias_correction", True):
        step = lr * (1 - betas[1] ** t) ** 0.5 / (1 - betas[0] ** t)
    of_p, of_u = float((p**2).sum()) ** 0.5, float((u**2).sum()) ** 0.5
    coefficient = 1.0 if of_p == 0 or of_u == 0 else min(max(of_p / of_u, min_coeff), max_coeff)
    state["coefficient"] = coefficient
    return p - step * coefficient * u


def newton_schulz(x):
    """Five steps of the quintic of K. Jordan et al. (2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / (float((x**2).sum()) ** 0.5 + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def muon(p, g, state, *, lr, momentum=0.95, weight_decay=0.0):
    m = state.get("m", torch.zeros_like(p))
    m = momentum * m + (1 - momentum) * g
    state["m"] = m
    d = (1 - momentum) * g + momentum * m
    d = d.flatten(1)
    rows, cols = d.shape
    if d.numel():
        d = newton_schulz(d) * max(1.0, rows / cols) ** 0.5
    return p * (1 - lr * weight_decay) - lr * d.reshape(p.shape)


def adamw(p, g, state, *, lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0):
    m, v, t = state.get("m", torch.zeros_like(p)), state.get("v", torch.zeros_like(p)), state.get("t", 0) + 1
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g**2
    state.update(m=m, v=v, t=t)
    u = (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
    return p - lr * (u + weight_decay * p)


class Reference(torch.optim.Optimizer):
    """Steps on fp64 copies of what it is given; groups say which rule."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            options = {key: value for key, value in group.items() if key not in ("params", "rule")}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                wide = state.setdefault("wide", parameter.detach().double().clone())
                state["wide"] = group["rule"](wide, parameter.grad.double(), state, **options)
                parameter.copy_(state["wide"])
