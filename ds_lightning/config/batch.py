"""The batch-size triangle: total = micro-batch x accumulation x world size."""

from __future__ import annotations

from typing import NamedTuple

from ds_lightning.config.facts import Facts
from ds_lightning.config.problems import Problem

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


class Triangle(NamedTuple):
    """The three numbers as far as they are known."""

    total: int | None
    micro: int | None
    steps: int | None


class Solution(NamedTuple):
    """The completed triangle, with what to tell the user."""

    triangle: Triangle
    problems: list[Problem]
    notes: list[str]


class _NoFitError(ValueError):
    """The numbers do not fit; the key and the text for the user."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


def solve(given: Triangle, facts: Facts) -> Solution:
    """Complete the numbers as DeepSpeed does but without truncation, and compare with the run."""
    notes: list[str] = []
    try:
        triangle = _derived(given, facts, notes)
    except _NoFitError as error:
        return Solution(given, [Problem(error.key, str(error))], notes)
    problems = [*_against_trainer(triangle, given, facts), *_against_loader(triangle, given, facts)]
    if given != Triangle(None, None, None) and facts.micro_batch_size is None:
        notes.append("the dataloader's batch size is unknown and was not compared with the configuration")
    if facts.accumulate_is_default and given.steps and given.steps != (facts.accumulate_grad_batches or 1):
        notes.append(f"{STEPS}={given.steps} of the configuration is used: the Trainer leaves it open")
    return Solution(triangle, problems, notes)


def _derived(given: Triangle, facts: Facts, notes: list[str]) -> Triangle:
    if facts.world_size is None:
        if given.total is not None:
            notes.append(f"the world size is not known, so {TOTAL} was not checked")
        return _without_world_size(given, facts)
    total, micro, steps = given
    world = facts.world_size
    if total is None:
        steps = steps or facts.accumulate_grad_batches or 1
        micro = micro or facts.micro_batch_size
        return Triangle(micro and micro * steps * world, micro, steps)
    if micro is None and steps is None:
        micro, steps = _shares_of_total(facts)
    if micro is None:
        assert steps is not None
        return Triangle(total, _split(total, f"{STEPS} {steps}", steps, world, MICRO), steps)
    if steps is None:
        return Triangle(total, micro, _split(total, f"{MICRO} {micro}", micro, world, STEPS))
    if total != micro * steps * world:
        product = micro * steps * world
        raise _NoFitError(
            TOTAL,
            f"{total} is not {MICRO} {micro} x {STEPS} {steps} x world size {world} = {product}; "
            f"set {TOTAL} to {product} or drop one of the three",
        )
    return given


def _shares_of_total(facts: Facts) -> tuple[int | None, int | None]:
    """Micro-batch and accumulation when only the total is given: the run's, else 1 backward."""
    if facts.accumulate_grad_batches is not None and not facts.accumulate_is_default:
        return None, facts.accumulate_grad_batches
    if facts.micro_batch_size is not None:
        return facts.micro_batch_size, None
    return None, 1


def _split(total: int, divisor: str, by: int, world: int, wanted: str) -> int:
    share, rest = divmod(total, by * world)
    if rest or not share:
        near = max(1, round(total / (by * world))) * by * world
        raise _NoFitError(
            TOTAL,
            f"{total} cannot be divided by {divisor} x world size {world} = {by * world}: "
            f"{wanted} would be {total / (by * world):.4g}; set {TOTAL} to {near}, for example",
        )
    return share


def _without_world_size(given: Triangle, facts: Facts) -> Triangle:
    total, micro, steps = given
    if total is not None and micro is not None and total % (micro * (steps or 1)):
        raise _NoFitError(
            TOTAL,
            f"{total} is not {MICRO} {micro} x {STEPS} {steps or 1} x any world size; change one of the three",
        )
    if total is not None and micro is None and steps is not None and total % steps:
        raise _NoFitError(TOTAL, f"{total} cannot be divided by {STEPS} {steps}; change one of the two")
    if total is None:
        return Triangle(None, micro or facts.micro_batch_size, steps or facts.accumulate_grad_batches)
    return Triangle(total, micro, steps)


def _against_trainer(triangle: Triangle, given: Triangle, facts: Facts) -> list[Problem]:
    trainer, wanted = facts.accumulate_grad_batches, triangle.steps
    if trainer is None or wanted is None or facts.accumulate_is_default or trainer == wanted:
        return []
    origin = "" if given.steps else f" (from {TOTAL} {given.total} / {MICRO} {triangle.micro} / world size)"
    return [
        Problem(
            STEPS,
            f"the configuration says {wanted}{origin}, "
            f"Trainer(accumulate_grad_batches={trainer}) says {trainer}; "
            f"use Trainer(accumulate_grad_batches={wanted}) or set {STEPS} to {trainer}",
        )
    ]


def _against_loader(triangle: Triangle, given: Triangle, facts: Facts) -> list[Problem]:
    loader, wanted = facts.micro_batch_size, triangle.micro
    if loader is None or wanted is None or loader == wanted:
        return []
    numbers = (
        "" if given.micro else f" (from {TOTAL} {given.total} / {STEPS} {triangle.steps} / {facts.world_size} ranks)"
    )
    return [
        Problem(
            MICRO,
            f"the configuration says {wanted}{numbers}, "
            f"the training dataloader has batch_size={loader}; "
            f"use DataLoader(batch_size={wanted}) or set {MICRO} to {loader}",
        )
    ]
