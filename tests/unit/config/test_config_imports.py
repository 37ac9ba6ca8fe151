"""What importing the configuration costs."""

import subprocess
import sys

from ds_lightning.config.suggest import closest, did_you_mean, listed


def test_importing_and_loading_pull_in_nothing_heavy():
    program = (
        "import sys, ds_lightning.config.schema as s, ds_lightning.config.deepspeed as d\n"
        "d.load({'optimizer': {'type': 'SGD'}, 'zero_optimization': {'stage': 2}})\n"
        "heavy = {'torch', 'lightning', 'hydra', 'omegaconf', 'rich', 'hjson'} & set(sys.modules)\n"
    )
    # The package itself registers strategies, so a stand-in takes its place here.
    stand_in = (
        "import sys, types, pathlib\n"
        "package = types.ModuleType('ds_lightning')\n"
        "package.__path__ = [str(pathlib.Path('ds_lightning').resolve())]\n"
        "sys.modules['ds_lightning'] = package\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", f"{stand_in}{program}print(sorted(heavy))"],
        capture_output=True,
        text=True,
        cwd=__file__.rsplit("/tests/", 1)[0],
        check=True,
    )
    assert run.stdout.strip() == "[]"


def test_guesses():
    assert closest("Stgae", ["stage", "fp16"]) == "stage"
    assert closest("qqq", ["stage"]) is None
    assert did_you_mean("stgae", ["stage"], "zero.") == "did you mean 'zero.stage'?"
    assert did_you_mean("qqq", ["stage"]) == ""
    assert listed(["a"]) == "'a'"
    assert listed(["a", "b", "c"]) == "'a', 'b' or 'c'"
    assert listed(list("abcd"), 2) == "'a', 'b', ..."
