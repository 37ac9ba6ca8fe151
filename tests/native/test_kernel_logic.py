"""The CUDA kernels' indices and arithmetic run on the host: `csrc/tests/kernels`, under sanitizers."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")


@needs_compiler
@pytest.mark.parametrize("name", ["adam8bit", "optim", "quantize", "signs"])
def test_kernels_emulated_on_the_host_equal_fp64(name, tmp_path):
    source = ROOT / "csrc" / "tests" / "kernels" / f"{name}.cpp"
    program = tmp_path / name
    command = ["c++", "-std=c++17", "-O0", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    command += [*_sanitizers(tmp_path), "-o", str(program), str(source)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    # Leaks are found with the help of ptrace, which containers forbid.
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    ran = subprocess.run([str(program)], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr


def _sanitizers(folder: Path) -> list[str]:
    """Where the compiler comes without their libraries, the tests run without them."""
    empty = folder / "empty.cpp"
    empty.write_text("int main() {}\n")
    command = ["c++", *SANITIZE, "-o", str(folder / "empty"), str(empty)]
    return SANITIZE if subprocess.run(command, capture_output=True).returncode == 0 else []
