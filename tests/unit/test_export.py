"""Exports of checkpoints that need no run: layouts, names, dtypes, ties, refusals, memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

from ds_lightning.checkpoint.file_tensors import FileSource
from ds_lightning.checkpoint.lightning_io import ZeroCheckpointIO
from ds_lightning.cli import main
from ds_lightning.zero.logical import LogicalTensor
from tests.lightning.runs import same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
PLACES_KNOWN = pytest.mark.skipif(torch.__version__ < (2, 7), reason="torch 2.6 does not tell where values lie")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def awkward() -> dict:
    """Everything that a state_dict can hold."""
    generator = torch.Generator().manual_seed(3)
    shared = torch.randn(6, 5, generator=generator)
    return {
        "net.embed.weight": shared,
        "net._orig_mod.up.weight": torch.randn(7, 6, generator=generator).bfloat16(),
        "net.up.bias": torch.randn(7, generator=generator).half(),
        "net.scale": torch.tensor(1.25),
        "net.empty": torch.empty(0, 4),
        "net.steps": torch.tensor(3),
        "net.mask": torch.tensor([True, False, True]),
        "net.ids": torch.arange(5, dtype=torch.uint8),
        "net.double": torch.randn(3, dtype=torch.float64, generator=generator),
        "net.turned": torch.randn(4, 3, generator=generator).t(),
        "net.part": torch.randn(10, generator=generator)[2:7],
        "net._extra_state": {"kind": "odd"},
        "head.weight": shared,
    }


def tensors_of(state: dict) -> dict:
    named = {name.replace("_orig_mod.", ""): value for name, value in state.items()}
    return {name: value for name, value in named.items() if torch.is_tensor(value)}


@pytest.fixture
def ckpt(tmp_path):
    path = tmp_path / "a.ckpt"
    content = {"state_dict": awkward(), "epoch": 2, "optimizer_states": [{"state": {0: {"step": torch.tensor(4.0)}}}]}
    torch.save({**content, "averages": {"deep": {"w": torch.ones(2)}}}, path)
    return path


def export(*words) -> int:
    return main(["export", *map(str, words)])


def plain(values: dict) -> dict:
    return {name: value.clone() for name, value in values.items()}


@pytest.mark.parametrize("dtype", [None, *DTYPES])
@pytest.mark.parametrize("name", ["w.pt", "w.bin", "w.safetensors"])
def test_weights_are_what_was_stored_bit_for_bit_or_in_the_dtype(tmp_path, ckpt, capsys, name, dtype):
    out = tmp_path / "new" / name
    assert export(ckpt, out, *(["--dtype", dtype] if dtype else [])) == 0
    expected = {
        name: value.to(DTYPES[dtype]) if dtype and value.is_floating_point() else value
        for name, value in tensors_of(awkward()).items()
    }
    told = capsys.readouterr().out
    assert "left out: net._extra_state" in told
    if out.suffix == ".safetensors":
        assert "head.weight (as net.embed.weight)" in told
        found = load_file(out)
        with safe_open(out, "pt") as file:
            assert file.metadata() == {"format": "pt", "head.weight": "net.embed.weight"}
        expected.pop("head.weight")
    else:
        found = torch.load(out, weights_only=True)
        assert list(found) == list(expected)
        assert found["head.weight"].data_ptr() == found["net.embed.weight"].data_ptr()
    assert same(found, plain(expected)) == []


def test_every_tensor_begins_at_a_multiple_of_its_element_size(tmp_path, ckpt):
    assert export(ckpt, tmp_path / "w.safetensors") == 0
    data = (tmp_path / "w.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert size % 8 == 0
    for name, value in tensors_of(awkward()).items():
        if name != "head.weight":
            assert (8 + size + header[name]["data_offsets"][0]) % value.dtype.itemsize == 0


@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_a_folder_has_an_index_and_no_file_that_is_too_large(tmp_path, ckpt, form):
    out = tmp_path / "folder"
    assert export(ckpt, out, "--format", form, "--max-shard-size", "150", "--strip-prefix", "net.") == 0
    stem, suffix = {"torch": ("pytorch_model", ".bin"), "safetensors": ("model", ".safetensors")}[form]
    index = json.loads((out / f"{stem}{suffix}.index.json").read_text())
    read = load_file if form == "safetensors" else (lambda path: torch.load(path, weights_only=True))
    found = {}
    files = sorted(path.name for path in out.iterdir() if path.suffix == suffix)
    assert len(files) > 2
    assert files == [f"{stem}-{i + 1:05d}-of-{len(files):05d}{suffix}" for i in range(len(files))]
    for file in files:
        values = read(out / file)
        assert {index["weight_map"][name] for name in values} == {file}
        assert len(values) == 1 or sum(v.nbytes for n, v in values.items() if n != "head.weight") <= 150
        found.update(values)
    assert index["weight_map"].keys() == found.keys()
    expected = {name.removeprefix("net."): value for name, value in tensors_of(awkward()).items()}
    assert index["metadata"]["total_size"] == sum(v.nbytes for n, v in expected.items() if n != "head.weight")
    if form == "safetensors":
        expected.pop("head.weight")
    assert same(found, plain(expected)) == []


def test_a_folder_that_needs_one_file_has_no_index(tmp_path, ckpt):
    assert export(ckpt, tmp_path / "folder") == 0
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["model.safetensors"]


def test_one_lightning_file_holds_all_of_it(tmp_path, ckpt):
    assert export(ckpt, tmp_path / "b.ckpt") == 0
    one, two = torch.load(ckpt, weights_only=True), torch.load(tmp_path / "b.ckpt", weights_only=True)
    assert two.pop("pytorch-lightning_version")
    assert list(one["state_dict"]) == list(two["state_dict"])
    assert same(one, two) == []
    state = two["state_dict"]
    assert state["head.weight"].data_ptr() == state["net.embed.weight"].data_ptr()


def test_another_key_is_exported_where_it_is_found(tmp_path, ckpt, capsys):
    assert export(ckpt, tmp_path / "w.pt", "--key", "averages.deep") == 0
    assert torch.equal(torch.load(tmp_path / "w.pt")["w"], torch.ones(2))
    assert export(ckpt, tmp_path / "b.ckpt", "--key", "averages.deep") == 0
    assert list(torch.load(tmp_path / "b.ckpt")["state_dict"]) == ["w"]
    assert export(ckpt, tmp_path / "c.pt", "--key", "averages.dep") == 2
    assert "did you mean 'averages.deep'?" in capsys.readouterr().err


def test_values_too_large_for_fp16_are_told(tmp_path, capsys):
    torch.save({"state_dict": {"a": torch.tensor([1e6, 1.0, float("inf")])}}, tmp_path / "a.ckpt")
    assert export(tmp_path / "a.ckpt", tmp_path / "a.pt", "--dtype", "fp16") == 0
    assert "1 values are too large for float16 and became infinite, in a" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.ckpt", "w.pt"], "does not exist"),
        (["a.ckpt", "w.h5"], "suffix of w.h5 does not tell"),
        (["a.ckpt", "w.pt", "--format", "safetensors"], "w.pt is the name of a torch file"),
        (["a.ckpt", "w.pt", "--max-shard-size", "1GB"], "--max-shard-size is for several files"),
        (["a.ckpt", "w", "--max-shard-size", "1XB"], "'1XB' is no size"),
        (["a.ckpt", "w.pt", "--dtype", "fp8"], "invalid choice: 'fp8'"),
        (["a.ckpt"], "arguments are required: OUT"),
        (["a.ckpt", "there.pt"], "there.pt exists already"),
        (["a.ckpt", "there"], "there exists already"),
        (["a.ckpt", "there.pt/w.pt", "--overwrite"], "could not be written"),
        (["a.ckpt", "a.ckpt", "--overwrite"], "overlap"),
        (["a.ckpt", "there", "--format", "torch", "--overwrite", "--strip-prefix", "x."], "no name begins with it"),
        (["a.ckpt", "b.ckpt", "--strip-prefix", "net."], "--strip-prefix is for weights alone"),
        (["a.ckpt", "w.pt", "--exclude-frozen"], "does not tell which parameters were frozen"),
        (["a.ckpt", "w.pt", "--key", "epoch"], "no named tensors there. Weights are under: averages.deep, state_dict"),
        (["complex.ckpt", "w.safetensors"], "safetensors cannot hold torch.complex128 (a)"),
        (["broken.ckpt", "w.pt"], "not a complete checkpoint"),
        (["objects.ckpt", "w.pt"], "not plain data"),
        (["s3://bucket/a.ckpt", "w.pt"], "works on local files"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_end_in_words_before_anything_is_written(tmp_path, ckpt, capsys, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    Path("there.pt").write_text("mine")
    Path("there").mkdir()
    Path("there/config.json").write_text("{}")
    Path("broken.ckpt").write_bytes(ckpt.read_bytes()[:3000])
    torch.save({"state_dict": {"a": torch.ones(2, dtype=torch.complex128)}}, "complex.ckpt")
    torch.save({"state_dict": {"a": torch.ones(2)}, "hyper_parameters": print}, "objects.ckpt")
    before = sorted((str(path), path.stat().st_mtime_ns) for path in Path().rglob("*"))
    assert export(*words) == 2
    assert message in capsys.readouterr().err
    assert sorted((str(path), path.stat().st_mtime_ns) for path in Path().rglob("*")) == before


def test_trusted_files_may_hold_objects(tmp_path):
    torch.save({"state_dict": {"a": torch.ones(2)}, "hyper_parameters": print}, tmp_path / "a.ckpt")
    assert export(tmp_path / "a.ckpt", tmp_path / "b.ckpt", "--trust") == 0
    found = torch.load(tmp_path / "b.ckpt", weights_only=False)
    assert found["hyper_parameters"] is print
    assert torch.equal(found["state_dict"]["a"], torch.ones(2))


def test_overwriting_keeps_what_else_is_in_a_folder(tmp_path, ckpt):
    out = tmp_path / "gpt"
    assert export(ckpt, out, "--max-shard-size", "150") == 0
    (out / "config.json").write_text("{}")
    (out / "sub").mkdir()
    (out / "sub" / "tokenizer.json").write_text("{}")
    assert export(ckpt, out, "--overwrite", "--dtype", "bf16") == 0
    names = sorted(str(path.relative_to(out)) for path in out.rglob("*"))
    assert names == ["config.json", "model.safetensors", "sub", "sub/tokenizer.json"]
    assert load_file(out / "model.safetensors")["net.embed.weight"].dtype == torch.bfloat16
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".partial")]


def test_a_failed_write_leaves_what_was_there(tmp_path, ckpt, monkeypatch):
    out = tmp_path / "w.pt"
    out.write_text("mine")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert export(ckpt, out, "--overwrite") == 2
    assert out.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ckpt", "w.pt"]


def test_bare_weights_and_folders_of_others_are_read(tmp_path, ckpt, capsys):
    weights = {"a.weight": torch.randn(300, 700), "b": torch.arange(3)}
    torch.save(weights, tmp_path / "bare.pt")
    dcp.save({"model": weights}, checkpoint_id=str(tmp_path / "dcp"))
    for name in ("bare.pt", "dcp"):
        assert export(tmp_path / name, tmp_path / f"{name}.safetensors") == 0
        assert same(load_file(tmp_path / f"{name}.safetensors"), weights) == []


# How they are read --------------------------------------------------------------------------------------------------


@PLACES_KNOWN
def test_files_are_read_without_a_map_and_ties_stay_one_tensor(ckpt):
    content = ZeroCheckpointIO().load_lazily(ckpt)
    state = content["state_dict"]
    assert isinstance(state["net.embed.weight"], LogicalTensor)
    assert state["head.weight"] is state["net.embed.weight"]
    for name, value in awkward().items():
        if torch.is_tensor(value):
            flat = value.reshape(-1)
            middle = flat.numel() // 2
            if isinstance(state[name], LogicalTensor):
                assert torch.equal(state[name].flat(middle, flat.numel()), flat[middle:])
            assert same(state[name].clone(), value.clone(), name) == []


def test_a_part_of_a_tensor_in_a_file_is_that_part(tmp_path):
    values = torch.arange(4 * 5 * 6, dtype=torch.int32).view(4, 5, 6)
    (tmp_path / "f").write_bytes(b"12345678" + values.numpy().tobytes())
    source = FileSource(tmp_path / "f", 8, values.shape, values.stride(), values.dtype)
    assert torch.equal(source.part((1, 2, 3), (2, 3, 2)), values[1:3, 2:5, 3:5])
    assert torch.equal(source.flat(7, 50), values.reshape(-1)[7:50])


@PLACES_KNOWN
@pytest.mark.parametrize("dim", [0, 1])
def test_large_chunks_of_a_folder_are_read_in_parts(tmp_path, dim, monkeypatch):
    from ds_lightning.checkpoint import loading, stored

    values = torch.randn(1200, 600)
    dcp.save({"model": {"w": values}}, checkpoint_id=str(tmp_path / "dcp"))
    monkeypatch.setattr(stored.StoredFolder, "_bytes", None)  # reads a whole chunk
    found = loading.load(tmp_path / "dcp", ZeroCheckpointIO().load_lazily, print)["state_dict"]["w"]
    assert torch.equal(found.flat(1000, 2500), values.reshape(-1)[1000:2500])
    assert torch.equal(found.clone(), values)


MEMORY = """
import resource, sys
from ds_lightning.cli import main
import ds_lightning.cli.export, ds_lightning.checkpoint.stored
import torch
small, large = sys.argv[1:3]
for name in sys.argv[3:]:
    assert main(["export", small, small + name, "--dtype", "bf16"]) == 0
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name in sys.argv[3:]:
    assert main(["export", large, large + name, "--dtype", "bf16"]) == 0
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_memory_does_not_grow_with_the_checkpoint(tmp_path, kind):
    """240 MB in two tensors; a piece has 4 MB, and beside it are its converted copy and what is on its way to disk."""
    for name, size in (("small", 1000), ("large", 30_000_000)):
        state = {"a": torch.zeros(size // 1000, 1000), "b": torch.zeros(size)}
        if kind == "file":
            torch.save(
                {"state_dict": state, "optimizer_states": [{"state": {0: {"exp_avg": state["b"]}}}]}, tmp_path / name
            )
        else:
            dcp.save({"model": state}, checkpoint_id=str(tmp_path / name))
    words = [str(tmp_path / "small"), str(tmp_path / "large"), ".safetensors", ".ckpt"]
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", MEMORY, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 60
