"""How a checkpoint comes to its place, and leaves it: beside it, synced, and moved in one step.

[Note: partial] What is being written, and what is being removed, is called `.NAME.OWNER.partial`, where OWNER tells
host, process, when the process began, and which of its writes this is. No name that a user or `ckpt_path="last"` looks
for ever belongs to something incomplete. A writer that is killed leaves its partial behind; the next run that uses the
folder on that host finds that the owner is gone, says so and removes it.

[Note: set aside] Some file systems cannot exchange two names at once. There the old folder is called
`STEM.OWNER.replaced.SUFFIX` while the new one takes its place. It is complete, so its name may be found: by
`ckpt_path="last"`, by who follows `latest`, and by the next run, which puts it back if nothing took its place.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import re
import shutil
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

LATEST = "latest"
"""File in a folder of checkpoints with the name of the newest complete one."""

_OWNER = r"(?P<host>[^.]*)-(?P<pid>\d+)-(?P<began>\d+)-\d+"
_PARTIAL = re.compile(rf"^\.(?P<name>.+)\.{_OWNER}\.partial$")
_ASIDE = re.compile(rf"^(?P<stem>.+)\.{_OWNER}\.replaced(?P<suffix>\.[^.]+)?$")
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_LONGEST = 255  # bytes in a file name
_serial = itertools.count()


def partial_of(target: Path) -> Path:
    """A new name under which this process puts `target` together."""
    end = f".{_owner()}.partial"
    name = target.name.encode()[: _LONGEST - len(end) - 1].decode(errors="ignore")
    return target.with_name(f".{name}{end}")


def is_partial(path: Path) -> bool:
    """Whether a path has a name of what is incomplete."""
    return _PARTIAL.match(path.name) is not None


def make_folder(folder: Path) -> None:
    """Make a folder and those above it; synced to disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


def place(partial: Path, target: Path) -> None:
    """Move a finished file or folder to its place, replacing what is there, in one step; synced to disk.

    Raises:
        OSError: when that fails; `target` is then complete, the old or the new one.
    """
    folders = partial.is_dir() or (target.is_dir() and not target.is_symlink())
    if folders and os.path.lexists(target):
        # What was there comes to the partial's name, so that at no moment there is neither.
        _exchange(partial, target)
        sync(target.parent)
        remove(partial)
        return
    partial.replace(target)
    sync(target.parent)


def _exchange(first: Path, second: Path) -> None:
    """Swap two names. See [Note: set aside] for file systems that cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        names = os.fsencode(first), os.fsencode(second)
        if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
            raise OSError(code, os.strerror(code), str(second))
    aside = second.with_name(f"{second.stem}.{_owner()}.replaced{second.suffix}")
    second.rename(aside)
    try:
        first.rename(second)
    except OSError:
        aside.rename(second)
        raise
    aside.rename(first)


def set_aside(target: Path) -> Path | None:
    """What was at `target` before, if a process ended while it was being replaced."""
    found = [entry for entry in _entries(target.parent) if _place_of(entry) == target]
    return max(found, key=lambda entry: entry.stat().st_mtime, default=None)


def _place_of(entry: Path) -> Path | None:
    match = _ASIDE.match(entry.name)
    return entry.with_name(match["stem"] + (match["suffix"] or "")) if match is not None else None


def remove(path: Path) -> None:
    """Remove a file, a link or a folder that nobody looks for. If it cannot be removed, it stays: see `tidy`."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def withdraw(target: Path) -> None:
    """Remove a checkpoint. What names it names the newest one afterwards, and no part of it keeps its name.

    Raises:
        OSError: when it cannot be removed.
    """
    newest = pointed_to(target.parent)
    if newest is not None and newest.name == target.name:
        target.with_name(LATEST).unlink(missing_ok=True)
        newest = None
    if newest is not None:
        for link in links_to(target):
            relink(link, newest.name)
    if target.is_dir() and not target.is_symlink():
        partial = partial_of(target)
        target.rename(partial)
        remove(partial)
    else:
        target.unlink(missing_ok=True)


def sync(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems have nothing to sync
            raise
    finally:
        os.close(descriptor)


# What names a checkpoint ----------------------------------------------------------------------------------------------


def point_to(target: Path) -> None:
    """Let `latest` in the folder of a complete checkpoint name it."""
    pointer = target.with_name(LATEST)
    partial = partial_of(pointer)
    try:
        with partial.open("w") as file:
            file.write(target.name)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(pointer)
    except BaseException:
        remove(partial)
        raise
    sync(target.parent)


def pointed_to(folder: Path) -> Path | None:
    """What `latest` in a folder names, if it is there and lies in that folder."""
    try:
        name = (folder / LATEST).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    if not name or Path(name).name != name:
        return None
    target = folder / name
    return target if target.exists() else set_aside(target)


def links_to(target: Path) -> list[Path]:
    """Links beside `target` that lead to it, whether it is there or not."""
    return [
        entry
        for entry in _entries(target.parent)
        if entry.is_symlink() and os.path.normpath(entry.parent / os.readlink(entry)) == os.path.normpath(target)
    ]


def relink(link: Path, destination: str | None) -> None:
    """Let a link lead to something else, in one step; None removes it."""
    if destination is None:
        link.unlink(missing_ok=True)
        return
    partial = partial_of(link)
    partial.symlink_to(destination)
    partial.replace(link)


# What killed writers left ---------------------------------------------------------------------------------------------


def tidy(folders: Iterable[Path]) -> list[str]:
    """Remove what killed writers on this host left in these folders; returns what there is to say about it."""
    told = []
    for entry in (entry for folder in dict.fromkeys(folders) for entry in _entries(folder)):
        match = _PARTIAL.match(entry.name) or _ASIDE.match(entry.name)
        if match is None:
            continue
        if match["host"] != _host():
            told.append(
                f"{entry} is not complete: it is being written on {match['host']}, or was left there by a run that was "
                "killed. Remove it if no run uses it"
            )
        elif not _alive(int(match["pid"]), int(match["began"])):
            told += _cleared(entry)
    return told


def _cleared(entry: Path) -> list[str]:
    """Remove what a process left, or put it back."""
    place_ = _place_of(entry)
    if place_ is not None and not os.path.lexists(place_):
        with suppress(OSError):
            entry.rename(place_)
            return [f"put {place_} back in its place, which a run that was killed was about to replace"]
    remove(entry)
    if os.path.lexists(entry):
        return [f"{entry}, which a run that was killed had not completed, cannot be removed"]
    return [f"removed {entry}, which a run that was killed had not completed"]


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _owner() -> str:
    return f"{_host()}-{os.getpid()}-{_began(os.getpid())}-{next(_serial)}"


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", socket.gethostname())


def _began(pid: int) -> int | None:
    """When a running process began, in ticks since the machine did; 0 where the system does not tell."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0 if not os.path.exists("/proc/self/stat") else None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _alive(pid: int, began: int) -> bool:
    """Whether the process that began then still runs; another one may have its number by now."""
    if began or _began(pid) is None:
        return _began(pid) == began
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True
