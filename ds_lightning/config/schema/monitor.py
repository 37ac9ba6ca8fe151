"""What is measured and where it is written."""

# ruff: noqa: RUF009 - `key` makes a dataclass field

from __future__ import annotations

from dataclasses import dataclass

from ds_lightning.config.schema.base import Block, key

_JOB = "DeepSpeedJobName"


@dataclass
class TensorBoardConfig(Block):
    """TensorBoard files."""

    enabled: bool = key(False, "Turn it on.")
    output_path: str = key("", "Directory.")
    job_name: str = key(_JOB, "Name of the run.")


@dataclass
class CsvMonitorConfig(Block):
    """One CSV file per metric."""

    enabled: bool = key(False, "Turn it on.")
    output_path: str = key("", "Directory.")
    job_name: str = key(_JOB, "Name of the run.")


@dataclass
class WandbConfig(Block):
    """Weights & Biases."""

    enabled: bool = key(False, "Turn it on.")
    group: str | None = key(None, "Group.")
    team: str | None = key(None, "Team.")
    project: str = key("deepspeed", "Project.")


@dataclass
class CometConfig(Block):
    """Comet."""

    enabled: bool = key(False, "Turn it on.")
    samples_log_interval: int = key(100, "Samples between logs.", at_least=1)
    project: str | None = key(None, "Project.")
    workspace: str | None = key(None, "Workspace.")
    api_key: str | None = key(None, "Key of the API.")
    experiment_name: str | None = key(None, "Name.")
    experiment_key: str | None = key(None, "Key of an experiment to continue.")
    online: bool | None = key(None, "Send while running.")
    mode: str | None = key(None, "get, create or get_or_create.")


@dataclass
class CommsLoggerConfig(Block):
    """Times of collectives."""

    enabled: bool = key(False, "Turn it on.")
    verbose: bool = key(False, "Print each call.")
    prof_all: bool = key(True, "Time all operations.")
    prof_ops: list[str] = key(list, "Operations to time.")
    debug: bool = key(False, "Name the caller.")


@dataclass
class ThroughputTimerConfig(Block):
    """The throughput timer."""

    enabled: bool = key(True, "Measure.", status="inert", remark="use Lightning's ThroughputMonitor")
    synchronized: bool = key(
        True, "Synchronize the device.", status="inert", remark="use Lightning's ThroughputMonitor"
    )


@dataclass
class TimersConfig(Block):
    """Timers."""

    throughput: ThroughputTimerConfig = key(ThroughputTimerConfig, "Throughput.")


@dataclass
class FlopsProfilerConfig(Block):
    """Operations, parameters and time per module."""

    enabled: bool = key(False, "Turn it on.")
    profile_step: int = key(1, "The step to profile.", at_least=0)
    module_depth: int = key(-1, "Depth of the report; -1 is the deepest.", at_least=-1)
    top_modules: int = key(1, "Modules listed per depth.", at_least=1)
    detailed: bool = key(True, "The whole tree.")
    output_file: str | None = key(None, "Where to write; null prints.")
    recompute_fwd_factor: float = key(0.0, "Extra forwards in backward.", at_least=0)
