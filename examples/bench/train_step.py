"""One training step of ds_lightning side by side with its peers: time, bytes on the wire, memory, and the same losses.

    python examples/bench/train_step.py                         # everything, on CPU with gloo, 2 ranks, 1 thread each
    python examples/bench/train_step.py --models gpt12x512 --precisions fp32 --contestants ddp stage2 stage3

Every contestant runs in processes of its own, in turn, several times; figures are medians over all rounds and ratios to
DDP of the same run, because absolute times on a shared machine mean little; processor time, of all threads of a rank,
tells even when other programs run. Bytes on the wire are read from the kernel's
counters of the loopback interface. Peak memory is the high-water mark above the baseline after the imports.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

CONTESTANTS = ("ddp", "fsdp2", "zero_redundancy", "stage0", "stage1", "stage2", "stage3", "deepspeed2", "deepspeed3")
MODELS = ("gpt4x256", "gpt12x512", "many_small")
PRECISIONS = ("fp32", "bf16")


# The worker: one rank of one contestant -----------------------------------------------------------------------------


def make_model(name: str) -> Any:
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, width = x.shape
            q, k, v = (
                t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(width, 2)
            )
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    class GPT(nn.Module):
        def __init__(self, layers: int, width: int, vocabulary: int, context: int = 128) -> None:
            super().__init__()
            self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
            self.blocks = nn.ModuleList(Block(width, 8) for _ in range(layers))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    class ManySmall(nn.Module):
        """Three hundred layers of a few thousand elements."""

        def __init__(self) -> None:
            super().__init__()
            self.wte = nn.Embedding(256, 64)
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(150))
            self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(150))
            self.head = nn.Linear(64, 256, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.wte(tokens)
            for layer, norm in zip(self.layers, self.norms, strict=True):
                x = x + torch.tanh(layer(norm(x)))
            return self.head(x)

    torch.manual_seed(0)
    return {
        "gpt4x256": lambda: GPT(4, 256, 256),
        "gpt12x512": lambda: GPT(12, 512, 8192),
        "many_small": ManySmall,
    }[name]()


def batch_of(model: str, step: int, rank: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(1000 * step + rank)
    vocabulary, size, length = {"gpt4x256": (256, 4, 128), "gpt12x512": (8192, 2, 128), "many_small": (256, 2, 32)}[
        model
    ]
    return torch.randint(0, vocabulary, (size, length + 1), generator=generator)


def contestant(name: str, model: Any, precision: str, rank: int) -> Any:
    """Returns `step(batch) -> loss`, and a function that gives bytes of model state."""
    import torch
    from torch.nn import functional as F

    bf16 = precision == "bf16"
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False) if bf16 else contextlib.nullcontext()

    def loss_of(net: Any, batch: Any) -> torch.Tensor:
        with autocast:
            logits = net(batch[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3, fused=True)

    def state_bytes(net: Any, optimizer: Any) -> int:
        tensors = [p for p in net.parameters()] + [p.grad for p in net.parameters() if p.grad is not None]
        for entry in optimizer.state.values():
            tensors += [v for v in entry.values() if torch.is_tensor(v)]
        local = [getattr(t, "_local_tensor", t) for t in tensors]
        return sum(t.untyped_storage().nbytes() for t in {t.untyped_storage().data_ptr(): t for t in local}.values())

    if name.startswith("stage"):
        from ds_lightning.layout.flat import LayoutOptions
        from ds_lightning.precision.dtypes import DtypePolicy
        from ds_lightning.topology import Topology
        from ds_lightning.zero.engine import ZeroEngine
        from ds_lightning.zero.options import EngineOptions
        from ds_lightning.zero.plan import StagePlan

        threshold = int(os.environ.get("DSL_BENCH_THRESHOLD", "20000"))
        options = EngineOptions(
            layout=LayoutOptions(param_persistence_threshold=threshold),
            dtypes=DtypePolicy(torch.bfloat16 if bf16 else None),
        )
        optimizer = adam(model.parameters())
        topology = Topology.create(torch.device("cpu"), timedelta(seconds=120))
        engine = ZeroEngine(model, [optimizer], topology, StagePlan.of(int(name[-1])), options)

        def step(batch: Any) -> float:
            with engine.passes.step_scope():
                loss = loss_of(model, batch)
            optimizer.zero_grad()
            with engine.passes.backward_scope():
                loss.backward()
            optimizer.step()
            return loss.item()

        return step, engine.model_state_bytes

    if name.startswith("deepspeed"):
        import deepspeed

        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": int(name[-1])},
                "gradient_clipping": 0.0,
                "bf16": {"enabled": bf16},
            },
        )

        def step(batch: Any) -> float:
            loss = loss_of(engine, batch)
            engine.backward(loss)
            engine.step()
            return loss.item()

        return step, lambda: 0

    if name == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        policy = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            if bf16
            else MixedPrecisionPolicy()
        )
        for block in getattr(model, "blocks", []):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        net = fully_shard(model, mesh=mesh, mp_policy=policy)
        autocast = contextlib.nullcontext()
        optimizer = adam(net.parameters())
    else:
        net = torch.nn.parallel.DistributedDataParallel(model)
        if name == "zero_redundancy":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-3, fused=True)
        else:
            optimizer = adam(net.parameters())

    def step(batch: Any) -> float:
        loss = loss_of(net, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step, lambda: state_bytes(net, optimizer)


def loopback_bytes() -> int:
    """Bytes that went over the loopback interface since the machine started."""
    line = next(row for row in Path("/proc/net/dev").read_text().splitlines() if row.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def memory(field: str) -> int:
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(field))
    return int(line.split()[1]) * 1024


def run_rank(name: str, model_name: str, precision: str, rank: int, world_size: int, steps: int, store: str) -> None:
    import torch
    import torch._dynamo  # optimizers and wrappers import it at their first step: part of the baseline
    import torch.distributed as dist

    if name.startswith("stage"):
        import ds_lightning.zero.engine  # noqa: F401 - part of the import baseline
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    model = make_model(model_name)
    numel = sum(p.numel() for p in model.parameters())
    baseline = memory("VmRSS") - 4 * numel
    dist.barrier()
    began = time.perf_counter()
    step, state_bytes = contestant(name, model, precision, rank)
    losses, times, cpu = [], [], []
    sent = 0
    for index in range(steps):
        batch = batch_of(model_name, index, rank)
        if index:  # set-up and the first step have other traffic
            dist.barrier()
        if index == 2:
            sent = loopback_bytes()
        start, busy = time.perf_counter(), time.process_time()
        losses.append(step(batch))
        times.append(time.perf_counter() - (began if index == 0 else start))
        cpu.append(time.process_time() - busy)
    dist.barrier()
    sent = loopback_bytes() - sent
    total = torch.tensor(losses)
    dist.all_reduce(total)
    if rank == 0:
        print(
            json.dumps(
                {
                    "times": times[2:],
                    "cpu": statistics.median(cpu[2:]),
                    "first": times[0],
                    "wire": sent / world_size / (steps - 2),
                    "peak": memory("VmHWM") - baseline,
                    "state": state_bytes() / numel,
                    "numel": numel,
                    "losses": (total / world_size).tolist(),
                }
            ),
            flush=True,
        )
    dist.barrier()


# The parent: runs contestants in turn and prints the table ----------------------------------------------------------


def run_contestant(name: str, model: str, precision: str, world_size: int, steps: int) -> dict[str, Any] | None:
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [
                    *(sys.executable, "-W", "ignore", __file__, "--rank", str(rank), "--world-size", str(world_size)),
                    *("--contestants", name, "--models", model, "--precisions", precision, "--steps", str(steps)),
                    *("--store", str(Path(folder) / "store")),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
            for rank in range(world_size)
        ]
        outputs = [rank.communicate(timeout=900) for rank in ranks]
    if any(rank.returncode for rank in ranks):
        ends = "\n".join(f"rank {r}, exit {p.returncode}: {outputs[r][1][-2000:]}" for r, p in enumerate(ranks))
        print(f"{name} failed on {model} {precision}:\n{ends}", file=sys.stderr)
        return None
    return dict(json.loads(outputs[0][0].strip().splitlines()[-1]))


def report(model: str, precision: str, rounds: dict[str, list[dict[str, Any]]]) -> None:
    reference = rounds["ddp"]
    numel = reference[0]["numel"]
    itemsize = 4 if precision == "fp32" else 2
    theory = numel * itemsize * 2 * (2 - 1) / 2  # DDP's all-reduce on two ranks sends G per rank
    print(f"\n{model}, {precision}, {numel / 1e6:.2f} M parameters, G = {theory / 1e6:.1f} MB per rank and step")
    header = (
        "contestant",
        "ms/step",
        "x DDP",
        "cpu ms",
        "x DDP",
        "first",
        "x DDP",
        "wire/G",
        "state B/p",
        "peak MB",
        "x DDP",
        "loss",
    )
    print("{:>16} {:>9} {:>7} {:>8} {:>7} {:>7} {:>7} {:>7} {:>9} {:>8} {:>7} {:>9}".format(*header))

    def median(results: list[dict[str, Any]], key: str) -> float:
        return statistics.median(result[key] for result in results)

    def step_time(results: list[dict[str, Any]]) -> float:
        return statistics.median(t for result in results for t in result["times"])

    for name, results in rounds.items():
        row = (
            name,
            1e3 * step_time(results),
            step_time(results) / step_time(reference),
            1e3 * median(results, "cpu"),
            median(results, "cpu") / median(reference, "cpu"),
            median(results, "first"),
            median(results, "first") / median(reference, "first"),
            median(results, "wire") / theory,
            median(results, "state"),
            median(results, "peak") / 1e6,
            median(results, "peak") / median(reference, "peak"),
            results[0]["losses"][-1],
        )
        print(
            "{:>16} {:9.1f} {:7.3f} {:8.1f} {:7.3f} {:7.2f} {:7.2f} {:7.3f} {:9.2f} {:8.0f} {:7.3f} {:9.5f}".format(
                *row
            )
        )
    spread = max(
        abs(a - b)
        for results in rounds.values()
        for a, b in zip(results[0]["losses"], reference[0]["losses"], strict=True)
    )
    print(f"largest difference of any loss to DDP's: {spread:.2e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        name, model, precision = args.contestants[0], args.models[0], args.precisions[0]
        run_rank(name, model, precision, args.rank, args.world_size, args.steps, args.store)
        return
    names = [n for n in args.contestants if not n.startswith("deepspeed") or importlib.util.find_spec("deepspeed")]
    names = ["ddp", *(name for name in names if name != "ddp")]
    for precision in args.precisions:
        for model in args.models:
            rounds: dict[str, list[dict[str, Any]]] = {}
            for _ in range(args.rounds):
                for name in names:
                    result = run_contestant(name, model, precision, args.world_size, args.steps)
                    if result is not None:
                        rounds.setdefault(name, []).append(result)
            report(model, precision, rounds)


if __name__ == "__main__":
    main()
