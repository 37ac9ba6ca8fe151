"""What holds for the files of the repository, whatever they say."""

import ast
import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = {".py", ".cpp", ".h", ".cu", ".txt", ".toml", ".yaml", ".yml", ".ini", ".cfg"}
TEXT = SOURCE | {".md", ".json", ""}
AT_THE_TOP = {"pyproject.toml", "README.md", "LICENSE"}
FOLDERS_AT_THE_TOP = {"ds_lightning", "csrc", "conf", "examples", "tests"}

# Spelled in pieces, so that this file passes its own checks.
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b")
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:wo" r"rk|r" r"oot|ho" r"me/\w+|opt/ve" r"nvs)/")
NOTE = re.compile(r"\[(Note: [^\]\n]+)\]")


def _files() -> list[Path]:
    """Everything git would commit; without git, everything that is not hidden or built."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return [
            file
            for folder in FOLDERS_AT_THE_TOP
            for file in (ROOT / folder).rglob("*")
            if file.is_file() and "__pycache__" not in file.parts
        ]
    names = listed.decode().split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


FILES = sorted(_files())
# Configurations and recordings of others, kept as they came.
OURS = [file for file in FILES if ROOT / "tests" / "data" not in file.parents]


def _hits(pattern: re.Pattern[str], suffixes: set[str]) -> list[str]:
    return [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for file in OURS
        if file.suffix in suffixes and file.name != "LICENSE"
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if pattern.search(line)
    ]


def test_pytest_enters_every_folder_of_tests(pytestconfig):
    skipped = pytestconfig.getini("norecursedirs")
    tests = [file.relative_to(ROOT) for file in FILES if ROOT / "tests" in file.parents and file.match("test_*.py")]
    assert {"dist", "lightning", "unit"} <= {test.parent.name for test in tests}
    assert [test for test in tests if any(fnmatch(part, name) for part in test.parent.parts for name in skipped)] == []


def test_nothing_is_left_for_later():
    assert not _hits(UNFINISHED, TEXT)


def test_no_path_of_somebodys_machine():
    assert not _hits(MACHINE_PATH, TEXT)


def test_source_is_ascii():
    assert not _hits(re.compile(r"[^\x00-\x7f]"), SOURCE)


def test_only_the_agreed_entries_stand_at_the_top():
    tops = {file.relative_to(ROOT).parts[0] for file in FILES}
    strange = {top for top in tops if not top.startswith(".")} - AT_THE_TOP - FOLDERS_AT_THE_TOP
    assert not strange


def test_references_to_notes_resolve():
    """A note begins the line that defines it, comment sign aside; elsewhere it is a reference."""
    defined: dict[str, list[Path]] = {}
    referred: dict[str, list[Path]] = {}
    for file in OURS:
        if file.suffix not in SOURCE:
            continue
        for line in file.read_text().splitlines():
            for match in NOTE.finditer(line):
                heading = line[: match.start()].strip(" #/*\"'") == ""
                (defined if heading else referred).setdefault(match[1], []).append(file)
    unresolved = {note: files for note, files in referred.items() if note not in defined}
    assert not unresolved
    twice = {note: files for note, files in defined.items() if len(files) > 1}
    assert not twice


@pytest.mark.parametrize(
    "file",
    [file for file in FILES if file.suffix == ".py"],
    ids=lambda file: str(file.relative_to(ROOT)),
)
def test_python_parses(file):
    # As the oldest supported version reads it.
    ast.parse(file.read_text(), filename=str(file), feature_version=(3, 10))


@pytest.mark.parametrize(
    "file",
    [file for file in FILES if file.suffix in {".yaml", ".yml"}],
    ids=lambda file: str(file.relative_to(ROOT)),
)
def test_yaml_parses(file):
    yaml = pytest.importorskip("yaml")
    yaml.safe_load(file.read_text())
