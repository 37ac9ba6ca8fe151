"""What activation checkpointing costs and saves on a GPT: none, full, selective, host memory, and every second block.

    python examples/bench/activation.py                                  # on CPU, one thread
    python examples/bench/activation.py --layers 12 --width 512 --batch 8 --rounds 7

Bytes are the device memory that a forward of the whole model made and that lives on until its backward, so inputs that
moved to the host do not count on CUDA, and do on a CPU. Times are of one forward and backward; contestants take turns
in one process, and figures are medians of ratios to the plain model of the same round, because absolute times on a
shared machine mean little. FLOPs are of matrix products and attention, from torch's counter.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ds_lightning.activation.blocks import CheckpointedBlocks, worth_checkpointing
from ds_lightning.activation.options import ActivationOptions
from ds_lightning.config.schema.activation import ActivationCheckpointingConfig
from ds_lightning.demo import ByteGPT
from ds_lightning.layout.units import find_scopes

CONTESTANTS = {
    "none": None,
    "full": ActivationCheckpointingConfig(enabled=True),
    "selective": ActivationCheckpointingConfig(enabled=True, policy="selective"),
    "offload": ActivationCheckpointingConfig(cpu_checkpointing=True),
    "full, every 2nd": ActivationCheckpointingConfig(enabled=True, every=2),
}


def blocks_of(model: nn.Module, block: ActivationCheckpointingConfig) -> CheckpointedBlocks:
    modules = dict(model.named_modules())
    scopes = {name: modules[name] for name in find_scopes(model)}
    return CheckpointedBlocks(worth_checkpointing(scopes, block.every), ActivationOptions.from_config(block))


class Alive(TorchDispatchMode):
    """Knows the memory of every tensor that was made inside, weights left out, and which of it lives on."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self._kind = device.type
        self._weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self._made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self._kind:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._weights:
                    self._made.append((StorageWeakRef(storage), storage.nbytes()))
        return output

    def nbytes(self) -> int:
        return sum({made.cdata: size for made, size in self._made if not made.expired()}.values())


def held_bytes(forward: Callable[[], torch.Tensor], model: nn.Module, device: torch.device) -> int:
    with Alive(model, device) as alive:
        loss = forward()
    held = alive.nbytes()
    del loss
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device = torch.device(options.device)
    model = ByteGPT(
        options.layers, options.width, options.width // 32, block_size=options.context, dropout=options.dropout
    ).to(device)
    tokens = torch.randint(0, 256, (options.batch, options.context), device=device)

    def forward() -> torch.Tensor:
        return model._loss((tokens, tokens))

    def step() -> float:
        model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        forward().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    held: dict[str, int] = {}
    flops: dict[str, int] = {}
    times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for round_ in range(options.rounds + 1):
        for name, block in CONTESTANTS.items():
            blocks = blocks_of(model, block) if block is not None else None
            if round_ == 0:
                step()
                held[name] = held_bytes(forward, model, device)
                with FlopCounterMode(display=False) as counter:
                    step()
                flops[name] = counter.get_total_flops()
            else:
                times[name].append(step())
            if blocks is not None:
                blocks.remove()
    print(f"ByteGPT {options.layers} x {options.width}, batch {options.batch} x {options.context}, {device}")
    print(f"{'':16}  {'held':>10}  {'of none':>8}  {'FLOPs':>6}  {'time':>6}")
    for name in CONTESTANTS:
        ratio = statistics.median(mine / none for mine, none in zip(times[name], times["none"], strict=True))
        share = f"{100 * held[name] / held['none']:.1f} %"
        work = flops[name] / flops["none"]
        print(f"{name:16}  {held[name] / 1e6:>7.1f} MB  {share:>8}  {work:>6.2f}  {ratio:>6.2f}")


if __name__ == "__main__":
    main()
