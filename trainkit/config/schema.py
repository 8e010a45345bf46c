"""The whole config of a run."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from trainkit.config.running import (
    CheckpointConfig,
    LaunchConfig,
    LoggingConfig,
    ParallelConfig,
    ProfilerConfig,
    RequeueConfig,
    ResourcesConfig,
)
from trainkit.config.section import NotNegative, Section, section
from trainkit.config.training import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    ScheduleConfig,
    TrainConfig,
)

CONFIG_VERSION: Literal[1] = 1
EXTENDS_SCHEMA = {
    "description": "Files merged before this one, in order: next to this file, or shipped with trainkit.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}


def _allow_extends(schema: dict[str, Any]) -> None:
    schema["properties"] = {"extends": EXTENDS_SCHEMA, **schema["properties"]}


class RunConfig(Section):
    """What a user asks for; everything has a default."""

    model_config = ConfigDict(title="trainkit run config", json_schema_extra=_allow_extends)

    config_version: Literal[1] = Field(
        default=CONFIG_VERSION, description="Version of the format of this file."
    )
    name: str = Field(
        default="run",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="Name of the run and of its folder.",
        json_schema_extra={"allowed": "a name of at most 100 letters, digits, dots, dashes and underscores"},
    )
    seed: NotNegative = Field(
        default=0, lt=2**63, description="Seed of all randomness: weights, order, dropout."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="What to compute on; auto is CUDA where there is a GPU, else the CPU."
    )
    task: str = Field(default="causal_lm", description="What is learned.")
    model: ModelConfig = section("The network.")
    data: DataConfig = section("Text for training and validation.")
    train: TrainConfig = section("Length of the run and size of a step.")
    optimizer: OptimizerConfig = section("Optimizer and learning rate.")
    schedule: ScheduleConfig = section("Learning rate over the steps.")
    precision: PrecisionConfig = section("Number formats.")
    parallel: ParallelConfig = section("How processes share the work.")
    checkpoint: CheckpointConfig = section("When the state is saved.")
    resources: ResourcesConfig = section("What the run asks of the cluster.")
    launch: LaunchConfig = section("How processes are started.")
    requeue: RequeueConfig = section("When the run starts again by itself.")
    logging: LoggingConfig = section("Where metrics go.")
    profiler: ProfilerConfig = section("A recorded window of steps.")
