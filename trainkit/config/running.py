"""Defines the config sections for how a run executes: layout, checkpoints, resources, launch, requeue."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from trainkit.config.section import AtLeastOne, NotNegative, Positive, Section, key
from trainkit.formats import MEMORY, slurm_memory

PipelineSchedule = Literal[
    "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipe_v"
]
DataParallelDegree = Literal[-1] | AtLeastOne
OneLine = Annotated[
    str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", json_schema_extra={"allowed": "one line of text"})
]


def node_counts(nodes: int | str) -> Sequence[int]:
    """Return the node counts that a value of `resources.nodes` allows, the smallest first.

    A reversed range such as 4-2 allows none.
    """
    first, dash, last = str(nodes).partition("-")
    return range(int(first), int(last) + 1) if dash else sorted(set(map(int, first.split(","))))


def _several(nodes: str) -> str:
    if len(node_counts(nodes)) < 2:
        # The message is not shown, because the problem describes the allowed values instead.
        raise ValueError("no range")
    return nodes


NodeRange = Annotated[
    str, Field(pattern=r"^[1-9]\d{0,6}(-[1-9]\d{0,6}|(,[1-9]\d{0,6})+)$"), AfterValidator(_several)
]
"""A range or a list of node counts, as Slurm writes it."""
Names = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[a-z0-9_.-]+$")], ...],
    BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value),
]
"""Names in a YAML list, or separated by commas as in Slurm's options."""
OptionName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
MetricName = Annotated[str, Field(min_length=1)]
SLURM_TIME = r"^(\d+-\d{1,2}(:[0-5]?\d){0,2}|\d+(:[0-5]?\d){0,2})$"
SlurmMemory = Annotated[
    str,
    BeforeValidator(lambda value: "0" if value == 0 and type(value) is int else value),
    AfterValidator(slurm_memory),
    Field(json_schema_extra={"pattern": MEMORY, "allowed": 'an amount such as "64G"'}),
]
SlurmTime = Annotated[
    str, Field(pattern=SLURM_TIME, json_schema_extra={"allowed": 'a time such as "01:00:00" or "2-12:00:00"'})
]


class ParallelConfig(Section):
    """The parallel layout; the product of the degrees is the number of processes."""

    dp_replicate: DataParallelDegree = key(
        1, "Number of model replicas; -1 derives it from the number of processes."
    )
    dp_shard: DataParallelDegree = key(
        -1, "Processes to shard each replica over; -1 derives it from the number of processes."
    )
    tp: AtLeastOne = key(1, "Tensor-parallel degree.")
    pp: AtLeastOne = key(1, "Pipeline stages.")
    cp: AtLeastOne = key(1, "Context-parallel degree.")
    sequence_parallel: bool = key(True, "If tp > 1, shard norms and the residual stream along the sequence.")
    loss_parallel: bool = key(True, "If tp > 1, shard the loss over the vocabulary.")
    zero: Literal[2, 3] = key(
        3,
        "ZeRO stage of dp_shard: 3 reshards parameters after the forward pass; 2 keeps them"
        " gathered until the backward pass.",
    )
    pp_schedule: PipelineSchedule = key("1f1b", "Pipeline schedule.")
    pp_microbatches: AtLeastOne = key(
        4, "Microbatches per device batch if pp > 1; adapted to the batch size unless set."
    )
    activation_checkpointing: Literal["none", "selective", "full"] = key(
        "none", "Activations to recompute in the backward pass instead of keeping them."
    )
    compile: bool | None = key(
        None, "Compile each decoder block and the loss with torch.compile; null compiles on GPUs."
    )
    offload: bool = key(False, "Keep parameters and optimizer state in CPU memory.")
    mesh_of_one: bool = key(
        False, "Build process groups and shard over them even if there is only one process."
    )

    @property
    def wraps_one(self) -> bool:
        """Return whether a single process has a device mesh, on which `fully_shard` wraps the model.

        `offload` needs the wrapper, because `fully_shard` moves the parameters to CPU memory.
        """
        return self.mesh_of_one or self.offload


class CheckpointConfig(Section):
    """Settings for when checkpoints are saved and how many are kept."""

    every_steps: AtLeastOne | None = key(100, "Steps between checkpoints; null disables saving by steps.")
    every_minutes: Positive | None = key(None, "Minutes between checkpoints; null disables saving by time.")
    keep_last: AtLeastOne | None = key(
        3, "Latest checkpoints to keep, besides the best one; null keeps all of them."
    )
    best_metric: MetricName | None = key(
        "val_loss",
        "Metric that selects the best checkpoint: val_loss, loss, or a metric of your own task. The "
        "prefix val_ selects the metric's value in the validation; without it, the value of the "
        "checkpoint's step counts. null keeps no best checkpoint.",
        allowed="the name of a metric, or null",
    )
    best_mode: Literal["min", "max"] = key(
        "min", "Direction of best_metric: min keeps the lowest value, max the highest."
    )
    async_save: bool = key(True, "Save checkpoints in the background.", alias="async")


class ResourcesConfig(Section):
    """Resources that the run requests; keys for Slurm have no effect without Slurm."""

    nodes: AtLeastOne | NodeRange = key(
        1,
        "Number of nodes. With a range such as 2-8 or a list such as 2,4,8, the job uses the "
        "largest number that Slurm can allocate.",
        allowed="a whole number of at least 1, a range such as 2-8, or a list such as 2,4,8",
    )
    grow: bool = key(
        False,
        "If nodes is a range, save and requeue for more nodes when Slurm has free nodes and the "
        "change saves time.",
    )
    gpus_per_node: AtLeastOne | Literal["auto"] = key(
        "auto", "Training processes per node: one per GPU, or CPU workers on nodes without GPUs."
    )
    cpus_per_gpu: AtLeastOne | Literal["auto"] = key("auto", "CPU cores per training process.")
    mem: SlurmMemory | None = key(
        None,
        "Memory per node, such as 64G or 3.5 GiB. Units are powers of 1024; 0 requests all memory of a node.",
    )
    time: SlurmTime | None = key("01:00:00", "Time limit of a job, in Slurm's format.")
    time_min: SlurmTime | None = key(
        None, "Shortest time limit that the job accepts, if Slurm can then start it sooner."
    )
    slice: SlurmTime | None = key(
        None,
        "Time limit of each job of the run. Each job saves and returns to the queue before the "
        "limit; `time` limits all jobs together.",
    )
    partition: OneLine | None = key(None, "Slurm partition.")
    clusters: Names = key(
        (), "Slurm clusters; with several, the job goes to the cluster where it would start first."
    )
    account: OneLine | None = key(None, "Slurm account.")
    qos: OneLine | None = key(None, "Slurm quality of service.")
    constraint: OneLine | None = key(None, "Required node features, in Slurm's syntax.")
    exclude: OneLine | None = key(None, "Nodes to exclude, as a Slurm host list.")
    reservation: OneLine | None = key(None, "Slurm reservation.")
    gpu_type: str | None = key(
        None,
        "GPU type, by its name in Slurm; with several such as h100,a100, the job gets the type that "
        "is free first.",
        pattern=r"^[A-Za-z0-9_.-]+( *, *[A-Za-z0-9_.-]+)*$",
        allowed="the name of a type, or several such as h100,a100",
    )
    comment: OneLine | None = key(None, "Comment that Slurm stores with the job.")
    mail_user: OneLine | None = key(None, "Recipient of Slurm's emails.")
    mail_type: OneLine | None = key(None, "Job events that Slurm sends emails about.")
    extra: dict[OptionName, OneLine | int | bool] = key(
        {}, "Other sbatch options by their long names; true for an option without a value."
    )
    spare_nodes: NotNegative = key(0, "Additional nodes to allocate, as replacements for nodes that fail.")

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """Return the GPU types that the job accepts."""
        return () if self.gpu_type is None else tuple(map(str.strip, self.gpu_type.split(",")))

    @property
    def job_time(self) -> str | None:
        """Return the time limit of one job."""
        return self.slice or self.time

    @property
    def node_counts(self) -> Sequence[int]:
        """Return the node counts that the job accepts, the smallest first."""
        return node_counts(self.nodes)

    @property
    def fewest_nodes(self) -> int:
        return self.node_counts[0]

    @property
    def most_nodes(self) -> int:
        return self.node_counts[-1]


class LaunchConfig(Section):
    """Settings for how the processes are started."""

    backend: Literal["auto", "sbatch", "submitit", "local"] = key(
        "auto", "Where the job starts; auto uses Slurm if it is available, else this machine."
    )
    cluster: OneLine | None = key(
        None, "Name of the cluster profile; null selects the profile for this cluster."
    )
    per: Literal["gpu", "node"] = key("gpu", "One Slurm task per GPU, or one per node.")
    env: dict[str, str] = key({}, "Environment variables for every process.")
    modules: tuple[OneLine, ...] = key((), "Environment modules to load.")
    python: OneLine | None = key(
        None, "Python interpreter; null uses the interpreter of venv, conda, uv, container or trainkit."
    )
    venv: OneLine | None = key(None, "Virtual environment to activate.")
    conda: OneLine | None = key(None, "Conda environment to activate (experimental).")
    uv: OneLine | None = key(None, "Folder of the uv project whose environment to use.")
    container: OneLine | None = key(None, "Container image to run in (experimental).")
    container_runtime: Literal["auto", "apptainer", "pyxis"] = key(
        "auto", "Container runtime; auto uses the runtime that the cluster has."
    )
    container_mounts: tuple[OneLine, ...] = key((), "Folders to mount in the container, as SRC:DST.")
    setup: tuple[str, ...] = key((), "Shell lines to run before the processes start.")
    network: str = key(
        "auto", "Network preset (auto, ib, socket, debug), or the name of a network interface.", min_length=1
    )
    numa: Literal["auto", "none"] = key(
        "auto", "CPU binding; auto runs each rank of the trainer on the allowed CPUs next to its GPU."
    )
    srun_extra: dict[OptionName, OneLine | int | bool] = key(
        {}, "Other srun options by their long names, as in resources.extra."
    )
    secrets: tuple[VariableName, ...] = key(
        ("HF_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD"),
        "Environment variables passed to the job but never written to the run folder.",
    )
    snapshot: bool = key(
        True,
        "Train from a copy of the code in the run folder. Without Slurm, the code is copied only "
        "for a COMMAND.",
    )


class RequeueConfig(Section):
    """Settings for the automatic restart of an interrupted run."""

    on: tuple[Literal["preempted", "timeout", "node_fail", "crash", "hang"], ...] = key(
        ("preempted", "timeout", "node_fail", "crash", "hang"), "Causes after which the run restarts."
    )
    max: NotNegative = key(
        100, "Maximum number of restarts of a run; a restart after a slice does not count."
    )
    max_crashes: NotNegative = key(3, "Maximum number of restarts after crashes without progress.")
    signal: Literal["auto", "USR2", "TERM"] = key(
        "auto",
        "Signal sent before the job ends. auto sends USR2 to the trainer. It sends TERM or USR2 to "
        "a COMMAND, whichever the COMMAND handles. USR1 is not allowed, because NCCL catches it.",
    )
    grace_s: Positive = key(120.0, "Seconds between the signal and the end of the job.")
    hang_factor: Positive | None = key(
        20.0, "A step hangs if it takes this many times the median step time; null disables this check."
    )
    hang_min_s: Positive = key(300.0, "Minimum seconds that a step must take to count as hanging.")
    inspect_s: Positive | None = key(
        600.0,
        "Seconds without output of any rank after which a COMMAND is inspected. The inspection "
        "reports a COMMAND that has not printed anything yet or waits for a lock file. null "
        "disables the inspection.",
    )
    silence_s: Positive | None = key(
        None, "Seconds without output after which a COMMAND counts as hanging; null disables this check."
    )
    slow_hosts: Literal["ignore", "exclude", "restart"] = key(
        "ignore",
        "Reaction to hosts of slow ranks, on Slurm. exclude continues without them after the next "
        "interruption. restart also saves and restarts without such a host, on a spare node or on "
        "fewer nodes of a range.",
    )
    slow_after_s: Positive = key(
        300.0, "Seconds that a rank must stay slow before slow_hosts: restart restarts the run."
    )
    follow_ups: NotNegative = key(
        0, "Number of chained jobs that continue the run, for nodes without scontrol and sbatch."
    )


WEBHOOK_VARIABLE = "TRAINKIT_WEBHOOK_URL"
"""The default of `notify.webhook`; unlike other variables with this prefix, the variable sets no config key.
"""


MAIL_TYPES = {"finished": "END", "failed": "FAIL", "requeued": "REQUEUE"}
"""Maps an event of `notify.on` to the name of the same event in Slurm."""


class NotifyConfig(Section):
    """Events that the run reports to a webhook or by email."""

    on: tuple[Literal["finished", "failed", "requeued", "stalled", "slow"], ...] = key(
        ("finished", "failed", "requeued", "stalled"),
        "Events to report. failed: the run ended without finishing; requeued: the run restarts; "
        "stalled: no progress, no output, or no checkpoints; slow: a rank slows down the others.",
    )
    webhook: str | None = key(
        WEBHOOK_VARIABLE,
        "Name of the environment variable that contains the URL of the webhook. The URL is a "
        "secret. Without the variable, or with null, there is no webhook.",
        allowed="the name of an environment variable, or null",
    )
    mail: OneLine | None = key(
        None, "Recipient of Slurm's emails about these events, except stalled and slow."
    )
    min_interval_s: NotNegative = key(
        600, "Seconds between two reports of the same event; finished and failed are always reported."
    )
    stalled_after_s: Positive = key(
        1800.0, "Seconds without progress after which a run is reported as stalled."
    )


class MlflowConfig(Section):
    """Settings for metrics in MLflow."""

    tracking_uri: OneLine | None = key(
        None,
        "URL of a server or database, or a folder for a SQLite store, relative to the working "
        "folder of the command. null uses MLFLOW_TRACKING_URI, else mlflow/ next to the run folder.",
    )
    experiment: OneLine | None = key(
        None, "Name of the experiment; null uses MLFLOW_EXPERIMENT_NAME, else the name of the run."
    )


class WandbConfig(Section):
    """Settings for metrics in Weights & Biases."""

    project: OneLine | None = key(None, "Name of the project; null uses WANDB_PROJECT, else trainkit.")
    entity: OneLine | None = key(None, "User or team; null uses WANDB_ENTITY, else your default.")
    mode: Literal["online", "offline"] = key(
        "online",
        "online uploads the metrics; offline writes them to wandb/ of the run folder, for `wandb sync`.",
    )


class LoggingConfig(Section):
    """Destinations of metrics, in addition to metrics.jsonl."""

    tensorboard: bool | Literal["auto"] = key(
        "auto",
        "Write TensorBoard files. auto writes them if TensorBoard is installed; true requires TensorBoard.",
    )
    health_every_s: Positive | None = key(
        10.0,
        "Seconds between samples of the processors, memory, network, disks and GPUs of each node, "
        "which are written to health/ of the run folder; null takes no samples.",
    )
    pattern: str | None = key(
        "auto",
        "Source of a COMMAND's metrics in the log of rank 0: auto, null to read none, or a regular "
        "expression with the group step and others such as loss, lr and val_loss.",
    )
    mlflow: MlflowConfig | bool | None = key(
        None,
        "Send the metrics to MLflow: `true`, or `tracking_uri` (a server, or a folder for a"
        " SQLite store) and `experiment`.",
        allowed="true, or a mapping with tracking_uri and experiment,",
    )
    wandb: WandbConfig | bool | None = key(
        None,
        "Send the metrics to Weights & Biases: `true`, or `project`, `entity` and `mode` (online"
        " or offline).",
        allowed="true, or a mapping with project, entity and mode,",
    )

    @property
    def trackers(self) -> dict[str, MlflowConfig | WandbConfig]:
        """Return the settings of each enabled tracker by the tracker's name.

        The module and the extra of a tracker have the same name.
        """
        found: dict[str, MlflowConfig | WandbConfig] = {}
        if self.mlflow:
            found["mlflow"] = MlflowConfig() if self.mlflow is True else self.mlflow
        if self.wandb:
            found["wandb"] = WandbConfig() if self.wandb is True else self.wandb
        return found


class ProfilerConfig(Section):
    """Steps to record with the PyTorch profiler."""

    start_step: AtLeastOne | None = key(None, "First step to profile; null disables the profiler.")
    num_steps: AtLeastOne = key(5, "Number of steps to profile.")
    memory: bool = key(False, "Also record every allocation of GPU memory with its stack, for memory_viz.")
    ranks: tuple[Annotated[int, Field(ge=0)], ...] = key((0,), "Ranks to profile.")
