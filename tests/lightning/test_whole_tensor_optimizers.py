"""LAMB and Muon in Lightning: from the configuration and from the module, saved and resumed elsewhere."""

import pytest

import ds_lightning as dsl
from ds_lightning.errors import ConfigError
from tests.lightning.runs import Model, close, full_weights, loader, trainer, zero
from tests.lightning.test_checkpoints import compare, copy_runs, save_run
from tests.pool import run_ranks

BLOCKS = {
    "Lamb": {"lr": 0.02, "weight_decay": 0.1, "max_coeff": 5.0, "eps_inside_sqrt": True},
    "Muon": {"muon_lr": 0.05, "adam_lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "ns_method": "standard"},
}


class FromConfig(Model):
    """Leaves the optimizer to the configuration."""

    def configure_optimizers(self):
        return None


class OfModule(Model):
    """Makes the same optimizer itself."""

    def configure_optimizers(self):
        if self.hparams["optimizer"] == "Muon":
            return dsl.optim.Muon(dsl.optim.muon_groups(self), **BLOCKS["Muon"])
        return dsl.optim.Lamb([p for p in self.parameters() if p.requires_grad], **BLOCKS["Lamb"])


def fit(kind, make, strategy, **options):
    module = make(kind)
    run = trainer(strategy, steps=4, gradient_clip_val=0.5, **options)
    run.fit(module, loader())
    optimizer = run.optimizers[0]
    return full_weights(module), [group.get("name") for group in optimizer.param_groups], optimizer


def train_both(kind):
    block = {"optimizer": {"type": kind.lower(), "params": BLOCKS[kind]}}
    wanted, _, _ = fit(kind, OfModule, "ddp")
    for stage in (0, 2, 3):
        found, names, optimizer = fit(kind, FromConfig, zero(stage, block))
        assert type(optimizer) is getattr(dsl.optim, kind)
        assert close(found, wanted) <= 1e-6, stage
        assert names == (["muon-params", "adam-params"] if kind == "Muon" else [None])
        if kind == "Lamb":
            assert 0 < min(optimizer.get_lamb_coeffs()) <= max(optimizer.get_lamb_coeffs()) <= 5
    assert close(fit(kind, OfModule, 1)[0], wanted) <= 1e-6


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_configuration_trains_as_the_module_does_under_ddp(kind):
    run_ranks(train_both, 2, kind)


@pytest.mark.parametrize("kind", ["lamb", "muon"])
def test_states_are_the_same_bits_at_another_stage_and_world_size(kind, tmp_path):
    source = tmp_path / "source.ckpt"
    run_ranks(save_run, 3, str(source), 3, "32-true", kind)
    targets = [(1, "32-true"), (0, "bf16-mixed")]
    run_ranks(copy_runs, 2, str(source), str(tmp_path), targets, kind)
    for stage, precision in targets:
        assert compare(source, tmp_path / f"2-{stage}-{precision}.ckpt") == []


def test_unknown_arguments_are_errors_with_a_guess():
    for kind, name, guess in (("Muon", "moun_lr", "muon_lr"), ("Lamb", "max_coef", "max_coeff")):
        with pytest.raises(ConfigError, match=f"did you mean 'optimizer.params.{guess}'"):
            zero(2, {"optimizer": {"type": kind, "params": {name: 0.1}}})
