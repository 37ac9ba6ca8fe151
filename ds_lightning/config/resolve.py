"""Reconciles a parsed configuration with the run: one frozen object without any "auto"."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from ds_lightning.config import auto, batch, checks
from ds_lightning.config.deepspeed import ParsedConfig
from ds_lightning.config.facts import Facts
from ds_lightning.config.free import Entry
from ds_lightning.config.inert import inert_reason
from ds_lightning.config.problems import Problem, raise_all
from ds_lightning.config.schema import DeepSpeedConfig
from ds_lightning.config.schema.base import plain

DEFAULT_STAGE = 2
_UNKNOWN = Facts()


@dataclass
class ResolvedConfig(DeepSpeedConfig):
    """The configuration of a run, read-only. Attributes are the ds_config keys, blocks included.

    Attributes:
        precision: Lightning's name of the precision to train in.
        gradient_clip_algorithm: "norm" or "value".
        given: Dotted keys the user set to a value.
        notes: Sentences for the user, to be printed once on rank 0.
        source: Where the configuration was read.
    """

    precision: str = "32-true"
    gradient_clip_algorithm: str = "norm"
    given: frozenset[str] = frozenset()
    notes: list[str] = field(default_factory=list)
    source: str = "no configuration"

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return self.zero_optimization.stage

    def to_dict(self) -> dict[str, Any]:
        """The ds_config keys only, as plain JSON; loading it again gives the same configuration."""
        return {item.name: plain(getattr(self, item.name)) for item in fields(DeepSpeedConfig)}


class Outcome(NamedTuple):
    """A resolution with its problems, for those who want to show all of it instead of raising."""

    resolved: ResolvedConfig
    problems: list[Problem]


def resolve(parsed: ParsedConfig, facts: Facts = _UNKNOWN) -> ResolvedConfig:
    """Settle everything that depends on the run.

    Raises:
        ConfigError: All conflicts, unresolved "auto"s and unsupported features at once.
    """
    resolved, problems = try_resolve(parsed, facts)
    raise_all([*(Problem(*item) for item in parsed.unsupported), *problems], parsed.source)
    return resolved


def try_resolve(parsed: ParsedConfig, facts: Facts = _UNKNOWN) -> Outcome:
    """Settle what can be settled and collect the problems instead of raising them."""
    return _Resolution(parsed, facts).run()


class _Resolution:
    """One resolution. Owns a private copy of the schema and fills it in."""

    def __init__(self, parsed: ParsedConfig, facts: Facts) -> None:
        self.parsed = parsed
        self.facts = facts
        self.config = copy.deepcopy(parsed.config)
        self.problems: list[Problem] = []
        self.notes: list[str] = []

    def run(self) -> Outcome:
        self._stage()
        precision = self._precision()
        self._batch()
        algorithm = self._clipping()
        self._autos()
        self.notes += _notes_of(self.parsed, self.config)
        values = {item.name: getattr(self.config, item.name) for item in fields(self.config)}
        resolved = ResolvedConfig(
            **values,
            precision=precision,
            gradient_clip_algorithm=algorithm,
            given=self.parsed.given,
            notes=self.notes,
            source=self.parsed.source,
        )
        return Outcome(resolved.frozen(), self.problems)

    def _fail(self, key: str, text: str) -> None:
        self.problems.append(Problem(key, text))

    def _stage(self) -> None:
        asked, stated = self.facts.stage, self.parsed.stage
        zero = self.config.zero_optimization
        if asked is not None and not (type(asked) is int and 0 <= asked <= 3):
            self._fail("ZeroStrategy(stage=...)", f"expected 0, 1, 2 or 3, got {asked!r}")
            return
        if asked is not None and stated is not None and asked != stated:
            here = f"ZeroStrategy(stage={asked})"
            text = f"the configuration says {stated}, {here} says {asked}; drop one of the two"
            self._fail("zero_optimization.stage", text)
        elif stated is None:
            zero.stage = self._unstated_stage() if asked is None else asked
            self.problems += checks.check_stage(self.config, zero.stage)
        if zero.overlap_comm is None:
            zero.overlap_comm = zero.stage == 3

    def _unstated_stage(self) -> int:
        if self.parsed.is_absent:
            return DEFAULT_STAGE
        if "zero_optimization.stage" in self.parsed.autos:
            self.notes.append(f"zero_optimization.stage is 'auto': stage {DEFAULT_STAGE} is used")
            return DEFAULT_STAGE
        if "zero_optimization" in self.parsed.given:
            self.notes.append("zero_optimization has no stage: stage 0 is used, which shards nothing")
        return 0

    def _precision(self) -> str:
        asked, stated = self.parsed.precision(), self.facts.precision_name
        final = asked or stated or "32-true"
        if stated is not None and not self.facts.precision_is_default:
            self._compare_precision(asked, stated)
            final = stated
        if not (self.config.amp.enabled or self.config.torch_autocast.enabled):
            for name, block in (("16-mixed", self.config.fp16), ("bf16-mixed", self.config.bf16)):
                block.enabled = block.enabled or final == name
        return final

    def _compare_precision(self, asked: str | None, stated: str) -> None:
        """The configuration and an explicit Trainer precision must agree."""
        low = {
            "16-mixed": "fp16",
            "16-true": "fp16",
            "bf16-mixed": "bf16",
            "bf16-true": "bf16",
        }.get(stated)
        wanted = self.parsed.asked_precision()
        if wanted is not None and stated != asked:
            self._fail(
                f"{wanted.block}.enabled",
                f"the configuration asks for {asked}, the Trainer for precision='{stated}'; "
                f"use Trainer(precision='{asked}') or set {wanted.block}.enabled to false",
            )
        elif wanted is None and low is not None and f"{low}.enabled" in self.parsed.given:
            self._fail(
                f"{low}.enabled",
                f"the configuration says false, the Trainer says precision='{stated}'; "
                f"set {low}.enabled to true or 'auto', or change the Trainer's precision",
            )

    def _batch(self) -> None:
        config = self.config
        given = batch.Triangle(
            config.train_batch_size,
            config.train_micro_batch_size_per_gpu,
            config.gradient_accumulation_steps,
        )
        triangle, problems, notes = batch.solve(given, self.facts)
        self.problems += problems
        self.notes += notes
        config.train_batch_size, config.train_micro_batch_size_per_gpu = (
            triangle.total,
            triangle.micro,
        )
        config.gradient_accumulation_steps = triangle.steps

    def _clipping(self) -> str:
        """Settle `gradient_clipping`, and return the algorithm."""
        facts, stated = self.facts, self.config.gradient_clipping
        algorithm = str(facts.gradient_clip_algorithm or "norm")
        trainer = None if facts.clip_is_default and not facts.gradient_clip_val else facts.gradient_clip_val
        if stated is None:
            self.config.gradient_clipping = None if trainer is None else float(trainer)
            if trainer is None and self.parsed.given and "gradient_clipping" not in self.parsed.autos:
                self.notes.append(
                    "gradient_clipping is not given and neither is Trainer(gradient_clip_val=...): gradients are not "
                    "clipped, where DeepSpeed clips their norm to 1.0 by default; set it to 0 to say so"
                )
            return algorithm
        if algorithm != "norm":
            self._fail(
                "gradient_clipping",
                f"clips by norm, Trainer(gradient_clip_algorithm='{algorithm}') by {algorithm}; keep one of them",
            )
        elif trainer is not None and not facts.clip_is_default and float(trainer) != stated:
            self._fail(
                "gradient_clipping",
                f"the configuration says {stated}, "
                f"Trainer(gradient_clip_val={trainer}) says {trainer}; "
                f"use Trainer(gradient_clip_val={stated}) or set gradient_clipping to {trainer}",
            )
        return algorithm

    def _autos(self) -> None:
        problems, notes = auto.fill(self.config, self.parsed.autos, self.facts)
        self.problems += problems
        self.notes += notes
        if self.facts.has_optimizer and self.config.optimizer.type is not None:
            self.notes.append("the module brings its own optimizer; the one of the configuration is not used")
        if self.facts.has_schedule and self.config.scheduler.type is not None:
            self.notes.append("the module brings its own schedule; the one of the configuration is not used")


def _notes_of(parsed: ParsedConfig, config: DeepSpeedConfig) -> Iterator[str]:
    """What the report has to say, in few sentences."""
    inert: dict[str, list[str]] = {}
    for entry in parsed.report:
        if entry.status == "renamed":
            yield f"{entry.key}: {entry.remark}"
        elif entry.status == "ignored":
            yield f"{entry.key} is ignored: {entry.remark}"
        elif reason := _inert(entry, parsed, config):
            inert.setdefault(reason, []).append(entry.key)
        elif entry.remark.startswith("the string"):
            yield f"{entry.key}: {entry.remark}"
    for reason, keys in inert.items():
        yield f"{reason}: {', '.join(keys)}"
    if config.torch_autocast.enabled and config.zero_optimization.stage == 3:
        yield (
            "torch_autocast at stage 3: parameters are gathered in fp32, and the 16-bit copies that autocast makes of "
            "them live until backward; bf16.enabled computes with the same 16-bit weights, and gathers and frees those"
        )
    optimizer, param = config.zero_optimization.offload_optimizer.device, config.zero_optimization.offload_param.device
    if param != "none" and optimizer != "nvme" and (param, optimizer) != ("cpu", "cpu"):
        where = "on the device" if optimizer == "none" else "in host memory"
        yield (
            f"zero_optimization.offload_param.device={param} moves frozen parameters alone: trained ones have "
            f"no shards besides their master weights, which offload_optimizer.device={optimizer} keeps {where}"
        )


def _inert(entry: Entry, parsed: ParsedConfig, config: DeepSpeedConfig) -> str | None:
    if entry.status == "inert":
        return f"without effect ({entry.remark})"
    return inert_reason(entry.name, config, config.zero_optimization.stage, parsed.autos)
