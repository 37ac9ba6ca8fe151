"""Proves by hand that DeepSpeed goes on from what `write_universal` writes.

    python prove_universal.py write FOLDER         # where ds_lightning is installed: one folder of each native fixture
    python prove_universal.py check FOLDER         # where deepspeed is installed

The check trains the model of `make.py` without a break, and, at several stages and numbers of ranks, from the folders:
the losses of the next steps must be the same, at stage 3 as those from DeepSpeed's own universal checkpoint.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
NAMES = ("stage2_fp32", "stage3_fp32", "stage1_fp32", "stage2_bf16", "stage3_bf16")
AFTER = 3


def write(folder: Path) -> None:
    from ds_lightning.checkpoint.deepspeed.convert import DeepSpeedCheckpoint, to_lightning
    from ds_lightning.checkpoint.deepspeed.universal import write_universal

    for name in NAMES:
        found = to_lightning(DeepSpeedCheckpoint(HERE / name), tensor=lambda stored: stored)
        write_universal(found, folder / name / "universal")


def train(rank: int, world: int, port: int, stage: int, precision: str, load: str, out: str) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    import deepspeed
    import make

    deepspeed.init_distributed("gloo", verbose=False)
    config = make.config_of(stage, precision)
    config["train_micro_batch_size_per_gpu"] = 8 // world
    config["zero_optimization"].pop("round_robin_gradients", None)
    if load:
        config["checkpoint"] = {"load_universal": True}
    torch.manual_seed(3)
    model = make.Tiny()
    optimizer = torch.optim.AdamW(make.groups_of(model), betas=(0.9, 0.95))
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    first = 0
    if load:
        path, _ = engine.load_checkpoint(load)
        assert path is not None
        first = engine.global_steps
        assert first == make.STEPS
    losses = []
    for step in range(first, make.STEPS + AFTER):
        both = [torch.cat(pair) for pair in zip(make.batch(step, 0), make.batch(step, 1), strict=True)]
        tokens, target = (part.chunk(world)[rank] for part in both)
        loss = make.loss_of(engine(tokens), target)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float()
        torch.distributed.all_reduce(mean)
        losses.append(float(mean) / world)
    if rank == 0:
        Path(out).write_text(repr(losses[-AFTER:]))
    torch.distributed.barrier()


def check(folder: Path) -> None:
    sys.path.insert(0, str(HERE))
    import make

    def run(world: int, *rest: object) -> list[float]:
        out = folder / "losses.txt"
        out.unlink(missing_ok=True)
        torch.multiprocessing.spawn(train, (world, make.free_port(), *rest, str(out)), nprocs=world)
        return [float(part) for part in out.read_text().strip("[]").split(",")]

    for name in NAMES:
        stage, precision = int(name[5]), name.split("_")[1]
        unbroken = run(2, stage, precision, "")
        print(name, "unbroken", unbroken, flush=True)
        for target, world in ((1, 2), (2, 2), (3, 2), (2, 1)):
            found = run(world, target, precision, str(folder / name))
            expected = unbroken
            if target == 3 and precision == "fp32":
                # DeepSpeed gives all groups the hyper-parameters of the first: so does it with its own checkpoints.
                expected = run(world, target, precision, str(HERE / "universal_stage3"))
            difference = max(abs(a - b) for a, b in zip(found, expected, strict=True))
            exact = "equal" if found == expected else f"within {difference:.1e}"
            print(name, f"-> stage {target} on {world}", found, exact, flush=True)
            assert difference < (1e-6 if precision == "fp32" else 2e-2)


if __name__ == "__main__":
    {"write": write, "check": check}[sys.argv[1]](Path(sys.argv[2]).absolute())
