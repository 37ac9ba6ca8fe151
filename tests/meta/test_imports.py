"""Imports go downwards, and importing the package stays cheap."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ds_lightning"

# From the bottom up. A module may import what stands before it and, in its own folder, its
# neighbours; modules of one row do not know each other. A longer name is matched first.
LAYERS: list[tuple[str, ...]] = [
    ("errors",),
    ("ops",),
    ("config",),
    ("teams",),
    ("topology",),
    ("layout",),
    ("offload",),
    ("comm",),
    ("schedules", "precision"),
    ("optim",),
    ("zero",),
    ("optim.sharded",),  # steps on the slices that zero owns
    ("optim.blockwise", "optim.clip", "optim.narrow", "optim.run_parts"),
    ("optim.apart", "optim.speculation"),
    ("zero.passes",),
    ("zero.values",),
    ("zero.state_dicts", "zero.optimizer_states", "zero.resting"),
    ("zero.engine",),
    ("zero.access", "zero.init", "optim.ema"),
    ("activation", "attention", "data", "precision.plugin"),
    ("precision.choice",),
    ("checkpoint",),
    ("profile",),
    ("tune", "launch"),
    ("callbacks",),
    ("trainer_facts", "refusals", "children"),  # the strategy's questions to its Trainer
    ("configured", "checkpointing"),
    ("strategy",),
    ("registration",),
    ("demo",),
    ("",),  # the public names in ds_lightning/__init__.py
    ("cli", "hydra_plugins"),
    ("__main__",),
]
RANK = {name: rank for rank, row in enumerate(LAYERS) for name in row}

# Below the strategy only these speak to Lightning; the engine also runs in a bare torch loop.
KNOWS_LIGHTNING = (
    "precision.choice",
    "precision.plugin",
    "checkpointing",
    "checkpoint.data_position",
    "checkpoint.lightning_io",
    "checkpoint.lightning_module",
    "checkpoint.loop_progress",
    "checkpoint.resume",
    "callbacks",
    "configured",
    "trainer_facts",
    "refusals",
)

# Modules that cost time and that few runs need: imported where they are used.
NOT_AT_IMPORT = (
    "hydra",
    "hjson",
    "jsonargparse",
    "matplotlib",
    "omegaconf",
    "pandas",
    "rich",
    "safetensors",
    "scipy",
    "tensorboard",
    "torch.distributed.checkpoint",
    "torch.testing",
    "torch.utils.tensorboard",
    "transformers",
)


def _name_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def _layer_of(name: str) -> str | None:
    while name not in RANK and name:
        name = name.rpartition(".")[0]
        if not name:
            return None
    return name


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _imports(file: Path) -> Iterator[tuple[str, int]]:
    """All imports, those inside functions too; those for the type checker alone left out."""
    folder = ".".join(file.relative_to(ROOT).parent.parts)
    return _imports_under(ast.parse(file.read_text()), folder)


def _imports_under(node: ast.AST, folder: str) -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, child.lineno) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            # Relative ones stay in their folder: the Hydra plugin is imported by another name.
            assert child.level <= 1, f"line {child.lineno}: spell the import out"
            origin = ".".join(filter(None, (folder if child.level else "", child.module)))
            yield from ((f"{origin}.{alias.name}", child.lineno) for alias in child.names)
        elif _is_type_checking(child):
            for statement in child.orelse:
                yield from _imports_under(statement, folder)
        else:
            yield from _imports_under(child, folder)


def _own_module(imported: str) -> str | None:
    """`ds_lightning.zero.plan.StagePlan` is an import of `zero.plan`; others' modules are None."""
    if imported.partition(".")[0] != PACKAGE.name:
        return None
    name = imported.partition(".")[2]
    while name and not _exists(name):
        name = name.rpartition(".")[0]
    return name


def _exists(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: _name_of(file) or "__init__")
def test_imports_go_downwards(file):
    name = _name_of(file)
    layer = _layer_of(name)
    assert layer is not None, f"{name} has no place yet: give it one in LAYERS"
    wrong = []
    for imported, line in _imports(file):
        target = _own_module(imported)
        target_layer = None if target is None else _layer_of(target)
        if target_layer is None or target_layer == layer:
            continue
        if RANK[target_layer] >= RANK[layer]:
            wrong.append(f"line {line}: {layer} imports {imported}, which is not below it")
    assert not wrong, f"{file.relative_to(ROOT)}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("file", FILES, ids=lambda file: _name_of(file) or "__init__")
def test_below_the_strategy_only_its_envoys_know_lightning(file):
    name = _name_of(file)
    layer = _layer_of(name)
    if layer is None or RANK[layer] >= RANK["strategy"] or name.startswith(KNOWS_LIGHTNING):
        return
    found = [
        f"line {line}: {imported}"
        for imported, line in _imports(file)
        if imported.partition(".")[0] in ("lightning", "lightning_fabric", "pytorch_lightning")
    ]
    assert not found, f"{file.relative_to(ROOT)} imports Lightning:\n" + "\n".join(found)


def test_importing_the_package_adds_no_heavy_modules():
    lightning, everything = _modules_after("import lightning.pytorch", "import ds_lightning")
    added = everything - lightning
    heavy = sorted(name for name in added if name in NOT_AT_IMPORT)
    assert not heavy, f"import ds_lightning imports {heavy}; import them where they are used"


def _modules_after(*statements: str) -> list[set[str]]:
    """The modules there are after each of them, in one process."""
    code = "".join(f"{statement}\nprint(*sys.modules)\n" for statement in ("import sys", *statements))
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return [set(line.split()) for line in result.stdout.splitlines()[1:]]
