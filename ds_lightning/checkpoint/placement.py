"""How a checkpoint comes to its place: written beside it, synced, and moved there in one step.

[Note: partial] What is being written is called `.NAME.OWNER.partial`, where OWNER tells host, process and when the
process began. No name that a user or `ckpt_path="last"` looks for ever belongs to something incomplete. A writer that
is killed leaves its partial behind; the next run that uses the folder on that host finds that the owner is gone, says
so and removes it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path

LATEST = "latest"
"""File in a folder of checkpoints with the name of the newest complete one."""

_PARTIAL = re.compile(r"^\.(?P<name>.+)\.(?P<host>[^.]*)-(?P<pid>\d+)-(?P<began>\d+)\.partial$")
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_LONGEST = 255  # bytes in a file name


def partial_of(target: Path) -> Path:
    """Where `target` is put together by this process."""
    owner = f".{_host()}-{os.getpid()}-{_began(os.getpid())}.partial"
    name = target.name.encode()[: _LONGEST - len(owner) - 1].decode(errors="ignore")
    return target.with_name(f".{name}{owner}")


def place(partial: Path, target: Path) -> None:
    """Move a finished file or folder to its place, replacing what is there, in one step; synced to disk.

    Raises:
        OSError: when that fails; `target` is then what it was.
    """
    if target.is_dir() and not target.is_symlink():
        # What was there comes to the partial's name, so that at no moment there is neither.
        _exchange(partial, target)
        sync(target.parent)
        remove(partial)
        return
    if partial.is_dir() and (target.is_file() or target.is_symlink()):
        target.unlink()  # a folder cannot take the place of a file
    partial.replace(target)
    sync(target.parent)


def _exchange(first: Path, second: Path) -> None:
    """Swap two names. Where the file system cannot do it at once, one of them is away for a moment."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        names = os.fsencode(first), os.fsencode(second)
        if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
            raise OSError(code, os.strerror(code), str(second))
    aside = first.with_name(first.name.removesuffix(".partial") + ".old.partial")
    second.rename(aside)
    first.rename(second)
    aside.rename(first)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


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


def point_to(target: Path) -> None:
    """Let `latest` in the folder of a complete checkpoint name it."""
    pointer = target.with_name(LATEST)
    partial = partial_of(pointer)
    with partial.open("w") as file:
        file.write(target.name)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(pointer)


def pointed_to(folder: Path) -> Path | None:
    """What `latest` in a folder names, if it is there and lies in that folder."""
    try:
        name = (folder / LATEST).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    target = folder / name
    return target if name and Path(name).name == name and target.exists() else None


def remove_leftovers(folders: Iterable[Path]) -> list[Path]:
    """Remove what killed writers on this host left in these folders; returns what was removed."""
    removed = []
    for folder in dict.fromkeys(folders):
        for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
            found = _PARTIAL.match(entry.name)
            if found is None or found["host"] != _host() or _began(int(found["pid"])) == int(found["began"]):
                continue
            remove(entry)
            removed.append(entry)
    return removed


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", socket.gethostname())


def _began(pid: int) -> int:
    """When a process began, in ticks since the machine did; 0 when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0
