"""Replaces "auto" by what the Trainer and the model say, by the conventions of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ds_lightning.config.facts import Facts
from ds_lightning.config.problems import Problem
from ds_lightning.config.schema import DeepSpeedConfig

ELSEWHERE = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "fp16.enabled",
        "bf16.enabled",
        "zero_optimization.stage",
    }
)
"""Keys that `resolve` reconciles with the Trainer, whether they are "auto" or not."""


class Rule(NamedTuple):
    """Where the value of a key comes from.

    Attributes:
        origin: The place, for messages.
        value: The value, or None when the facts do not tell.
        has_default: Without a fact the key falls back to its own default instead of being an error.
    """

    origin: str
    value: Callable[[Facts, DeepSpeedConfig], Any]
    has_default: bool


class Filled(NamedTuple):
    """What to tell the user about the keys that were filled."""

    problems: list[Problem]
    notes: list[str]


def fill(config: DeepSpeedConfig, autos: Iterable[str], facts: Facts) -> Filled:
    """Replace every "auto" in `config`, the caller's own copy, but those of `ELSEWHERE`."""
    filled = Filled([], [])
    # The optimizer's values are filled before the schedule's, which refer to them.
    for key in sorted(set(autos) - ELSEWHERE):
        rule = RULES.get(key, _NO_RULE)
        value = rule.value(facts, config)
        if value is not None:
            _put(config, key, value)
        elif key.startswith(_unused(facts)):
            _drop(config, key)
        elif rule.has_default and not (rule is _NO_RULE and ".params." in key):
            _drop(config, key)
            filled.notes.append(f"{key} is 'auto' and its default is used: {rule.origin} does not tell")
        else:
            _drop(config, key)
            filled.problems.append(Problem(key, f"'auto' cannot be resolved: {rule.origin} does not tell; set it"))
    return filled


def origin_of(key: str) -> str:
    """Where the value of an automatic key comes from, for the report."""
    return _ELSEWHERE_ORIGINS.get(key) or RULES.get(key, _NO_RULE).origin


def _optimizer_default(name: str) -> Callable[[Facts, DeepSpeedConfig], Any]:
    def value(facts: Facts, config: DeepSpeedConfig) -> Any:
        found = (facts.optimizer_defaults or {}).get(name)
        return list(found) if isinstance(found, tuple) else found

    return value


def _unused(facts: Facts) -> tuple[str, ...]:
    """Blocks of which nothing is made in this run, so that their values need not be known."""
    if not facts.trains:
        return ("optimizer.", "scheduler.")
    return ("scheduler.",) if facts.has_schedule else ()


def _learning_rate(facts: Facts, config: DeepSpeedConfig) -> Any:
    if facts.group_rates is not None:
        return list(facts.group_rates)
    lr = config.optimizer.params.get("lr")
    return lr if isinstance(lr, float) else (facts.optimizer_defaults or {}).get("lr")


def _of_hidden(size: Callable[[int], float]) -> Callable[[Facts, DeepSpeedConfig], Any]:
    return lambda facts, config: None if facts.hidden_size is None else max(1, int(size(facts.hidden_size)))


_HIDDEN = "the hidden size of the model (model.config.hidden_size)"
_OPTIMIZER = "the module (its optimizer's defaults, or hparams.{})"
_NO_RULE = Rule("nothing in the Trainer or the model", lambda facts, config: None, True)
RULES = {
    "optimizer.params.lr": Rule(_OPTIMIZER.format("lr"), _optimizer_default("lr"), False),
    **{
        f"optimizer.params.{name}": Rule(_OPTIMIZER.format(name), _optimizer_default(name), True)
        for name in ("betas", "eps", "weight_decay")
    },
    "scheduler.params.warmup_min_lr": Rule("the schedule", lambda facts, config: 0.0, False),
    "scheduler.params.warmup_max_lr": Rule(
        "optimizer.params.lr or the module (its optimizer's lr)", _learning_rate, False
    ),
    "scheduler.params.warmup_num_steps": Rule(
        "the module (hparams.warmup_steps)", lambda facts, config: facts.warmup_steps, True
    ),
    "scheduler.params.total_num_steps": Rule(
        "the Trainer (max_steps, or max_epochs and the dataloader)",
        lambda facts, config: facts.max_steps,
        False,
    ),
    "zero_optimization.reduce_bucket_size": Rule(_HIDDEN, _of_hidden(lambda width: width * width), True),
    "zero_optimization.stage3_prefetch_bucket_size": Rule(_HIDDEN, _of_hidden(lambda width: 0.9 * width * width), True),
    "zero_optimization.stage3_param_persistence_threshold": Rule(_HIDDEN, _of_hidden(lambda width: 10 * width), True),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": Rule("", lambda facts, config: False, True),
}
_ELSEWHERE_ORIGINS = {
    "train_batch_size": "micro-batch x accumulation x world size",
    "train_micro_batch_size_per_gpu": "the training dataloader",
    "gradient_accumulation_steps": "Trainer(accumulate_grad_batches=...)",
    "gradient_clipping": "Trainer(gradient_clip_val=...)",
    "fp16.enabled": "Trainer(precision=...)",
    "bf16.enabled": "Trainer(precision=...)",
    "zero_optimization.stage": "ZeroStrategy(stage=...)",
}


def _put(config: DeepSpeedConfig, key: str, value: Any) -> None:
    block, name = _owner(config, key)
    if isinstance(block, dict):
        block[name] = value
    else:
        setattr(block, name, value)


def _drop(config: DeepSpeedConfig, key: str) -> None:
    """Leave the key to its default: typed keys hold it already, free ones are left out."""
    block, name = _owner(config, key)
    if isinstance(block, dict):
        block.pop(name, None)


def _owner(config: DeepSpeedConfig, key: str) -> tuple[Any, str]:
    *blocks, name = key.split(".")
    owner: Any = config
    for block in blocks:
        owner = owner[block] if isinstance(owner, dict) else getattr(owner, block)
    return owner, name
