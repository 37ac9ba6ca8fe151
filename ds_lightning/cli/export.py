"""ds-lightning export CKPT OUT: a checkpoint of any kind as one Lightning file, or its weights alone."""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

import lightning
import torch
from tqdm import tqdm

from ds_lightning.checkpoint.deepspeed.universal import write_universal
from ds_lightning.checkpoint.destination import Destination
from ds_lightning.checkpoint.export import Exported, Progress, export
from ds_lightning.checkpoint.lightning_io import ZeroCheckpointIO, is_remote
from ds_lightning.checkpoint.loading import load, resolved
from ds_lightning.checkpoint.weights import STATE_DICT, Choice
from ds_lightning.errors import CheckpointError, ConfigError

UNIVERSAL = "universal"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

_EPILOG = """\
What OUT is to be is told by its suffix:
  NAME.ckpt               everything, as one file that plain Lightning goes on from
  NAME.pt, .pth, .bin     weights: a plain state_dict for torch.load
  NAME.safetensors        weights
  NAME                    weights: a folder in Hugging Face's layout, in files of at most --max-shard-size
  NAME --format universal weights and optimizer states: a folder in DeepSpeed's universal layout

Tensors are read and written piece by piece: memory does not grow with the checkpoint. Nothing is at OUT before all of
it is there. A tensor with several names is stored once.

examples:
  ds-lightning export checkpoints/last.ckpt last-whole.ckpt
  ds-lightning export checkpoints/last.ckpt gpt --dtype bf16 --strip-prefix model.
"""


def run(arguments: Sequence[str]) -> int:
    """Export and say what was written."""
    options = _parser().parse_args(list(arguments))
    for path in (options.CKPT, options.OUT):
        if is_remote(path):
            raise ConfigError(f"export works on local files, not on {path}. Copy it here first.")
    if options.format == UNIVERSAL:
        return _universal(options)
    destination = Destination.of(Path(options.OUT), options.format, options.max_shard_size, options.overwrite)
    source = resolved(Path(options.CKPT), _tell)
    destination.check_apart(source)
    io = ZeroCheckpointIO()
    read = partial(io.load_checkpoint, weights_only=False) if options.trust else io.load_lazily
    checkpoint = {"pytorch-lightning_version": lightning.__version__, **load(source, read, _tell)}
    choice = Choice(
        dtype=DTYPES.get(options.dtype),
        key=options.key,
        exclude_frozen=options.exclude_frozen,
        strip_prefix=options.strip_prefix,
    )
    with _progress(destination.path.name) as begin:
        exported = export(checkpoint, destination, choice, begin)
    print("\n".join(_lines(exported)))
    return 0


def _universal(options: argparse.Namespace) -> int:
    """Weights and optimizer states for DeepSpeed."""
    only_for_weights = ("dtype", "max_shard_size", "exclude_frozen", "strip_prefix", "overwrite")
    given = [f"--{name.replace('_', '-')}" for name in only_for_weights if getattr(options, name)]
    if given or options.key != STATE_DICT:
        raise ConfigError(
            f"--format {UNIVERSAL} is the whole checkpoint for DeepSpeed. Leave out {', '.join(given) or '--key'}."
        )
    target = Path(options.OUT)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists already. Choose another name.")
    source = resolved(Path(options.CKPT), _tell)
    read = partial(ZeroCheckpointIO().load_checkpoint, weights_only=False if options.trust else None)
    write_universal(load(source, read, _tell), target)
    print(
        f"{target}: a universal checkpoint. In DeepSpeed: checkpoint.load_universal: true, and "
        f"engine.load_checkpoint({str(target.parent)!r}, tag={target.name!r})"
    )
    return 0


class _Parser(argparse.ArgumentParser):
    """A wrong command line is a mistake like any other."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of leaving."""
        raise ConfigError(f"export: {message}\n{self.format_usage().strip()}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ds-lightning export",
        description="Make a checkpoint into one Lightning file, or into weights for others.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("CKPT", help="a file, a sharded folder, a folder with `latest`, or a folder of DeepSpeed or Lightning's FSDP")
    add("OUT", help="what to write, see below")
    add("--dtype", choices=[*DTYPES], help="of every floating entry of the weights; as stored when left out")
    add("--format", choices=["torch", "safetensors", UNIVERSAL], help="of a folder (safetensors when left out)")
    add("--max-shard-size", type=_size, metavar="SIZE", help="most bytes in a file of a folder: 5GB, 500MB, 2GiB (5GB)")
    add("--key", default=STATE_DICT, help="where in the checkpoint the weights are, e.g. an average (%(default)s)")
    add("--strip-prefix", default="", metavar="PREFIX", help="take PREFIX off the names: 'model.' for self.model")
    add("--exclude-frozen", action="store_true", help="leave out parameters that were frozen")
    add("--overwrite", action="store_true", help="replace what is at OUT; other files of a folder are kept")
    add("--trust", action="store_true", help="unpickle objects in CKPT, which can run any code; maps the whole file")
    return parser


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMG]?i?B)?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS.get((match[2] or "").upper().removeprefix("B"), 0)) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no size; write 5GB, 500MB, 2GiB or a number of bytes")
    return size


@contextmanager
def _progress(name: str) -> Iterator[Callable[[int], Progress]]:
    """A bar on stderr, where that is a terminal."""
    with tqdm(desc=name, unit="B", unit_scale=True, file=sys.stderr, disable=None, leave=False) as bar:

        def begin(nbytes: int) -> Progress:
            bar.reset(nbytes)

            def progress(written: int) -> None:
                bar.update(written)

            return progress

        yield begin


def _lines(exported: Exported) -> Iterator[str]:
    files = f" in {exported.files} files" if exported.files > 1 else ""
    tensors = f"{exported.names} tensor{'s' * (exported.names != 1)}"
    yield f"{exported.path}: {tensors}, {_bytes(exported.nbytes)}{files}"
    yield from (f"  {note}" for note in exported.notes)


def _bytes(count: int) -> str:
    value, unit = float(count), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}" if unit != "bytes" else f"{count} bytes"


def _tell(message: str) -> None:
    print(f"ds-lightning: {message}", file=sys.stderr)
