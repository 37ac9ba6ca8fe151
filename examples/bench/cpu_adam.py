"""AdamW on the CPU side by side with torch.optim.AdamW(fused=True), against what memory can do.

    python examples/bench/cpu_adam.py                          # 100 million parameters, 9 rounds; needs 4 GB
    python examples/bench/cpu_adam.py --numel 1000000 --rounds 2 --slices 100

The yardstick is the triad `p += k g` in place, which moves 12 bytes per parameter: a step can hardly move its own bytes
faster. Contestants take turns in one process; figures are medians over rounds, ratios are medians of the ratios within
a round. All of them update the same parameters and have moments of their own.

"separate passes" is what torch needs for 16-bit gradients of fp32 parameters: widen the gradient, multiply it by the
clip coefficient over the loss scale, step, and round the parameters to bf16. (The norm is left out on both sides.)
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import ds_lightning as dsl
from ds_lightning.ops.optim import instruction_sets

SCALE = 0.37
BYTES = {
    "triad": 12,
    "torch fused": 28,
    "ours": 28,
    "torch fused, separate passes": 6 + 8 + 28 + 6,
    "ours, one pass": 28 - 2 + 2,
    "ours, bf16 moments": 20,
    "ours, 8-bit moments": 16,
}
# What is compared, with the speed that was aimed at.
RATIOS = (
    ("torch fused", "ours", 0.97),
    ("torch fused, separate passes", "ours, one pass", 1.25),
    ("ours", "ours, bf16 moments", 1.25),
    ("ours", "ours, 8-bit moments", 0.5),
)
SLICE = 1000


def contestants(numel: int) -> dict[str, Callable[[], object]]:
    """Steps on one large parameter, by name."""
    parameter = nn.Parameter(torch.randn(numel))
    parameter.grad = torch.randn(numel)
    short, copy, wide = parameter.grad.bfloat16(), torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel)
    rival = torch.optim.AdamW([parameter], fused=True)
    apart = nn.Parameter(parameter.detach())
    apart.grad = wide
    rival_apart = torch.optim.AdamW([apart], fused=True)
    rival.step()
    rival_apart.state[apart] = rival.state[parameter]  # one set of moments does for both
    ours, narrow = dsl.optim.AdamW([parameter]), dsl.optim.AdamW([parameter], moment_dtype="bf16")
    tiny = dsl.optim.AdamW8bit([parameter])

    def triad() -> None:
        parameter.data.add_(parameter.grad, alpha=1e-6)

    def separate() -> None:
        wide.copy_(short)
        wide.mul_(SCALE)
        rival_apart.step()
        copy.copy_(apart.data)

    def one_pass() -> None:
        ours.prepare_step(grad_scale=SCALE, copies={parameter: copy}, gradients={parameter: short})
        ours.step()

    steps = (triad, rival.step, ours.step, separate, one_pass, narrow.step, tiny.step)
    return dict(zip(BYTES, steps, strict=True))


def small_slices(count: int) -> dict[str, Callable[[], object]]:
    """Steps on many small parameters."""
    made = {}
    for name, cls, rest in (("torch fused", torch.optim.AdamW, {"fused": True}), ("ours", dsl.optim.AdamW, {})):
        parameters = [nn.Parameter(torch.randn(SLICE)) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.randn(SLICE)
        made[name] = cls(parameters, **rest).step
    return made


def race(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step in each round, after one to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(rounds + 1):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            if index:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def faster(seconds: dict[str, list[float]], slow: str, fast: str) -> float:
    """How many times faster, the median over rounds."""
    return statistics.median(a / b for a, b in zip(seconds[slow], seconds[fast], strict=True))


def main() -> None:
    """Race and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=100_000_000)
    parser.add_argument("--slices", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    print(f"instruction sets: {', '.join(instruction_sets()) or 'no native code'}")
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        print(f"\n{threads} thread(s), {arguments.numel:,} parameters")
        seconds = race(contestants(arguments.numel), arguments.rounds)
        for name, nbytes in BYTES.items():
            median = statistics.median(seconds[name])
            of_triad = faster(seconds, "triad", name) * nbytes / BYTES["triad"]
            print(
                f"  {name:30} {median * 1e3:8.1f} ms  {nbytes:2} bytes each  "
                f"{nbytes * arguments.numel / median / 1e9:6.1f} GB/s  {of_triad:4.0%} of the triad's"
            )
        for slow, fast, target in RATIOS:
            print(f"  {fast} over {slow}: {faster(seconds, slow, fast):.2f} times as fast (aim: {target})")
        seconds = race(small_slices(arguments.slices), arguments.rounds)
        medians = ", ".join(f"{name} {statistics.median(values) * 1e3:.1f} ms" for name, values in seconds.items())
        print(f"  {arguments.slices:,} slices of {SLICE}: {medians}")
        print(f"  ours over torch fused: {faster(seconds, 'torch fused', 'ours'):.2f} times as fast (aim: 3)")


if __name__ == "__main__":
    main()
