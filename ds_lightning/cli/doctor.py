"""ds-lightning doctor: versions, devices and native code, and what to do about gaps."""

import importlib.metadata
import platform
from collections.abc import Iterator, Sequence

import torch
import torch.distributed

from ds_lightning.cli.table import print_table
from ds_lightning.ops.status import status

PACKAGES = (
    "ds_lightning",
    "torch",
    "lightning",
    "hydra-core",
    "omegaconf",
    "hjson",
    "rich",
    "transformers",
)


def run(arguments: Sequence[str]) -> int:
    """Print what is there; 0 always, since training on the CPU needs none of it."""
    print_table(
        "Versions",
        [("python", platform.python_version()), *((name, _version(name)) for name in PACKAGES)],
    )
    print_table("Devices", _devices())
    print_table("Native code", _native())
    return 0


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> Iterator[tuple[str, str]]:
    yield "cpu", f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    yield (
        "torch built for CUDA",
        torch.version.cuda or "no: install a CUDA build of torch to train on GPUs",
    )
    count = torch.cuda.device_count()
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    if torch.version.cuda and not count:
        yield "cuda", "no GPU visible: check nvidia-smi and CUDA_VISIBLE_DEVICES"
    backends = {name: getattr(torch.distributed, f"is_{name}_available")() for name in ("gloo", "nccl", "mpi", "ucc")}
    yield "collectives", ", ".join(name for name, there in backends.items() if there) or "none"


def _native() -> Iterator[tuple[str, str]]:
    for module in status():
        yield (
            module.name,
            f"{module.purpose.split(';')[0]}: {'built' if module.available else 'missing'}",
        )
        yield "", module.detail
        if module.fix:
            yield "  what to do", module.fix
