"""Manual optimization: several optimizers, several backwards, and users who do everything themselves."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_lightning as dsl
from tests.lightning import common
from tests.lightning.common import Net, adamw, fit, parity, zero
from tests.pool import run_ranks

UNUSED = "ddp_find_unused_parameters_true"


class Manual(Net):
    """Optimizes by hand; the ways of doing so are its subclasses."""

    def __init__(self, optimize: Any = adamw) -> None:
        super().__init__(optimize)
        self.automatic_optimization = False


class ManualBackward(Manual):
    """As the manual says."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class PlainBackward(Manual):
    """Calls `backward` on the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.loss(batch).backward()
        optimizer.step()


class RawOptimizer(Manual):
    """Steps the optimizer that it made, past Lightning."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert type(optimizer) is torch.optim.AdamW
        self.manual_backward(self.loss(batch))
        optimizer.step()
        optimizer.zero_grad()


class TwoSteps(Manual):
    """Two backwards and two steps inside one training step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()


class Accumulated(Manual):
    """Adds up two batches, and two losses of each; clips in its own way."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(0.5 * loss)
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


class ClippedEachTime(Manual):
    """Clips after every backward, so that the norm of what has been clipped is asked for."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="value")
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


class Closure(Manual):
    """Hands the step a closure, as Lightning allows."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


class Scheduled(Manual):
    """Steps its schedule by hand."""

    def __init__(self) -> None:
        super().__init__(scheduled)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.lr_schedulers().step()


def scheduled(module: nn.Module) -> Any:
    optimizer = common.sgd(module)
    return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


class NoBackwardSometimes(Manual):
    """On all ranks alike, some batches are left out."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            return
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


@pytest.mark.parametrize(
    "make",
    [
        ManualBackward,
        RawOptimizer,
        TwoSteps,
        Accumulated,
        ClippedEachTime,
        functools.partial(ClippedEachTime, common.sgd),
        Closure,
        Scheduled,
        NoBackwardSometimes,
    ],
    ids=lambda make: getattr(make, "__name__", "ClippedEachTime with SGD"),
)
def test_manual_optimization_trains_as_under_ddp(make):
    run_ranks(parity, 2, make, max_epochs=2)


def plain_backward() -> None:
    expected = common.run(ManualBackward, "ddp")["weights"]  # under DDP itself a plain backward is not reduced
    for stage in common.STAGES:
        common.assert_same(common.run(PlainBackward, stage)["weights"], expected, f"stage {stage}")


def test_a_plain_backward_is_reduced_as_manual_backward_is():
    run_ranks(plain_backward, 2)


class Discriminator(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(common.FEATURES, 9), nn.LeakyReLU(0.2), nn.Linear(9, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Gan(Manual):
    """A generator and a discriminator with optimizers and schedules of their own."""

    def __init__(self, toggle: bool, clip: bool = False) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, common.FEATURES))
        self.discriminator = Discriminator()
        self.toggle = toggle
        self.clip = clip
        for parameter in (*self.embed.parameters(), *self.blocks.parameters(), *self.head.parameters(), self.gain):
            parameter.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.generator.parameters(), lr=0.02, betas=(0.5, 0.9))
        second = torch.optim.SGD(self.discriminator.parameters(), lr=0.05, momentum=0.5)
        return [first, second], [torch.optim.lr_scheduler.ExponentialLR(second, 0.9)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        real, _ = batch
        noise = real[:, :3].cos()
        if self.toggle:
            self.toggle_optimizer(first)
        judged = self.discriminator(self.generator(noise))
        first.zero_grad()
        self.manual_backward(nn.functional.softplus(-judged).mean())
        if self.clip:
            self.clip_gradients(first, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        if not self.clip:
            first.step()
        if self.toggle:
            self.untoggle_optimizer(first)
            self.toggle_optimizer(second)
        loss = nn.functional.softplus(-self.discriminator(real)) + nn.functional.softplus(
            self.discriminator(self.generator(noise).detach())
        )
        second.zero_grad()
        self.manual_backward(loss.mean())
        if self.clip:
            self.clip_gradients(second, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
            first.step()
        second.step()
        if self.toggle:
            self.untoggle_optimizer(second)
        self.lr_schedulers().step()

    def on_train_batch_end(self, *args: Any) -> None:
        assert all(p.requires_grad for p in (*self.generator.parameters(), *self.discriminator.parameters()))


@pytest.mark.parametrize("toggle", [True, False])
@pytest.mark.parametrize("clip", [True, False])
def test_two_optimizers_take_turns_as_under_ddp(toggle, clip):
    (first, _) = run_ranks(parity, 2, functools.partial(Gan, toggle, clip), reference=UNUSED)
    assert first["steps"] == 10


def test_two_optimizers_in_mixed_precision_stay_with_ddp():
    run_ranks(parity, 2, functools.partial(Gan, True), reference=UNUSED, precision="bf16-mixed", tolerance=5e-3)


class ToggledWithoutSync(Manual):
    """Blocks the synchronization of all but the second of two backwards."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        with optimizer.toggle_model(sync_grad=False):
            self.manual_backward(self.loss(batch))
        with optimizer.toggle_model(sync_grad=True):
            self.manual_backward(0.5 * self.loss(batch))
        optimizer.step()


def test_toggle_model_blocks_synchronization_as_ddp_does():
    run_ranks(parity, 2, ToggledWithoutSync)


def steps_without_gradients() -> None:
    class Early(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.step()
            assert self.trainer.strategy.last_grad_norm in (None, 0.0) or batch_idx
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            first = self.trainer.strategy.last_grad_norm
            optimizer.step()  # the same gradients again, as torch does
            assert self.trainer.strategy.last_grad_norm == first
            optimizer.zero_grad()
            optimizer.step()

    class Expected(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            optimizer.step()
            optimizer.zero_grad()

    expected = common.run(Expected, "ddp")["weights"]
    for stage in common.STAGES:
        common.assert_same(common.run(Early, stage)["weights"], expected, f"stage {stage}")


def test_a_step_without_gradients_does_nothing_and_one_again_steps_again():
    run_ranks(steps_without_gradients, 2)


def loss_of_two_networks() -> None:
    """A backward leaves gradients on parameters of the other optimizer: they stay until its own zero_grad."""

    class Shared(Gan):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            real, _ = batch
            noise = real[:, :3].cos()
            first.zero_grad()
            second.zero_grad()
            self.manual_backward(self.discriminator(self.generator(noise)).square().mean())
            first.step()
            self.manual_backward(self.discriminator(real).sub(1).square().mean())
            second.step()
            if isinstance(self.trainer.strategy, dsl.ZeroStrategy):
                assert dsl.full_grad(self.generator[0].weight) is not None
            first.zero_grad()
            if isinstance(self.trainer.strategy, dsl.ZeroStrategy):
                assert dsl.full_grad(self.generator[0].weight) is None
                assert dsl.full_grad(self.discriminator.layers[0].weight) is not None

    expected = common.run(functools.partial(Shared, False), UNUSED)["weights"]
    for stage in common.STAGES:
        found = common.run(functools.partial(Shared, False), stage)["weights"]
        common.assert_same(found, expected, f"stage {stage}")


def test_gradients_for_another_optimizer_are_kept_until_it_zeroes_them():
    run_ranks(loss_of_two_networks, 2)


def trainer_flags_in_manual_mode() -> str:
    try:
        fit(ManualBackward(), zero(2, {"gradient_clipping": 0.5}))
    except dsl.errors.ConfigError as error:
        return str(error)
    return "nothing"


def test_clipping_of_the_configuration_is_refused_in_manual_mode():
    (said,) = run_ranks(trainer_flags_in_manual_mode, 1)
    assert "gradient_clipping=0.5" in said
    assert "self.clip_gradients" in said
