"""Checkpoints that DeepSpeed wrote (tests/data/deepspeed/make.py) are read without it, bit for bit."""

import io
import os
import pickle
import shutil
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path

import pytest
import torch

from ds_lightning.checkpoint.deepspeed import pickles
from ds_lightning.checkpoint.deepspeed.convert import DeepSpeedCheckpoint, is_deepspeed_checkpoint, to_lightning, whole
from ds_lightning.checkpoint.deepspeed.files import find_files
from ds_lightning.checkpoint.deepspeed.universal import write_universal
from ds_lightning.errors import CheckpointError

DATA = Path(__file__).parents[1] / "data" / "deepspeed"
ALL = sorted(folder.name for folder in DATA.iterdir() if (folder / "reference.pt").is_file())
NATIVE = [name for name in ALL if name.startswith("stage")]
UNIVERSAL = [name for name in ALL if name.startswith("universal")]
LIGHTNING = [name for name in ALL if name.startswith("lightning")]


def reference_of(name):
    return torch.load(DATA / name / "reference.pt", weights_only=True)


def assert_same(found, expected, what):
    assert found.dtype == expected.dtype, what
    assert found.shape == expected.shape, what
    assert torch.equal(found, expected), what


def copy_of(name, tmp_path):
    return Path(shutil.copytree(DATA / name, tmp_path / name))


def test_there_is_a_fixture_of_every_kind():
    assert {f"stage{s}_{p}" for s in range(4) for p in ("fp32", "bf16", "fp16")} <= set(NATIVE)
    assert len(UNIVERSAL) == len(LIGHTNING) == 2


@pytest.mark.parametrize("name", ALL)
def test_every_weight_is_the_live_engines(name):
    checkpoint, reference = DeepSpeedCheckpoint(DATA / name), reference_of(name)
    expected = dict(reference["weights"])
    if name.endswith("exclude_frozen"):
        for frozen in ("frozen.weight", "frozen.bias"):
            del expected[frozen]
            assert frozen not in checkpoint.names()
    for key, values in expected.items():
        assert_same(checkpoint.parameter(key), values, key)
    for key, values in reference.get("buffers", {}).items():
        assert_same(checkpoint.parameter(key), values, key)
        assert key in checkpoint.buffers
    if name not in LIGHTNING:
        assert set(checkpoint.names()) == {*expected, *reference["buffers"]}
        assert checkpoint.shapes() == {key: checkpoint.parameter(key).shape for key in checkpoint.names()}


@pytest.mark.parametrize("name", [name for name in ALL if name != "stage0_fp32"])
def test_every_moment_is_the_live_engines(name):
    checkpoint, reference = DeepSpeedCheckpoint(DATA / name), reference_of(name)
    steps = reference.get("global_steps", reference.get("global_step")) - reference.get("skipped_steps", 0)
    if checkpoint.stage == 0:
        steps += 1  # DeepSpeed makes the states of its 16-bit wrappers by a first step
    for key, moments in reference["moments"].items():
        state = checkpoint.state(key)
        assert set(state) == ({*moments, "step"} if moments else set())
        for kind, values in moments.items():
            assert_same(state[kind], values, (key, kind))
        if moments:
            assert float(state["step"]) == steps
            assert state["step"].ndim == 0


def test_stage0_in_fp32_has_states_by_number():
    checkpoint, reference = DeepSpeedCheckpoint(DATA / "stage0_fp32"), reference_of("stage0_fp32")
    order = [name for group in reference["groups"] for name in group]
    found = dict(checkpoint.numbered_states())
    for number, name in enumerate(order):
        for kind, values in reference["moments"].get(name, {}).items():
            assert_same(whole(found[number][kind]), values, name)
    assert checkpoint.group_sizes() == [len(group) for group in reference["groups"]]
    with pytest.raises(CheckpointError, match="by number only"):
        checkpoint.state("body.weight")


@pytest.mark.parametrize("name", NATIVE + UNIVERSAL)
def test_what_is_known_of_the_run(name):
    checkpoint, reference = DeepSpeedCheckpoint(DATA / name), reference_of(name)
    assert checkpoint.stage == reference["stage"]
    assert checkpoint.world_size == reference["world_size"]
    assert checkpoint.precision == {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[reference["precision"]]
    assert checkpoint.global_steps == reference["global_steps"]
    assert checkpoint.skipped_steps == reference["skipped_steps"]
    assert checkpoint.client_state == {"epoch_of_mine": 4, "note": ["some", {"state": 1}]}
    assert [group["lr"] for group in checkpoint.param_groups] == reference["lr"]
    assert [group["weight_decay"] for group in checkpoint.param_groups] == [0.1, 0.0]
    assert checkpoint.lr_scheduler is not None
    assert checkpoint.tied == {"head.weight": "embed.weight"}
    if reference["precision"] == "fp16":
        assert checkpoint.loss_scale["scale"] == reference["loss_scale"]
        assert checkpoint.loss_scale["dynamic"] is True
    else:
        assert checkpoint.loss_scale is None
    if checkpoint.stage:
        trained = [{name for name in group if name in reference["moments"]} for group in reference["groups"]]
        assert [set(names) for names in checkpoint.group_names] == trained
        frozen = [] if name.endswith("exclude_frozen") else reference["frozen"]
        assert set(checkpoint.frozen) == {*frozen, "unused.empty"}


def test_steps_that_overflowed_are_counted():
    checkpoint = DeepSpeedCheckpoint(DATA / "stage2_fp16")
    assert 0 < checkpoint.skipped_steps < checkpoint.global_steps
    state = to_lightning(checkpoint)["ZeroPrecision"]
    assert state["skipped"] == checkpoint.skipped_steps
    assert state["iteration"] == checkpoint.global_steps


@pytest.mark.parametrize("name", ALL)
def test_any_range_can_be_read_alone(name):
    checkpoint = DeepSpeedCheckpoint(DATA / name)
    for key in checkpoint.names():
        stored, values = checkpoint.stored(key), checkpoint.parameter(key).reshape(-1)
        for start in range(0, values.numel() + 1, 3):
            for stop in range(start, values.numel() + 1, 4):
                assert_same(stored.flat(start, stop), values[start:stop], (key, start, stop))


def test_opening_maps_files_and_copies_no_values(tmp_path):
    torch.save({"values": torch.arange(6.0)}, tmp_path / "file.pt")
    values = pickles.read(tmp_path / "file.pt")["values"]
    with zipfile.ZipFile(tmp_path / "file.pt") as archive, (tmp_path / "file.pt").open("r+b") as file:
        entry = next(entry for entry in archive.infolist() if entry.filename.endswith("data/0"))
        data = (tmp_path / "file.pt").read_bytes()
        file.seek(data.index(torch.arange(6.0).numpy().tobytes(), entry.header_offset))
        file.write(torch.full((6,), 5.0).numpy().tobytes())
    assert torch.equal(values, torch.full((6,), 5.0))
    values.zero_()  # in private memory
    assert torch.equal(pickles.read(tmp_path / "file.pt")["values"], torch.full((6,), 5.0))


# In the form of Lightning's files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NATIVE + UNIVERSAL)
def test_lightning_form_has_torchs_optimizer_format(name):
    checkpoint, reference = DeepSpeedCheckpoint(DATA / name), reference_of(name)
    found = to_lightning(checkpoint)
    assert set(found["state_dict"]) == set(checkpoint.names())
    assert found["state_dict"]["head.weight"] is found["state_dict"]["embed.weight"]
    assert found["global_step"] == reference["global_steps"]
    (optimizer,) = found["optimizer_states"]
    numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
    assert numbers == list(range(len(numbers)))
    (names,) = found["ds_lightning"]["optimizer_parameter_names"] or [
        [name for group in reference["groups"] for name in group]
    ]
    assert len(names) == len(numbers)
    for number, state in optimizer["state"].items():
        for kind, values in reference["moments"].get(names[number], {}).items():
            assert_same(state[kind], values, (names[number], kind))
    assert {names[number] for number in optimizer["state"]} == {
        key for key, moments in reference["moments"].items() if moments
    }


@pytest.mark.parametrize("name", LIGHTNING)
def test_what_lightning_saved_is_passed_on(name):
    reference = reference_of(name)
    found = to_lightning(DeepSpeedCheckpoint(DATA / name))
    assert found["global_step"] == reference["global_step"] == 6
    assert found["epoch"] == reference["epoch"] == 2
    assert found["hyper_parameters"] == {"width": 5}
    assert found["loops"]["fit_loop"]["epoch_progress"]["current"]["completed"] == 2
    assert found["lr_schedulers"][0]["last_epoch"] == 6
    assert all(key.startswith("net.") for key in found["state_dict"])


def test_tensors_can_stay_in_the_files():
    checkpoint = DeepSpeedCheckpoint(DATA / "stage3_bf16")
    found = to_lightning(checkpoint, tensor=lambda stored: stored)
    stored = found["state_dict"]["body.weight"]
    assert (stored.shape, stored.dtype) == (torch.Size([5, 5]), torch.float32)
    assert torch.equal(stored.flat(3, 20), checkpoint.parameter("body.weight").reshape(-1)[3:20])
    assert found["optimizer_states"][0]["state"][0]["exp_avg"].shape == torch.Size([7, 5])


@pytest.mark.parametrize("name", ["stage3_fp32", "lightning_stage2"])
def test_lightning_goes_on_at_the_global_step(name, tmp_path):
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)
            self.seen = []

        def training_step(self, batch, index):
            self.seen.append(self.global_step)
            return self.layer(batch).sum()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.ones(6, 2), batch_size=2)

    module = Module()
    found = to_lightning(DeepSpeedCheckpoint(DATA / name))
    found["state_dict"] = module.state_dict()
    found["optimizer_states"] = [module.configure_optimizers().state_dict()]
    found["lr_schedulers"] = []
    torch.save(found, tmp_path / "file.ckpt")
    trainer = pl.Trainer(
        max_steps=found["global_step"] + 2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, ckpt_path=tmp_path / "file.ckpt")
    assert module.seen == [found["global_step"], found["global_step"] + 1]


# Written for DeepSpeed (that it goes on from it: tests/data/deepspeed/prove_universal.py) ----------------------------


@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize("name", ["stage2_fp32", "stage1_bf16", "stage3_bf16_world3_subgroups", "universal_stage3"])
def test_a_universal_checkpoint_that_is_written_reads_back(name, lazily, tmp_path):
    source, reference = DeepSpeedCheckpoint(DATA / name), reference_of(name)
    write_universal(to_lightning(source, *([lambda stored: stored] if lazily else [])), tmp_path / "universal")
    assert (tmp_path / "latest_universal").read_text() == "universal"
    found = DeepSpeedCheckpoint(tmp_path)
    assert found.universal
    for key, values in reference["weights"].items():
        assert_same(found.parameter(key), values, key)
    for key, moments in reference["moments"].items():
        assert_same(found.state(key)["step"], torch.tensor(3.0), key)
        for kind, values in moments.items():
            assert_same(found.state(key)[kind], values, (key, kind))
    assert found.group_names == source.group_names
    assert [group["weight_decay"] for group in found.param_groups] == [0.1, 0.0]
    assert found.global_steps == source.global_steps
    for file in tmp_path.rglob("*.pt"):
        torch.load(file, weights_only=True)


def test_a_plain_checkpoint_of_lightning_is_written_with_zeros_for_what_never_had_a_gradient(tmp_path):
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 3), "unused": torch.nn.Linear(2, 2)})
    optimizer = torch.optim.Adam(model.parameters())
    model["used"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "global_step": 1}
    with pytest.raises(CheckpointError, match="4 parameters, and 0 names"):
        write_universal(saved, tmp_path / "universal")
    names = [name for name, _ in model.named_parameters()]
    write_universal(saved, tmp_path / "universal", names)
    found = DeepSpeedCheckpoint(tmp_path)
    assert_same(found.state("used.bias")["exp_avg"], optimizer.state[model["used"].bias]["exp_avg"], "used")
    assert_same(found.state("unused.weight")["exp_avg_sq"], torch.zeros(2, 2), "unused")
    with pytest.raises(CheckpointError, match="is not empty"):
        write_universal(saved, tmp_path / "universal", names)
    with pytest.raises(CheckpointError, match="states of 2 optimizers"):
        write_universal({**saved, "optimizer_states": saved["optimizer_states"] * 2}, tmp_path / "other", names)
    with pytest.raises(CheckpointError, match="that 'state_dict' has not: nobody"):
        write_universal(saved, tmp_path / "other", [*names[:3], "nobody"])
    assert not (tmp_path / "other").exists()


# Names --------------------------------------------------------------------------------------------------------------


def renamed(folder, prefix, client):
    """A checkpoint of stage 2 whose names have a prefix, as wrappers of Lightning give them."""
    path = folder / "global_step3" / "mp_rank_00_model_states.pt"
    model = pickles.read(path)

    def prefixed(value):
        if isinstance(value, dict):
            return {prefix + key: item for key, item in value.items()}
        return value

    model["module"] = {prefix + key: value.clone() for key, value in model["module"].items()}
    model["param_shapes"] = [prefixed(group) for group in model["param_shapes"]]
    model["frozen_param_shapes"] = prefixed(model["frozen_param_shapes"])
    model["frozen_param_fragments"] = {prefix + k: v.clone() for k, v in model["frozen_param_fragments"].items()}
    model["shared_params"] = {prefix + key: prefix + value for key, value in model["shared_params"].items()}
    model["buffer_names"] = [prefix + name for name in model["buffer_names"]]
    path.unlink()
    torch.save({**model, **client}, path)


@pytest.mark.parametrize(
    ("prefix", "version", "stripped"),
    [
        ("_forward_module.", "2.0.9", True),
        ("_forward_module.", "1.9.5", True),
        ("module.", "1.6.5", True),
        ("module.", "2.6.6", False),  # an attribute of the user's
        ("_forward_module.", None, True),
        ("_orig_mod.", None, True),
    ],
)
def test_prefixes_of_wrappers_are_taken_off(prefix, version, stripped, tmp_path):
    folder = copy_of("stage2_fp32", tmp_path)
    renamed(folder, prefix, {} if version is None else {"pytorch-lightning_version": version})
    checkpoint, reference = DeepSpeedCheckpoint(folder), reference_of("stage2_fp32")
    before = "" if stripped else prefix
    for key, values in reference["weights"].items():
        assert_same(checkpoint.parameter(before + key), values, key)
    assert_same(checkpoint.state(before + "gain")["exp_avg"], reference["moments"]["gain"]["exp_avg"], "gain")
    assert checkpoint.tied == {before + "head.weight": before + "embed.weight"}
    assert DeepSpeedCheckpoint(folder, strip_prefix=prefix).parameter("gain").shape == (1,)


@pytest.mark.parametrize("drop", ["shared_params", "frozen_param_shapes"])
def test_tied_and_frozen_ones_are_found_where_the_lists_are_missing(drop, tmp_path):
    folder = copy_of("stage2_bf16", tmp_path)
    path = folder / "global_step3" / "mp_rank_00_model_states.pt"
    model = {**pickles.read(path), drop: None}
    path.unlink()
    torch.save(model, path)
    for key, values in reference_of("stage2_bf16")["weights"].items():
        assert_same(DeepSpeedCheckpoint(folder).parameter(key), values, key)


# Where a checkpoint is ----------------------------------------------------------------------------------------------


def test_top_folder_tag_folder_and_tag_are_the_same_checkpoint():
    top = DATA / "stage1_fp32"
    tag = top / "global_step3"
    assert find_files(top) == find_files(tag) == find_files(top, "global_step3")
    assert find_files(DATA / "universal_stage1") == find_files(DATA / "universal_stage1" / "universal")
    assert is_deepspeed_checkpoint(top)
    assert is_deepspeed_checkpoint(tag)
    assert is_deepspeed_checkpoint(DATA / "universal_stage1")
    assert not is_deepspeed_checkpoint(DATA)
    assert not is_deepspeed_checkpoint(top / "latest")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda top: (top / "latest").unlink(), "latest is missing.*global_step3"),
        (lambda top: (top / "latest").write_text("global_step9"), "names 'global_step9'.*no such folder.*global_step3"),
        (lambda top: (top / "latest").write_text(""), "no such folder"),
        (lambda top: shutil.rmtree(top / "global_step3"), "no such folder.*no other checkpoint"),
        (lambda top: shutil.rmtree(top), "does not exist"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_an_error(change, message, tmp_path):
    top = copy_of("stage2_fp32", tmp_path)
    change(top)
    with pytest.raises(CheckpointError, match=message):
        DeepSpeedCheckpoint(top)


def test_a_file_or_another_tag_is_an_error():
    with pytest.raises(CheckpointError, match="Give the folder"):
        DeepSpeedCheckpoint(DATA / "stage2_fp32" / "latest")
    with pytest.raises(CheckpointError, match=r"global_step9 is not there.*global_step3"):
        DeepSpeedCheckpoint(DATA / "stage2_fp32", tag="global_step9")


OPTIMIZER = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL = "zero_pp_rank_{}_mp_rank_00_model_states.pt"


@pytest.mark.parametrize(
    ("name", "file", "message"),
    [
        ("stage2_fp32", OPTIMIZER.format(0), "optim_states.pt is missing"),
        ("stage2_fp32", OPTIMIZER.format(1), "written by 2 ranks.*of 1"),
        ("stage2_fp32_world3", OPTIMIZER.format(1), "rank_1_.*is missing.*rank_2"),
        ("stage2_fp32", "mp_rank_00_model_states.pt", "has no mp_rank_00_model_states.pt"),
        ("stage3_fp32", OPTIMIZER.format(1), "written by 2 ranks.*of 1"),
        ("stage3_fp32", MODEL.format(1), "optimizer files of 2 ranks and model files of 1"),
        ("stage3_fp32", MODEL.format(0), "rank_0_.*is missing"),
        ("universal_stage1", "zero/gain/fp32.pt", "gain/fp32.pt is missing"),
        ("universal_stage3", "zero/gain/exp_avg_sq.pt", "gain/exp_avg_sq.pt is missing"),
        ("universal_stage1", "zero/optimizer_state.pt", "optimizer_state.pt is missing"),
    ],
)
def test_a_missing_file_is_an_error_that_names_it(name, file, message, tmp_path):
    folder = find_files(copy_of(name, tmp_path)).folder
    (folder / file).unlink()
    with pytest.raises(CheckpointError, match=message):
        DeepSpeedCheckpoint(folder)


def test_all_optimizer_files_missing_is_no_stage_0(tmp_path):
    folder = find_files(copy_of("stage1_bf16", tmp_path)).folder
    for file in folder.glob("*optim_states.pt"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"no zero_pp_rank.*stage 1.*copy all"):
        DeepSpeedCheckpoint(folder)


@pytest.mark.parametrize("name", ["stage0_bf16", "stage1_fp32", "stage3_fp32", "universal_stage3"])
@pytest.mark.parametrize("fraction", [0.0, 0.4, 0.99])
def test_a_truncated_file_is_an_error_that_names_it(name, fraction, tmp_path):
    top = copy_of(name, tmp_path)
    files = [file for file in find_files(top).folder.rglob("*.pt") if file.parent.name not in ("mean", "seen")]
    if name == "universal_stage3":
        files = [file for file in files if "rank_1" not in file.name]  # only frozen fragments of it are needed
    for file in files:
        data = file.read_bytes()
        file.write_bytes(data[: int(len(data) * fraction)])
        with pytest.raises(CheckpointError, match=f"{file.name} .*(truncated|missing)"):
            DeepSpeedCheckpoint(top)
        file.write_bytes(data)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("zero_pp_rank_2_mp_rank_00_optim_states.pt", "written by 2 ranks.*of 3"),
        ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "prefixes"),
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", "different stages"),
        ("mp_rank_01_model_states.pt", "tensor- or pipeline-parallel.*ds_to_universal"),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor- or pipeline-parallel"),
        ("layer_00-model_00-model_states.pt", "pipeline-parallel"),
        ("layer_0_expert_3_mp_rank_00_model_states.pt", "MoE"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "MoE"),
        ("offloaded_tensors/rank00", "NVMe"),
    ],
)
def test_files_of_other_checkpoints_or_other_parallelism_are_refused(extra, message, tmp_path):
    folder = find_files(copy_of("stage2_fp32", tmp_path)).folder
    (folder / extra).parent.mkdir(exist_ok=True)
    shutil.copy(folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt", folder / extra)
    with pytest.raises(CheckpointError, match=message):
        DeepSpeedCheckpoint(folder)


def test_shards_of_another_model_are_refused(tmp_path):
    folder = find_files(copy_of("stage3_fp32", tmp_path)).folder
    other = {"optimizer_state_dict": {**pickles.read(folder / OPTIMIZER.format(1))["optimizer_state_dict"]}}
    other["optimizer_state_dict"]["fp32_flat_groups"] = [torch.zeros(3), torch.zeros(3)]
    other["optimizer_state_dict"] = {
        key: value for key, value in other["optimizer_state_dict"].items() if key not in ("zero_stage", "loss_scaler")
    }
    (folder / OPTIMIZER.format(1)).unlink()
    torch.save(other, folder / OPTIMIZER.format(1))
    with pytest.raises(CheckpointError, match=r"rank_1_.* has 6 elements"):
        DeepSpeedCheckpoint(folder)


def test_empty_stand_ins_are_never_taken_for_weights(tmp_path):
    folder = find_files(copy_of("stage3_fp32", tmp_path)).folder
    for rank in range(2):
        path = folder / MODEL.format(rank)
        model = {**pickles.read(path), "frozen_param_shapes": None, "frozen_param_fragments": None}
        path.unlink()
        torch.save(model, path)
    with pytest.raises(CheckpointError, match=r"only an empty stand-in for frozen.weight"):
        DeepSpeedCheckpoint(folder)


# Reading without running --------------------------------------------------------------------------------------------


def archive(path, data):
    """A file of torch.save's format around a pickle."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", data)
        file.writestr("archive/version", "3")


def calling(function, *args):
    """A pickle that calls something by name: `module name`."""
    body = io.BytesIO()
    body.write(b"\x80\x02c" + function.replace(" ", "\n").encode() + b"\n")
    body.write(pickle.dumps(args, protocol=2)[2:-1] + b"R.")
    return body.getvalue()


HOSTILE = [
    "os system",
    "posix system",
    "builtins eval",
    "__builtin__ exec",
    "subprocess Popen",
    "deepspeed.launcher.runner.os system",
    "deepspeed.launcher.runner subprocess.call",
    "torch.serialization os.system",
    "importlib import_module",
    "runpy run_path",
    "ctypes CDLL",
]


@pytest.mark.parametrize("function", HOSTILE)
@pytest.mark.parametrize("legacy", [False, True])
def test_a_hostile_pickle_is_refused_and_runs_nothing(function, legacy, tmp_path):
    folder = find_files(copy_of("stage2_fp32", tmp_path)).folder
    marker = tmp_path / "ran"
    data = calling(function, f"touch {marker}")
    for file in (folder / "mp_rank_00_model_states.pt", folder / OPTIMIZER.format(1)):
        kept = file.read_bytes()
        file.unlink()
        if legacy:
            header = [pickles._MAGIC, 1001, {}]
            file.write_bytes(b"".join(pickle.dumps(part, protocol=2) for part in header) + data)
        else:
            archive(file, data)
        with pytest.raises(CheckpointError, match=f"{file.name} asks for"):
            DeepSpeedCheckpoint(folder)
        assert not marker.exists()
        file.write_bytes(kept)


def test_a_name_that_looks_like_deepspeeds_is_not_imported(tmp_path, monkeypatch):
    package = tmp_path / "deepspeed"
    package.mkdir()
    (package / "__init__.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\ndef run(*args): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    folder = find_files(copy_of("stage2_fp32", tmp_path)).folder
    file = folder / "mp_rank_00_model_states.pt"
    file.unlink()
    archive(file, calling("deepspeed run", "rm"))
    with pytest.raises(CheckpointError, match=r"no file of DeepSpeed: it holds <record of deepspeed\.run>"):
        DeepSpeedCheckpoint(folder)
    assert not (tmp_path / "ran").exists()


def test_functions_that_a_file_may_call_cannot_be_changed_by_it(tmp_path):
    for name in ("torch._utils _rebuild_tensor_v2", "collections OrderedDict", "deepspeed.a Thing"):
        state = pickle.dumps((None, {"__call__": 1, "_function": 2}), protocol=2)[2:-1]
        archive(tmp_path / "file.pt", b"\x80\x02c" + name.replace(" ", "\n").encode() + b"\n" + state + b"b.")
        with pytest.raises(CheckpointError):
            pickles.read(tmp_path / "file.pt")
    assert "_function" not in OrderedDict.__dict__


def test_a_tensor_cannot_reach_beyond_its_file(tmp_path):
    torch.save(torch.arange(4.0), tmp_path / "file.pt")
    with zipfile.ZipFile(tmp_path / "file.pt") as source:
        entries = {entry: source.read(entry) for entry in source.namelist()}
    for find, put in [(b"K\x04\x85", b"M\x00\x40\x85"), (b"K\x00K\x04", b"M\x00\x40K\x04")]:  # its size, its offset
        with zipfile.ZipFile(tmp_path / "other.pt", "w") as file:
            for entry, data in entries.items():
                assert not entry.endswith("data.pkl") or find in data
                file.writestr(entry, data.replace(find, put) if entry.endswith("data.pkl") else data)
        with pytest.raises(CheckpointError, match=r"other\.pt"):
            pickles.read(tmp_path / "other.pt")


class Shape(OrderedDict):
    """Stands for classes that only the writer has."""


@pytest.mark.parametrize("zipped", [True, False])
def test_plain_data_comes_back_and_objects_are_records(zipped, tmp_path):
    tensor = torch.arange(6.0).view(2, 3)
    table = defaultdict(list, a=[1])
    value = {
        "tensors": [tensor, tensor.t()[1:], torch.nn.Parameter(tensor.bfloat16()), torch.empty(0, 3)],
        "plain": ({1, 2}, frozenset({3}), b"bytes", 1 + 2j, 2**70, None, True, "text", torch.float16, torch.Size([2])),
        "ordered": OrderedDict(b=1, a=2),
        "table": table,
        "own": Shape(x=1),
        "error": ValueError("no"),
        "path": Path("a/b"),
    }
    torch.save(value, tmp_path / "file.pt", _use_new_zipfile_serialization=zipped)
    found = pickles.read(tmp_path / "file.pt")
    for mine, theirs in zip(found["tensors"], value["tensors"], strict=True):
        assert torch.equal(mine, theirs.detach())
    assert found["tensors"][0].untyped_storage().data_ptr() == found["tensors"][1].untyped_storage().data_ptr()
    assert found["plain"] == value["plain"]
    assert found["ordered"] == value["ordered"]
    assert found["table"] == table
    assert found["own"].kind.endswith(".Shape")
    assert found["own"].entries == {"x": 1}
    assert found["error"].args == ("no",)
    assert "Path" in found["path"].kind


def test_numpy_scalars_are_numbers(tmp_path):
    numpy = pytest.importorskip("numpy")
    kinds = (numpy.float64, numpy.float32, numpy.int64, numpy.bool_, numpy.uint8)
    torch.save([kind(1) for kind in kinds], tmp_path / "file.pt")
    assert pickles.read(tmp_path / "file.pt") == [1.0, 1.0, 1, True, 1]


def test_hyper_parameters_of_hydra_and_paths_come_back_through_the_client_state(tmp_path):
    from omegaconf import OmegaConf

    folder = copy_of("stage2_fp32", tmp_path)
    path = folder / "global_step3" / "mp_rank_00_model_states.pt"
    model = dict(pickles.read(path))
    model["hyper_parameters"] = OmegaConf.create({"width": 5, "inner": {"list": [1, "${width}"]}})
    model["where"] = Path("a") / "b"
    path.unlink()
    torch.save(model, path)
    found = DeepSpeedCheckpoint(folder).client_state
    assert found["hyper_parameters"].inner.list[1] == 5
    assert found["where"] == Path("a/b")


def test_fixtures_are_small_and_hold_no_paths_of_machines():
    files = [file for file in DATA.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 3_000_000
    for file in files:
        if file.suffix == ".pt":
            assert b"/" + b"home/" not in file.read_bytes()
            assert os.sep.encode() + b"tmp" + os.sep.encode() not in file.read_bytes()
