"""Config sections for where and how a run executes: layout, checkpoints, resources, launch, requeue."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from trainkit.config.section import AtLeastOne, NotNegative, Positive, Section, list_field

PipelineSchedule = Literal[
    "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipe_v"
]
DataParallelDegree = Literal[-1] | AtLeastOne
OneLine = Annotated[
    str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", json_schema_extra={"allowed": "one line of text"})
]


def node_counts(nodes: int | str) -> Sequence[int]:
    """The numbers of nodes that a value of `resources.nodes` allows, the fewest first; none of 4-2."""
    first, dash, last = str(nodes).partition("-")
    return range(int(first), int(last) + 1) if dash else sorted(set(map(int, first.split(","))))


def _several(nodes: str) -> str:
    if len(node_counts(nodes)) < 2:
        raise ValueError("no range")  # what is allowed is said instead
    return nodes


NodeRange = Annotated[
    str, Field(pattern=r"^[1-9]\d{0,6}(-[1-9]\d{0,6}|(,[1-9]\d{0,6})+)$"), AfterValidator(_several)
]
"""As Slurm writes it: a range, or a list."""
Names = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[a-z0-9_.-]+$")], ...],
    BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value),
]
"""As a YAML list, or as Slurm's options write it: a,b."""
OptionName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
MetricName = Annotated[str, Field(min_length=1)]
SLURM_TIME = r"^(\d+-\d{1,2}(:\d{1,2}){0,2}|\d+(:\d{1,2}){0,2})$"
SlurmTime = Annotated[
    str, Field(pattern=SLURM_TIME, json_schema_extra={"allowed": 'a time such as "01:00:00" or "2-12:00:00"'})
]


class ParallelConfig(Section):
    """Parallel layout; the product of the degrees is the number of processes."""

    dp_replicate: DataParallelDegree = Field(
        default=1, description="Number of model replicas; -1 derives it from the number of processes."
    )
    dp_shard: DataParallelDegree = Field(
        default=-1,
        description="Processes to shard each replica over; -1 derives it from the number of processes.",
    )
    tp: AtLeastOne = Field(default=1, description="Tensor-parallel degree.")
    pp: AtLeastOne = Field(default=1, description="Pipeline stages.")
    cp: AtLeastOne = Field(default=1, description="Context-parallel degree.")
    sequence_parallel: bool = Field(
        default=True, description="With tp > 1: shard norms and the residual stream along the sequence."
    )
    loss_parallel: bool = Field(default=True, description="With tp > 1: shard the loss over the vocabulary.")
    zero: Literal[2, 3] = Field(
        default=3,
        description="ZeRO stage of dp_shard: 3 reshards parameters after the forward pass; 2 keeps them"
        " gathered until the backward pass.",
    )
    pp_schedule: PipelineSchedule = Field(default="1f1b", description="Pipeline schedule.")
    pp_microbatches: AtLeastOne = Field(
        default=4,
        description="With pp > 1: microbatches per device batch; adapted to the batch size unless set.",
    )
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        default="none",
        description="Which activations to recompute in the backward pass instead of keeping them.",
    )
    compile: bool | None = Field(
        default=None,
        description="Compile each decoder block and the loss with torch.compile; null compiles on GPUs.",
    )
    offload: bool = Field(default=False, description="Keep parameters and optimizer state in CPU memory.")
    mesh_of_one: bool = Field(
        default=False,
        description="On one process: build process groups and shard over them, as several processes do.",
    )

    @property
    def wraps_one(self) -> bool:
        """Whether a single process has a mesh, on which `fully_shard` wraps the model: it also offloads."""
        return self.mesh_of_one or self.offload


class CheckpointConfig(Section):
    """When checkpoints are saved and how many are kept."""

    every_steps: AtLeastOne | None = Field(
        default=100, description="Steps between checkpoints; null to not save by steps."
    )
    every_minutes: Positive | None = Field(
        default=None, description="Minutes between checkpoints; null to not save by time."
    )
    keep_last: AtLeastOne = Field(default=3, description="Latest checkpoints to keep, besides the best one.")
    best_metric: MetricName | None = Field(
        default="val_loss",
        description="Metric that chooses the best checkpoint: val_loss, loss, or one of your own task, "
        "with val_ in front for its value in the validation; null keeps no best one. Without val_, it is "
        "that of the checkpoint's step.",
        json_schema_extra={"allowed": "the name of a metric, or null"},
    )
    best_mode: Literal["min", "max"] = Field(
        default="min", description="Whether the lowest or the highest value of best_metric is the best."
    )
    async_save: bool = Field(default=True, alias="async", description="Save checkpoints in the background.")


class ResourcesConfig(Section):
    """Resources that the run requests; keys for Slurm have no effect without it."""

    nodes: AtLeastOne | NodeRange = Field(
        default=1,
        description="Number of nodes; of a range such as 2-8 or a list such as 2,4,8, as many as Slurm has.",
        json_schema_extra={
            "allowed": "a whole number of at least 1, a range such as 2-8, or a list such as 2,4,8"
        },
    )
    grow: bool = Field(
        default=False,
        description="With a range of nodes: save and requeue for more nodes when Slurm has them free and "
        "that saves time.",
    )
    gpus_per_node: AtLeastOne | Literal["auto"] = Field(
        default="auto",
        description="Training processes per node: one per GPU, or CPU workers on nodes without GPUs.",
    )
    cpus_per_gpu: AtLeastOne | Literal["auto"] = Field(
        default="auto", description="CPU cores per training process."
    )
    mem: str | None = Field(
        default=None,
        pattern=r"^\d+[KMGT]?$",
        description="Memory per node, in Slurm's format.",
        json_schema_extra={"allowed": 'an amount such as "64G"'},
    )
    time: SlurmTime | None = Field(default="01:00:00", description="Time limit of a job, in Slurm's format.")
    time_min: SlurmTime | None = Field(
        default=None,
        description="Shortest time limit that the job accepts, if Slurm can then start it sooner.",
    )
    slice: SlurmTime | None = Field(
        default=None,
        description="Time limit of each job of the run, which then saves and returns to the queue; `time` "
        "limits all jobs together.",
    )
    partition: OneLine | None = Field(default=None, description="Slurm partition.")
    clusters: Names = list_field((), "Slurm clusters; of several, the one where the job would start first.")
    account: OneLine | None = Field(default=None, description="Slurm account.")
    qos: OneLine | None = Field(default=None, description="Slurm quality of service.")
    constraint: OneLine | None = Field(default=None, description="Required node features, in Slurm's syntax.")
    exclude: OneLine | None = Field(default=None, description="Nodes to exclude, as a Slurm host list.")
    reservation: OneLine | None = Field(default=None, description="Slurm reservation.")
    gpu_type: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_.-]+( *, *[A-Za-z0-9_.-]+)*$",
        description="GPU type, by its name in Slurm; of several such as h100,a100, whichever is free first.",
    )
    comment: OneLine | None = Field(default=None, description="Comment that Slurm stores with the job.")
    mail_user: OneLine | None = Field(default=None, description="Recipient of Slurm's emails.")
    mail_type: OneLine | None = Field(default=None, description="Job events that Slurm sends emails about.")
    extra: dict[OptionName, OneLine | int | bool] = Field(
        default={},
        description="Other sbatch options by their long names; true for an option without a value.",
    )
    spare_nodes: NotNegative = Field(
        default=0,
        description="Nodes to allocate in addition to `nodes`, as replacements for nodes that fail.",
    )

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """The GPU types of which the job may get any one."""
        return () if self.gpu_type is None else tuple(map(str.strip, self.gpu_type.split(",")))

    @property
    def job_time(self) -> str | None:
        """The time limit of one job."""
        return self.slice or self.time

    @property
    def node_counts(self) -> Sequence[int]:
        """The numbers of nodes that the job may get, the fewest first."""
        return node_counts(self.nodes)

    @property
    def fewest_nodes(self) -> int:
        return self.node_counts[0]

    @property
    def most_nodes(self) -> int:
        return self.node_counts[-1]


class LaunchConfig(Section):
    """How the processes are started."""

    backend: Literal["auto", "sbatch", "submitit", "local"] = Field(
        default="auto", description="Where the job starts; auto: Slurm where there is one, else this machine."
    )
    cluster: OneLine | None = Field(
        default=None, description="Name of the cluster profile; null selects the one for this cluster."
    )
    per: Literal["gpu", "node"] = Field(default="gpu", description="One Slurm task per GPU, or one per node.")
    env: dict[str, str] = Field(default={}, description="Environment variables for every process.")
    modules: tuple[OneLine, ...] = list_field((), "Environment modules to load.")
    python: OneLine | None = Field(
        default=None, description="Python interpreter; null: that of venv, conda, uv, container or trainkit."
    )
    venv: OneLine | None = Field(default=None, description="Virtual environment to activate.")
    conda: OneLine | None = Field(default=None, description="Conda environment to activate (experimental).")
    uv: OneLine | None = Field(default=None, description="Folder of the uv project whose environment to use.")
    container: OneLine | None = Field(default=None, description="Container image to run in (experimental).")
    container_runtime: Literal["auto", "apptainer", "pyxis"] = Field(
        default="auto", description="Container runtime; auto uses the one that the cluster has."
    )
    container_mounts: tuple[OneLine, ...] = list_field((), "Folders to mount in the container, as SRC:DST.")
    setup: tuple[str, ...] = list_field((), "Shell lines to run before the processes start.")
    network: str = Field(
        default="auto",
        min_length=1,
        description="Network preset (auto, ib, socket, debug), or the name of a network interface.",
    )
    numa: Literal["auto", "none"] = Field(
        default="auto",
        description="Whether a rank of the trainer runs on the CPUs next to its GPU, among those it may use.",
    )
    srun_extra: dict[OptionName, OneLine | int | bool] = Field(
        default={}, description="Other srun options by their long names, as in resources.extra."
    )
    secrets: tuple[VariableName, ...] = list_field(
        ("HF_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD"),
        "Environment variables passed to the job but never written to the run folder.",
    )
    snapshot: bool = Field(
        default=True,
        description="Train from a copy of the code in the run folder; without Slurm only for a COMMAND.",
    )


class RequeueConfig(Section):
    """When a run that was interrupted restarts automatically."""

    on: tuple[Literal["preempted", "timeout", "node_fail", "crash", "hang"], ...] = list_field(
        ("preempted", "timeout", "node_fail", "crash", "hang"), "Causes after which the run restarts."
    )
    max: NotNegative = Field(
        default=100, description="Maximum number of restarts of a run, besides those after a slice."
    )
    max_crashes: NotNegative = Field(
        default=3, description="Maximum number of restarts after crashes without progress."
    )
    signal: Literal["auto", "USR2", "TERM"] = Field(
        default="auto",
        description="Signal sent before the job ends; auto: USR2 for the trainer, and for a COMMAND "
        "the one that it handles, TERM or USR2. Not USR1, which NCCL catches.",
    )
    grace_s: Positive = Field(
        default=120.0, description="Seconds between that signal and the end of the job."
    )
    hang_factor: Positive | None = Field(
        default=20.0,
        description="A step hangs when it takes this many times the median step time; null disables this.",
    )
    hang_min_s: Positive = Field(default=300.0, description="Seconds before which no step counts as hanging.")
    inspect_s: Positive | None = Field(
        default=600.0,
        description="Seconds without output of any rank after which a COMMAND is inspected, and reported if"
        " it has not printed anything yet or waits for a lock file; null disables this.",
    )
    silence_s: Positive | None = Field(
        default=None,
        description="Seconds without output after which a COMMAND counts as a hang; null disables this.",
    )
    slow_hosts: Literal["ignore", "exclude", "restart"] = Field(
        default="ignore",
        description="What happens to the hosts of slow ranks, on Slurm; exclude: continue without them after"
        " the next interruption; restart: also save and restart without such a host, on a spare node or on"
        " fewer nodes of a range.",
    )
    slow_after_s: Positive = Field(
        default=300.0,
        description="Seconds for which a rank must stay slow before slow_hosts: restart restarts the run.",
    )
    follow_ups: NotNegative = Field(
        default=0, description="Dependent jobs that continue the run, for nodes without scontrol and sbatch."
    )


WEBHOOK_VARIABLE = "TRAINKIT_WEBHOOK_URL"
"""The default of `notify.webhook`; unlike other variables with this prefix, it sets no config key."""


MAIL_TYPES = {"finished": "END", "failed": "FAIL", "requeued": "REQUEUE"}
"""Slurm's name of each event of `notify.on` that it knows."""


class NotifyConfig(Section):
    """What the run reports to a webhook or by email."""

    on: tuple[Literal["finished", "failed", "requeued", "stalled", "slow"], ...] = list_field(
        ("finished", "failed", "requeued", "stalled"),
        "Events to report; failed: the run ended without finishing; requeued: it restarts; stalled: no"
        " progress, no output, or no checkpoints; slow: a rank slows down the others.",
    )
    webhook: str | None = Field(
        default=WEBHOOK_VARIABLE,
        description="Name of the environment variable that contains the URL of the webhook, which is a"
        " secret; without the variable, or with null, there is no webhook.",
        json_schema_extra={"allowed": "the name of an environment variable, or null"},
    )
    mail: OneLine | None = Field(
        default=None, description="Recipient of Slurm's emails about these events, except stalled and slow."
    )
    min_interval_s: NotNegative = Field(
        default=600,
        description="Seconds between two reports of the same kind; finished and failed are always reported.",
    )
    stalled_after_s: Positive = Field(
        default=1800.0, description="Seconds without progress after which a run is reported as stalled."
    )


class MlflowConfig(Section):
    """Where the metrics are in MLflow."""

    tracking_uri: OneLine | None = Field(
        default=None,
        description="URL of a server or database, or a folder for a SQLite store, relative to that of the"
        " command; null uses MLFLOW_TRACKING_URI, else mlflow/ next to the run folder.",
    )
    experiment: OneLine | None = Field(
        default=None, description="Experiment; null uses MLFLOW_EXPERIMENT_NAME, else the name of the run."
    )


class WandbConfig(Section):
    """Where the metrics are in Weights & Biases."""

    project: OneLine | None = Field(
        default=None, description="Project; null uses WANDB_PROJECT, else trainkit."
    )
    entity: OneLine | None = Field(
        default=None, description="User or team; null uses WANDB_ENTITY, else your default."
    )
    mode: Literal["online", "offline"] = Field(
        default="online", description="offline writes to wandb/ of the run folder, for `wandb sync`."
    )


class LoggingConfig(Section):
    """Where metrics are logged, in addition to metrics.jsonl."""

    tensorboard: bool | Literal["auto"] = Field(
        default="auto",
        description="Write TensorBoard files; auto: if installed; true: refuse to run without.",
    )
    health_every_s: Positive | None = Field(
        default=10.0,
        description="Seconds between samples of processors, memory, network, disks and GPUs of each node, in"
        " health/ of the run folder; null for none.",
    )
    pattern: str | None = Field(
        default="auto",
        description="How the curve of a COMMAND is read from the log of rank 0: auto, null for not at all, "
        "or a regular expression with the group step and others such as loss, lr and val_loss.",
    )
    mlflow: MlflowConfig | bool | None = Field(
        default=None,
        description="Send the metrics to MLflow: `true`, or `tracking_uri` (a server, or a folder for a"
        " SQLite store) and `experiment`.",
        json_schema_extra={"allowed": "true, or a mapping with tracking_uri and experiment,"},
    )
    wandb: WandbConfig | bool | None = Field(
        default=None,
        description="Send the metrics to Weights & Biases: `true`, or `project`, `entity` and `mode` (online"
        " or offline).",
        json_schema_extra={"allowed": "true, or a mapping with project, entity and mode,"},
    )

    @property
    def trackers(self) -> dict[str, MlflowConfig | WandbConfig]:
        """The settings of each tracker that is on, by its name, which is that of its module and extra."""
        found: dict[str, MlflowConfig | WandbConfig] = {}
        if self.mlflow:
            found["mlflow"] = MlflowConfig() if self.mlflow is True else self.mlflow
        if self.wandb:
            found["wandb"] = WandbConfig() if self.wandb is True else self.wandb
        return found


class ProfilerConfig(Section):
    """Steps to record with the PyTorch profiler."""

    start_step: AtLeastOne | None = Field(
        default=None, description="First step to profile; null disables the profiler."
    )
    num_steps: AtLeastOne = Field(default=5, description="Number of steps to profile.")
    memory: bool = Field(
        default=False,
        description="Also record every allocation of GPU memory with its stack, for memory_viz.",
    )
    ranks: tuple[Annotated[int, Field(ge=0)], ...] = list_field((0,), "Ranks to profile.")
