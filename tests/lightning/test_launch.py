"""Every way to start processes trains alike, and gives the parent the whole model back."""

import pytest
import torch
from torch.utils.data import DataLoader

from tests.lightning.runs import Model, Words, close, full_weights, trainer
from tests.lightning.scripts import run_script
from tests.pool import run_ranks

BY_SCRIPT = """
if __name__ == "__main__":
    model = Model()
    run = trainer(zero({stage}, start_method="{method}"))
    run.fit(model, data())
    if "{method}" == "popen":
        run.validate(model, data(), verbose=False)
        run.test(model, data(), verbose=False)
        run.save_checkpoint("out.ckpt")
    else:  # this is the parent, which has trained nothing itself
        assert all(type(p) is torch.nn.Parameter for p in model.parameters())
        torch.save({{"state_dict": model.state_dict()}}, "out.ckpt")
"""


def reference():
    model = Model()
    run = trainer("ddp", steps=3, use_distributed_sampler=True)
    run.fit(model, DataLoader(Words(24), batch_size=2))
    return full_weights(model)


full = pytest.mark.full


@pytest.mark.parametrize(
    ("method", "torchrun", "stage"),
    [
        ("popen", False, 3),
        ("popen", True, 1),
        ("spawn", False, 3),
        pytest.param("fork", False, 1, marks=full),
        pytest.param("popen", False, 1, marks=full),
        pytest.param("popen", True, 3, marks=full),
        pytest.param("spawn", False, 1, marks=full),
        pytest.param("fork", False, 3, marks=full),
    ],
)
def test_a_script_trains_as_under_ddp_however_it_is_started(tmp_path, method, torchrun, stage):
    ended = run_script(tmp_path, BY_SCRIPT.format(stage=stage, method=method), torchrun=torchrun)
    assert ended.code == 0, ended.output
    assert ended.left == []
    saved = torch.load(tmp_path / "out.ckpt", weights_only=True)["state_dict"]
    expected, _ = run_ranks(reference, 2)
    assert {name: value.shape for name, value in saved.items()} == {
        name: value.shape for name, value in Model().state_dict().items()
    }
    assert close(expected, {name: saved[name] for name in expected}) < 1e-6
