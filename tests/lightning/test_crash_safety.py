"""A run that is killed in the midst of a save: the next goes on from the last complete checkpoint, and tidies up."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ds_lightning.checkpoint import placement
from ds_lightning.checkpoint.lightning_io import ZeroCheckpointIO
from ds_lightning.checkpoint.loading import load
from ds_lightning.errors import CheckpointError
from tests.lightning import kills
from tests.lightning.runs import same
from tests.pool import fresh_ranks, run_ranks

full = pytest.mark.full

# By default each point of a save dies in one way, and the next run goes one way. The long matrix has all of them.
LAST, FOLDER = "last", "folder"
DEFAULT = [
    ("full", False, "another rank sends", FOLDER),
    ("full", True, "it is synced", LAST),
    ("full", False, "latest is renamed", FOLDER),
    ("full", True, "a link waits", LAST),
    ("full", False, "a link lost its target", LAST),
    ("full", False, "last was replaced", LAST),
    ("sharded", False, "between two tensors", LAST),
    ("sharded", True, "another rank sends", FOLDER),
    ("sharded", False, "the table of its content", FOLDER),
    ("sharded", True, "what is no tensor", LAST),
    ("sharded", False, "it is renamed", LAST),
    ("sharded", True, "it was renamed", FOLDER),
    ("sharded", True, "an old one is removed", FOLDER),
    ("sharded", False, "last is set aside", LAST),
]
MATRIX = [
    (form, beside, name)
    for form, points in kills.POINTS.items()
    for beside in (False, True)
    for name in points
    if beside or name != "a link waits"
]


@pytest.fixture(scope="module")
def weights():
    return run_ranks(kills.unbroken, 2)[0]


def read(path):
    return load(Path(path), ZeroCheckpointIO().load_checkpoint, print)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def check_complete(folder):
    """Every name that is there is complete, and `latest` names one."""
    assert not [name for name in names(folder) if name.startswith(".") or ".replaced" in name]
    assert (folder / (folder / "latest").read_text()).exists()
    for name in names(folder):
        if name != "latest":
            assert read(folder / name)["global_step"] > 0


def check_named_is_complete(folder):
    """What a killed run left: names that do not begin with a dot are complete, links lead somewhere."""
    for name in names(folder):
        if name != "latest" and not name.startswith("."):
            assert read(folder / name)["global_step"] in (2, 3)


def check_goes_on(folder, weights, form, beside, name, ways):
    point = kills.POINTS[form][name]
    outcomes = fresh_ranks(kills.killed, 2, str(folder), form, beside, name, timeout=90)
    assert outcomes[point.rank].exitcode == -signal.SIGKILL, outcomes[point.rank]
    assert not any(outcome.timed_out for outcome in outcomes)
    assert outcomes[1 - point.rank].error, "the other rank must hear of it"
    check_named_is_complete(folder)
    left = [entry for entry in names(folder) if entry.startswith(".")]
    assert not (left and point.rank == 1), "the rank that survives removes what is incomplete"
    spare = folder.with_name("spare")
    shutil.copytree(folder, spare, symlinks=True)
    for way in ways:
        shutil.rmtree(folder)
        shutil.copytree(spare, folder, symlinks=True)
        path, expected = ("last", point.last) if way == LAST else (str(folder), point.latest)
        (step, found, said), _ = run_ranks(kills.resumed, 2, str(folder), form, path, point.save_last)
        assert step == expected, path
        assert same(weights[step], found) == []
        assert all(any(f"removed {folder / entry}" in message for message in said) for entry in left), said
        check_complete(folder)


@pytest.mark.parametrize(("form", "beside", "name", "way"), DEFAULT)
def test_the_next_run_goes_on_from_the_last_complete_checkpoint(tmp_path, weights, form, beside, name, way):
    check_goes_on(tmp_path / "kept", weights, form, beside, name, [way])


@full
@pytest.mark.parametrize(("form", "beside", "name"), MATRIX)
def test_it_does_so_wherever_and_however_it_was_killed(tmp_path, weights, form, beside, name):
    check_goes_on(tmp_path / "kept", weights, form, beside, name, [LAST, FOLDER])


# Leftovers ------------------------------------------------------------------------------------------------------------


def leftover(folder, name, host=None, pid=None, began=None):
    """What a writer left; by default one that lives: this process."""
    mine = placement._PARTIAL.match(placement.partial_of(folder / name).name)
    host, pid, began = host or mine["host"], pid or mine["pid"], began or mine["began"]
    path = folder / f".{name}.{host}-{pid}-{began}-0.partial"
    path.mkdir()
    (path / "__0_0.distcp").write_bytes(b"half")
    return path


def test_only_what_belongs_to_a_process_that_is_gone_is_removed(tmp_path):
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    gone = leftover(tmp_path, "gone.ckpt", pid=ended.stdout.decode().strip(), began=7)
    reused = leftover(tmp_path, "reused.ckpt", began=7)  # this process has the number now, but began later
    mine = leftover(tmp_path, "mine.ckpt")
    job = subprocess.Popen(["sleep", "100"])
    others = leftover(tmp_path, "others.ckpt", pid=job.pid, began=placement._began(job.pid))
    elsewhere = leftover(tmp_path, "elsewhere.ckpt", host="some-other-host")
    users = [tmp_path / name for name in ("a.partial", ".a.ckpt.partial", ".hidden", "a.ckpt")]
    for path in users:
        path.touch()
    told = placement.tidy([tmp_path, tmp_path / "absent", users[0]])
    assert not gone.exists()
    assert not reused.exists()
    assert all(path.exists() for path in (mine, others, elsewhere, *users))
    assert [message for message in told if "some-other-host" in message] == told[:1]
    assert [str(path) in message for path, message in zip((elsewhere, gone, reused), told, strict=True)]
    job.kill()
    while placement._began(job.pid) is not None:  # from its end on, also while nobody has asked how it ended
        pass
    assert placement.tidy([tmp_path])[1:] == [f"removed {others}, which a run that was killed had not completed"]
    assert job.wait() == -signal.SIGKILL


def test_a_host_name_with_dots_is_found_again(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node-1.cluster-2.example")
    path = placement.partial_of(tmp_path / "epoch=0-loss=0.5.ckpt")
    assert placement._PARTIAL.match(path.name)["name"] == "epoch=0-loss=0.5.ckpt"
    assert placement.is_partial(path)
    path.touch()
    assert placement.tidy([tmp_path]) == []
    monkeypatch.setattr(placement, "_began", lambda pid: None)
    assert len(placement.tidy([tmp_path])) == 1


def test_the_longest_name_of_a_file_still_has_a_partial(tmp_path):
    for name in ("a" * 255, "\u00e4" * 127):
        partial, other = placement.partial_of(tmp_path / name), placement.partial_of(tmp_path / name)
        partial.touch()
        assert partial != other, "two writes of one name must not meet"
        placement.place(partial, tmp_path / name)
        assert (tmp_path / name).exists()


def test_what_is_incomplete_is_not_loaded_by_name(tmp_path):
    path = leftover(tmp_path, "a.ckpt")
    with pytest.raises(CheckpointError, match="had not completed"):
        read(path)


# Places ---------------------------------------------------------------------------------------------------------------


def make(path, kind, text):
    if kind == "folder":
        path.mkdir()
        (path / "content").write_text(text)
    elif kind == "link":
        path.with_name("elsewhere").mkdir()
        path.symlink_to("elsewhere")
    elif kind == "file":
        path.write_text(text)


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("new", ["file", "folder"])
@pytest.mark.parametrize("old", ["file", "folder", "link", "nothing"])
def test_anything_takes_the_place_of_anything(tmp_path, monkeypatch, old, new, exchange):
    if not exchange:
        monkeypatch.setattr(placement.ctypes, "CDLL", lambda *_, **__: object())
    target = tmp_path / "a.ckpt"
    make(target, old, "old")
    partial = placement.partial_of(target)
    make(partial, new, "new")
    placement.place(partial, target)
    assert (target / "content" if new == "folder" else target).read_text() == "new"
    assert set(names(tmp_path)) - {"elsewhere"} == {"a.ckpt"}


def test_a_place_that_cannot_be_taken_keeps_what_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(placement.ctypes, "CDLL", lambda *_, **__: object())
    target = tmp_path / "a.ckpt"
    make(target, "folder", "old")
    with pytest.raises(FileNotFoundError):
        placement._exchange(tmp_path / "absent", target)
    assert names(tmp_path) == ["a.ckpt"]
    assert (target / "content").read_text() == "old"


def test_what_was_set_aside_is_found_and_put_back(tmp_path):
    target = tmp_path / "last.ckpt"
    aside = tmp_path / f"last.{placement._host()}-{os.getpid()}-7-3.replaced.ckpt"
    make(aside, "folder", "old")
    (tmp_path / "latest").write_text("last.ckpt")
    assert placement.pointed_to(tmp_path) == placement.set_aside(target) == aside
    assert "put" in placement.tidy([tmp_path])[0]
    assert names(tmp_path) == ["last.ckpt", "latest"]
    make(aside, "folder", "older")
    assert "removed" in placement.tidy([tmp_path])[0]
    assert (target / "content").read_text() == "old"


def test_what_is_withdrawn_is_named_by_nothing(tmp_path):
    for name in ("a.ckpt", "b.ckpt"):
        make(tmp_path / name, "folder", name)
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    placement.point_to(tmp_path / "b.ckpt")
    placement.withdraw(tmp_path / "a.ckpt")
    assert names(tmp_path) == ["b.ckpt", "last.ckpt", "latest"]
    assert os.readlink(tmp_path / "last.ckpt") == "b.ckpt"
    placement.withdraw(tmp_path / "b.ckpt")
    assert names(tmp_path) == ["last.ckpt"]
    placement.withdraw(tmp_path / "b.ckpt")
