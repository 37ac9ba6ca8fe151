"""Hyper-parameters that are data are loaded safely; whatever could run code is not."""

import dataclasses
import datetime
import enum
import os
import pathlib
import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from ds_lightning.checkpoint.lightning_io import ZeroCheckpointIO
from ds_lightning.errors import CheckpointError


class Kind(enum.Enum):
    SMALL = "small"
    LARGE = "large"


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Inner:
    rate: float = 0.5
    names: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Settings:
    inner: Inner
    kind: Kind
    level: Level
    path: pathlib.Path
    count: np.float64
    when: datetime.timedelta

    def __post_init__(self):
        assert self.inner.rate > 0


@dataclasses.dataclass(slots=True)
class Slotted:
    width: int = 3


@dataclasses.dataclass
class Sneaky:
    """Runs something when its state is set."""

    command: str = ""

    def __setstate__(self, state):
        os.system(state["command"])


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


def load(tmp_path, content):
    torch.save({"state_dict": {}, "hyper_parameters": content}, tmp_path / "a.ckpt")
    return ZeroCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")["hyper_parameters"]


def test_dataclasses_enums_paths_numbers_and_containers_come_back(tmp_path):
    settings = Settings(
        Inner(0.25, ["a"]), Kind.LARGE, Level.LOW, pathlib.Path("x/y"), np.float64(1.5), datetime.timedelta(seconds=3)
    )
    given = {
        "settings": settings,
        "slotted": Slotted(7),
        "more": OrderedDict(a={1, 2}),
        "cfg": OmegaConf.create({"a": [1]}),
    }
    found = load(tmp_path, given)
    assert found == given
    assert type(found["settings"]) is Settings
    assert type(found["settings"].count) is np.float64


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (Evil(), r"posix\.system"),
        (Sneaky("touch pwned"), r"test_plain_data\.Sneaky"),
        ([print], r"builtins\.print"),
        (pickle.Pickler, r"Pickler"),
        (torch.nn.Linear(1, 1), r"torch\.nn"),
    ],
    ids=["reduce", "setstate", "function", "unpickler", "module"],
)
def test_what_could_run_code_is_refused_by_name(tmp_path, monkeypatch, content, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=f"not plain data.*{name}"):
        load(tmp_path, {"x": content})
    assert not (tmp_path / "pwned").exists()


def test_a_library_class_that_checks_itself_is_no_plain_data(tmp_path):
    from transformers import TrainingArguments  # a dataclass whose __post_init__ does much

    with pytest.raises(CheckpointError, match=r"transformers\.training_args\.TrainingArguments"):
        load(tmp_path, TrainingArguments.__new__(TrainingArguments))


def test_a_class_that_is_not_imported_stays_so(tmp_path, monkeypatch):
    (tmp_path / "far_away.py").write_text("import dataclasses\n@dataclasses.dataclass\nclass Far:\n    x: int = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    import far_away

    torch.save({"state_dict": {}, "far": far_away.Far()}, tmp_path / "far.ckpt")
    assert ZeroCheckpointIO().load_checkpoint(tmp_path / "far.ckpt")["far"] == far_away.Far()
    monkeypatch.delitem(__import__("sys").modules, "far_away")
    with pytest.raises(CheckpointError, match=r"far_away\.Far"):
        ZeroCheckpointIO().load_checkpoint(tmp_path / "far.ckpt")
