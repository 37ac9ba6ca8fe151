"""Lightning's callbacks and tools with real ranks, and models that are built sharded."""

from __future__ import annotations

import functools
import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    ModelSummary,
    RichModelSummary,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim.swa_utils import get_ema_avg_fn

import ds_lightning as dsl
from ds_lightning.precision.plugin import NAMES
from tests.lightning import common
from tests.lightning.common import Net, adamw, assert_moved, assert_same, data, fit, make_trainer, parity, weights, zero
from tests.pool import run_ranks


class Validated(Net):
    """With validation data, and a loss that gets worse when told to."""

    def __init__(self, optimize: Any = None, worse_from: int | None = None) -> None:
        super().__init__(optimize or adamw)
        self.worse_from = worse_from

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        if self.worse_from is not None and self.current_epoch >= self.worse_from and self.global_rank == 1:
            loss = loss + 1000.0 * (1 + self.current_epoch)
        self.log("val_loss", loss, sync_dist=True)

    def val_dataloader(self) -> Any:
        return data(8, 2)


def stopping() -> list[Callback]:
    return [EarlyStopping("val_loss", patience=1)]


def test_early_stopping_stops_all_ranks_where_ddp_stops():
    (first, _) = run_ranks(
        parity, 2, functools.partial(Validated, None, 2), callbacks=stopping, max_epochs=6, stages=(0, 3)
    )
    assert 3 * 5 <= first["steps"] < 6 * 5


def best_checkpoint(folder: str) -> None:
    found = {}
    for kind in ("ddp", 2, 3):
        saving = ModelCheckpoint(
            Path(folder) / str(kind), monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}"
        )
        module = Validated(worse_from=2)
        trainer = fit(module, common.strategy_of(kind), callbacks=[saving], max_epochs=3, enable_checkpointing=True)
        found[kind] = (
            sorted(path.name for path in (Path(folder) / str(kind)).iterdir() if path.name != "latest"),
            Path(saving.best_model_path).name,
        )
        dist.barrier()
        state = torch.load(saving.best_model_path, weights_only=True)["state_dict"]
        plain = Net()
        plain.load_state_dict(state)
        assert trainer.global_step == 15
    assert found["ddp"] == found[2] == found[3]


def test_model_checkpoint_keeps_the_files_that_it_keeps_under_ddp(tmp_path):
    run_ranks(best_checkpoint, 2, str(tmp_path))


# Finetuning ----------------------------------------------------------------------------------------------------------


class Backbone(Net):
    """Its `backbone` is frozen at first."""

    def __init__(self) -> None:
        super().__init__(trainable_sgd)
        self.backbone = nn.Sequential(self.embed, self.blocks[0])
        self.said: list[Any] = []

    def on_train_epoch_end(self) -> None:
        optimizer = self.trainer.optimizers[0]
        self.said.append(
            (len(optimizer.param_groups), [sum(p.numel() for p in g["params"]) for g in optimizer.param_groups])
        )


def trainable_sgd(module: nn.Module) -> Any:
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
    return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def unfreezing() -> list[Callback]:
    return [BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.005, verbose=False)]


def finetuning() -> None:
    # DDP never reduces what was frozen when it began, so every sample goes to every rank: reducing or not is the same.
    loader = functools.partial(everything, 10, 2)
    arguments = {"callbacks": unfreezing, "max_epochs": 4, "loader": loader, "use_distributed_sampler": False}
    before = weights(Backbone())
    expected = common.run(Backbone, "ddp_find_unused_parameters_true", **arguments)
    for stage in common.STAGES:
        found = common.run(Backbone, stage, **arguments)
        assert_same(found["weights"], expected["weights"], f"stage {stage}")
        assert found["said"] == expected["said"]
        assert found["lr"] == expected["lr"]
        assert not torch.equal(found["weights"]["embed.weight"], before["embed.weight"])
        # and with different samples on each rank, all ranks end with the same weights
        split = common.run(Backbone, stage, **{**arguments, "use_distributed_sampler": True})["weights"]
        theirs = [None, None]
        dist.all_gather_object(theirs, {name: value for name, value in split.items()})
        assert all(torch.equal(theirs[0][name], theirs[1][name]) for name in split)


def everything(samples: int, batch_size: int) -> Any:
    return data(samples, batch_size)


def test_backbone_finetuning_unfreezes_and_trains_at_every_stage():
    run_ranks(finetuning, 2)


# Averages ------------------------------------------------------------------------------------------------------------


def averaging() -> list[Callback]:
    return [WeightAveraging(avg_fn=get_ema_avg_fn(0.8))]


def swa() -> list[Callback]:
    return [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2)]


@pytest.mark.parametrize("callbacks", [averaging, swa])
def test_weight_averages_below_stage_3_are_those_of_ddp(callbacks):
    run_ranks(parity, 2, functools.partial(Net, adamw), stages=(0, 1, 2), callbacks=callbacks, max_epochs=4)


class Normalized(Net):
    """Batch norm, whose statistics stochastic weight averaging computes anew."""

    def __init__(self) -> None:
        super().__init__(adamw)
        self.batch_norm = nn.BatchNorm1d(7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.batch_norm(self.blocks[0](self.embed(x))))


def test_stochastic_weight_averaging_updates_batch_norm_as_under_ddp():
    run_ranks(
        parity,
        2,
        Normalized,
        reference="ddp_find_unused_parameters_true",
        stages=(0, 1, 2),
        callbacks=swa,
        max_epochs=4,
        tolerance=2e-6,
    )


class OwnAveraging(WeightAveraging):
    """A user's."""


def refusals() -> list[str]:
    said = []
    for callback in (averaging()[0], swa()[0], OwnAveraging()):
        try:
            fit(Net(), zero(3), callbacks=[callback], max_epochs=4)
        except dsl.errors.ConfigError as error:
            said.append(str(error))
    return said


def test_weight_averages_at_stage_3_are_refused_in_words():
    (said, _) = run_ranks(refusals, 2)
    for text, name in zip(said, ("WeightAveraging", "StochasticWeightAveraging", "OwnAveraging"), strict=True):
        assert name in text
        assert "zero_optimization.stage=3" in text
        assert "Use stage 0, 1 or 2" in text


# Tools ---------------------------------------------------------------------------------------------------------------


def found_rates() -> None:
    results = {}
    for kind in ("ddp", *common.STAGES):
        module = Net(by_attribute)
        module.lr = 1e-3
        dist.barrier()
        finder = LearningRateFinder(min_lr=1e-4, max_lr=0.05, num_training_steps=20, early_stop_threshold=None)
        fit(module, common.strategy_of(kind), callbacks=[finder], max_epochs=5, enable_checkpointing=True)
        assert module.lr != 1e-3, "nothing was found"
        results[kind] = module.lr, finder.optimal_lr.results, weights(module)
        assert not list(Path.cwd().glob(".lr_find*")), "left behind"
    for stage in common.STAGES:
        common.assert_alike(results[stage][0], results["ddp"][0], f"stage {stage}")
        common.assert_alike(results[stage][1], results["ddp"][1], f"stage {stage}", 1e-4)
        assert_same(results[stage][2], results["ddp"][2], f"stage {stage}", 1e-5)


def by_attribute(module: Any) -> Any:
    return torch.optim.SGD(module.parameters(), lr=module.lr)


def test_the_learning_rate_finder_finds_what_it_finds_under_ddp_and_puts_weights_back(tmp_path):
    run_ranks(in_folder, 2, str(tmp_path), found_rates)


def in_folder(folder: str, check: Any) -> None:
    import os

    os.chdir(folder)
    check()


def summaries() -> None:
    expected = sum(p.numel() for p in Net().parameters())
    for stage in common.STAGES:
        for summary in (ModelSummary(max_depth=2), RichModelSummary(max_depth=2)):
            module = Frozen()
            seen: list[Any] = []
            original = type(summary).summarize

            def summarize(
                summary_data: Any, *args: Any, seen: Any = seen, original: Any = original, **kwargs: Any
            ) -> None:
                seen.append((summary_data, args, kwargs))
                original(summary_data, *args, **kwargs)

            summary.summarize = summarize  # type: ignore[method-assign]
            printed = io.StringIO()
            with redirect_stdout(printed):
                fit(module, zero(stage), callbacks=[summary], enable_model_summary=True, max_steps=1)
            if module.global_rank:
                continue
            ((table, (total, trainable, *_), _),) = seen
            assert total == expected, stage
            assert trainable == expected - module.blocks[0].up.weight.numel(), stage
            rows = dict(table)
            counts = dict(zip(rows["Name"], map(str.strip, rows["Params"]), strict=True))
            for name in ("embed", "blocks.0", "blocks.1", "head"):
                assert counts[name] == str(sum(p.numel() for p in module.get_submodule(name).parameters())), (
                    stage,
                    name,
                )


class Frozen(Net):
    """A frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].up.weight.requires_grad_(False)
        self.example_input_array = torch.ones(2, common.FEATURES)


def test_summaries_show_the_true_counts_at_every_stage():
    run_ranks(summaries, 2)


def harmless() -> list[Callback]:
    return [Timer(duration={"minutes": 1}), EarlyStopping("loss", check_on_train_epoch_end=True, patience=9)]


class Logging(Net):
    """Logs its loss in every way."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log_dict({"min": loss, "rank": float(self.global_rank)}, sync_dist=True, reduce_fx="min")
        gathered = self.all_gather(loss.detach())
        assert gathered.shape == (2,)
        return loss


def test_timers_and_logged_values_are_those_of_ddp():
    (first, _) = run_ranks(
        parity, 2, functools.partial(Logging, adamw), callbacks=harmless, max_epochs=2, stages=(1, 3)
    )
    assert first["metrics"]["rank"] == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_the_throughput_monitor_knows_the_dtype_of_each_precision(name):
    plugin = dsl.ZeroPrecision(name)
    assert _plugin_to_compute_dtype(plugin) == plugin.dtype


# Construction --------------------------------------------------------------------------------------------------------

WIDE = 48


class Built(Net):
    """Makes its layers in `configure_model`, under a seed."""

    def __init__(self, before: Any = None, after: Any = None, blocks: int = 4) -> None:
        super().__init__(adamw)
        self.blocks = None
        self.embed = None
        self.head = None
        self.count = blocks
        self.before = before
        self.after = after
        self.live: list[int] = []

    def configure_model(self) -> None:
        if self.blocks is not None:
            return
        torch.manual_seed(5)
        self.embed = nn.Linear(common.FEATURES, WIDE)
        self.blocks = nn.ModuleList()
        for _ in range(self.count):
            self.blocks.append(common.Block(WIDE))
            self.live.append(live_numel(self))
        self.head = nn.Linear(WIDE, 1)
        if self.after is not None:
            self.after(self)


def live_numel(module: nn.Module) -> int:
    """Elements in memory, each storage counted once; looking at a parameter would gather it."""
    with torch._C.DisableTorchFunctionSubclass():
        storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() // 4 for p in module.parameters()}
    return sum(storages.values())


def initialize(module: nn.Module) -> None:
    """A user's way of initializing, applied to the whole model at the end."""
    torch.manual_seed(9)

    def visit(child: nn.Module) -> None:
        if isinstance(child, nn.Linear):
            nn.init.normal_(child.weight, std=0.03)
            if child.bias is not None:
                with torch.no_grad():
                    child.bias.fill_(0.01)

    module.apply(visit)


def load(module: nn.Module) -> None:
    """Pretrained weights, loaded where the model is made."""
    torch.manual_seed(21)
    pretrained = nn.ModuleList(common.Block(WIDE) for _ in range(4))
    missing = module.blocks.load_state_dict(pretrained.state_dict())
    assert not missing.missing_keys


AFTER = {"nothing": None, "apply": initialize, "load_state_dict": load}


def built_values(after: str) -> None:
    plain = Built(after=AFTER[after])
    plain.configure_model()
    expected = {name: value.double() for name, value in plain.state_dict().items()}
    trained = common.run(functools.partial(Built, after=AFTER[after]), "ddp", max_epochs=1)["weights"]

    class First(Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            found = weights(pl_module)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)

    for stage in common.STAGES:
        module = Built(after=AFTER[after])
        fit(module, zero(stage), callbacks=[First()])
        assert_same(weights(module), trained, f"stage {stage}")
        if stage == 3:
            largest = sum(p.numel() for p in plain.blocks[0].parameters())
            whole = sum(p.numel() for p in plain.parameters())
            share = whole / 2
            assert module.live[-1] < share + 2 * largest, (module.live, whole, largest)
            assert module.live[-1] - module.live[0] < 3 * largest / 2


@pytest.mark.parametrize("after", AFTER)
def test_a_model_built_in_configure_model_has_the_values_of_one_built_anywhere(after):
    run_ranks(built_values, 2, after)


def peak_of_construction(as_list: bool) -> tuple[int, int]:
    """Most elements of parameters in memory while `configure_model` ran, and the model's."""
    peak = 0

    class Watching(Built):
        def configure_model(self) -> None:
            nonlocal peak
            if self.blocks is not None:
                return
            torch.manual_seed(5)
            self.embed = nn.Linear(common.FEATURES, WIDE)
            if as_list:  # all blocks exist before the first is registered
                blocks = [common.Block(WIDE) for _ in range(self.count)]
                peak = sum(live_numel(block) for block in blocks)
                self.blocks = nn.Sequential(*blocks)
            else:
                self.blocks = nn.ModuleList()
                for _ in range(self.count):
                    self.blocks.append(common.Block(WIDE))
                    peak = max(peak, live_numel(self))
            self.head = nn.Linear(WIDE, 1)
            initialize(self)
            peak = max(peak, live_numel(self))

    module = Watching(blocks=8)
    fit(module, zero(3), max_steps=1)
    return peak, sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("as_list", [False, True])
def test_no_rank_holds_the_model_whole_while_it_is_built(as_list):
    for peak, whole in run_ranks(peak_of_construction, 2, as_list):
        assert peak < whole / 2, (peak, whole)


def built_and_used_again() -> None:
    module = Built()
    strategy = zero(3)
    trainer = fit(module, strategy, max_epochs=1)
    first = weights(module)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data())
    assert_moved(module, first, ["embed.weight"])
    trainer.validate(module, data(8, 2), verbose=False)
    other = make_trainer(zero(2))
    other.validate(module, data(8, 2), verbose=False)


def test_a_model_that_was_built_sharded_is_trained_again_and_validated():
    run_ranks(built_and_used_again, 2)


def touched_too_early() -> str:
    class Early(Built):
        def on_fit_start(self) -> None:
            """Nothing: by now the model is set up."""

        def setup(self, stage: str) -> None:
            self.configured = False

    class Peek(Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            float(pl_module.blocks[0].up.weight.sum())

    try:
        fit(Early(), zero(3), callbacks=[Peek()])
    except dsl.errors.ReleasedParameterError as error:
        return str(error)
    return "nothing"


def test_values_that_are_touched_outside_a_step_are_an_error_that_names_them():
    (said, _) = run_ranks(touched_too_early, 2)
    assert "blocks.0.up.weight" in said
    assert "ds_lightning.gathered" in said
