"""The whole config of a run; the keys of its sections are in `training.py` and `running.py`."""

from typing import Literal

from pydantic import ConfigDict, Field

from trainkit.config.running import (
    CheckpointConfig,
    LaunchConfig,
    LoggingConfig,
    NotifyConfig,
    ParallelConfig,
    ProfilerConfig,
    RequeueConfig,
    ResourcesConfig,
)
from trainkit.config.section import NotNegative, Section, section
from trainkit.config.training import (
    TRANSFORMERS,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    ScheduleConfig,
    TrainConfig,
)
from trainkit.formats import JsonObject

CONFIG_VERSION: Literal[1] = 1
MULTIMODAL = "multimodal_lm"
EXTENDS_SCHEMA = {
    "description": "Files merged before this one, in order; relative to this file or shipped with trainkit.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}


def _allow_extends(schema: JsonObject) -> None:
    schema["properties"] = {"extends": EXTENDS_SCHEMA, **schema["properties"]}


class RunConfig(Section):
    """The config of a run; every key has a default."""

    model_config = ConfigDict(title="trainkit run config", json_schema_extra=_allow_extends)

    config_version: Literal[1] = Field(default=CONFIG_VERSION, description="Version of the config format.")
    name: str = Field(
        default="run",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="Name of the run and of its folder.",
        json_schema_extra={"allowed": "a name of at most 100 letters, digits, dots, dashes and underscores"},
    )
    seed: NotNegative = Field(
        default=0, lt=2**63, description="Random seed for weights, data order and dropout."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Device to train on; auto: CUDA if there is a GPU, else the CPU."
    )
    task: str = Field(
        default="causal_lm",
        pattern=r"^(causal_lm|multimodal_lm|[^:]+\.py:[A-Za-z_]\w*|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$",
        description="causal_lm, multimodal_lm, or FILE.py:CLASS or MODULE:CLASS for your subclass of"
        " trainkit.task.Task.",
        json_schema_extra={"allowed": "causal_lm, multimodal_lm, FILE.py:CLASS or MODULE:CLASS"},
    )
    task_args: JsonObject = Field(
        default={}, description="Keyword arguments of multimodal_lm or of your own task."
    )
    model: ModelConfig = section("The model.")
    data: DataConfig = section("Training and validation data.")
    train: TrainConfig = section("Length of the run and batch sizes.")
    optimizer: OptimizerConfig = section("Optimizer and learning rate.")
    schedule: ScheduleConfig = section("Learning rate schedule.")
    precision: PrecisionConfig = section("Numeric precision.")
    parallel: ParallelConfig = section("Parallel layout.")
    checkpoint: CheckpointConfig = section("When checkpoints are saved.")
    resources: ResourcesConfig = section("Resources that the run requests.")
    launch: LaunchConfig = section("How processes are started.")
    requeue: RequeueConfig = section("When the run restarts automatically.")
    logging: LoggingConfig = section("Where metrics are logged.")
    notify: NotifyConfig = section("Messages about the run, to a webhook and by email.")
    profiler: ProfilerConfig = section("Steps to profile.")

    @property
    def has_user_task(self) -> bool:
        """Whether a `trainkit.task.Task` has the model and the data, such as the user's own."""
        return self.task != "causal_lm"

    @property
    def model_source(self) -> tuple[str, str]:
        """The key that says where the code of the model is, and its value."""
        return ("task", self.task) if self.has_user_task else ("model.architecture", self.model.architecture)

    @property
    def has_decoder(self) -> bool:
        """Whether the model is built from trainkit's own classes, on tokens that `data` names."""
        return self.model_source[0] == "model.architecture" and not self.uses_transformers

    @property
    def secrets(self) -> tuple[str, ...]:
        """The environment variables whose values must be written nowhere."""
        webhook = self.notify.webhook
        return self.launch.secrets if webhook is None else (*self.launch.secrets, webhook)

    @property
    def uses_transformers(self) -> bool:
        """Whether the transformers library has the code of the model."""
        return self.model_source == ("model.architecture", TRANSFORMERS)
