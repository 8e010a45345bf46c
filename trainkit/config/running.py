"""Config sections for where and how a run executes: layout, checkpoints, resources, launch, requeue."""

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
    """Parallel layout; the product of the degrees is the number of processes."""

    dp_replicate: DataParallelDegree = key(
        1, "Number of model replicas; -1 derives it from the number of processes."
    )
    dp_shard: DataParallelDegree = key(
        -1, "Processes to shard each replica over; -1 derives it from the number of processes."
    )
    tp: AtLeastOne = key(1, "Tensor-parallel degree.")
    pp: AtLeastOne = key(1, "Pipeline stages.")
    cp: AtLeastOne = key(1, "Context-parallel degree.")
    sequence_parallel: bool = key(
        True, "With tp > 1: shard norms and the residual stream along the sequence."
    )
    loss_parallel: bool = key(True, "With tp > 1: shard the loss over the vocabulary.")
    zero: Literal[2, 3] = key(
        3,
        "ZeRO stage of dp_shard: 3 reshards parameters after the forward pass; 2 keeps them"
        " gathered until the backward pass.",
    )
    pp_schedule: PipelineSchedule = key("1f1b", "Pipeline schedule.")
    pp_microbatches: AtLeastOne = key(
        4, "With pp > 1: microbatches per device batch; adapted to the batch size unless set."
    )
    activation_checkpointing: Literal["none", "selective", "full"] = key(
        "none", "Which activations to recompute in the backward pass instead of keeping them."
    )
    compile: bool | None = key(
        None, "Compile each decoder block and the loss with torch.compile; null compiles on GPUs."
    )
    offload: bool = key(False, "Keep parameters and optimizer state in CPU memory.")
    mesh_of_one: bool = key(
        False, "On one process: build process groups and shard over them, as several processes do."
    )

    @property
    def wraps_one(self) -> bool:
        """Whether a single process has a mesh, on which `fully_shard` wraps the model: it also offloads."""
        return self.mesh_of_one or self.offload


class CheckpointConfig(Section):
    """When checkpoints are saved and how many are kept."""

    every_steps: AtLeastOne | None = key(100, "Steps between checkpoints; null to not save by steps.")
    every_minutes: Positive | None = key(None, "Minutes between checkpoints; null to not save by time.")
    keep_last: AtLeastOne | None = key(
        3, "Latest checkpoints to keep, besides the best one; null keeps all of them."
    )
    best_metric: MetricName | None = key(
        "val_loss",
        "Metric that chooses the best checkpoint: val_loss, loss, or one of your own task, with "
        "val_ in front for its value in the validation; null keeps no best one. Without val_, it is "
        "that of the checkpoint's step.",
        allowed="the name of a metric, or null",
    )
    best_mode: Literal["min", "max"] = key(
        "min", "Whether the lowest or the highest value of best_metric is the best."
    )
    async_save: bool = key(True, "Save checkpoints in the background.", alias="async")


class ResourcesConfig(Section):
    """Resources that the run requests; keys for Slurm have no effect without it."""

    nodes: AtLeastOne | NodeRange = key(
        1,
        "Number of nodes; of a range such as 2-8 or a list such as 2,4,8, as many as Slurm has.",
        allowed="a whole number of at least 1, a range such as 2-8, or a list such as 2,4,8",
    )
    grow: bool = key(
        False,
        "With a range of nodes: save and requeue for more nodes when Slurm has them free and that "
        "saves time.",
    )
    gpus_per_node: AtLeastOne | Literal["auto"] = key(
        "auto", "Training processes per node: one per GPU, or CPU workers on nodes without GPUs."
    )
    cpus_per_gpu: AtLeastOne | Literal["auto"] = key("auto", "CPU cores per training process.")
    mem: SlurmMemory | None = key(
        None, "Memory per node, such as 64G or 3.5 GiB; units are powers of 1024, and 0 is all of it."
    )
    time: SlurmTime | None = key("01:00:00", "Time limit of a job, in Slurm's format.")
    time_min: SlurmTime | None = key(
        None, "Shortest time limit that the job accepts, if Slurm can then start it sooner."
    )
    slice: SlurmTime | None = key(
        None,
        "Time limit of each job of the run, which then saves and returns to the queue; `time` "
        "limits all jobs together.",
    )
    partition: OneLine | None = key(None, "Slurm partition.")
    clusters: Names = key((), "Slurm clusters; of several, the one where the job would start first.")
    account: OneLine | None = key(None, "Slurm account.")
    qos: OneLine | None = key(None, "Slurm quality of service.")
    constraint: OneLine | None = key(None, "Required node features, in Slurm's syntax.")
    exclude: OneLine | None = key(None, "Nodes to exclude, as a Slurm host list.")
    reservation: OneLine | None = key(None, "Slurm reservation.")
    gpu_type: str | None = key(
        None,
        "GPU type, by its name in Slurm; of several such as h100,a100, whichever is free first.",
        pattern=r"^[A-Za-z0-9_.-]+( *, *[A-Za-z0-9_.-]+)*$",
        allowed="the name of a type, or several such as h100,a100",
    )
    comment: OneLine | None = key(None, "Comment that Slurm stores with the job.")
    mail_user: OneLine | None = key(None, "Recipient of Slurm's emails.")
    mail_type: OneLine | None = key(None, "Job events that Slurm sends emails about.")
    extra: dict[OptionName, OneLine | int | bool] = key(
        {}, "Other sbatch options by their long names; true for an option without a value."
    )
    spare_nodes: NotNegative = key(
        0, "Nodes to allocate in addition to `nodes`, as replacements for nodes that fail."
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

    backend: Literal["auto", "sbatch", "submitit", "local"] = key(
        "auto", "Where the job starts; auto: Slurm where there is one, else this machine."
    )
    cluster: OneLine | None = key(None, "Name of the cluster profile; null selects the one for this cluster.")
    per: Literal["gpu", "node"] = key("gpu", "One Slurm task per GPU, or one per node.")
    env: dict[str, str] = key({}, "Environment variables for every process.")
    modules: tuple[OneLine, ...] = key((), "Environment modules to load.")
    python: OneLine | None = key(
        None, "Python interpreter; null: that of venv, conda, uv, container or trainkit."
    )
    venv: OneLine | None = key(None, "Virtual environment to activate.")
    conda: OneLine | None = key(None, "Conda environment to activate (experimental).")
    uv: OneLine | None = key(None, "Folder of the uv project whose environment to use.")
    container: OneLine | None = key(None, "Container image to run in (experimental).")
    container_runtime: Literal["auto", "apptainer", "pyxis"] = key(
        "auto", "Container runtime; auto uses the one that the cluster has."
    )
    container_mounts: tuple[OneLine, ...] = key((), "Folders to mount in the container, as SRC:DST.")
    setup: tuple[str, ...] = key((), "Shell lines to run before the processes start.")
    network: str = key(
        "auto", "Network preset (auto, ib, socket, debug), or the name of a network interface.", min_length=1
    )
    numa: Literal["auto", "none"] = key(
        "auto", "Whether a rank of the trainer runs on the CPUs next to its GPU, among those it may use."
    )
    srun_extra: dict[OptionName, OneLine | int | bool] = key(
        {}, "Other srun options by their long names, as in resources.extra."
    )
    secrets: tuple[VariableName, ...] = key(
        ("HF_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD"),
        "Environment variables passed to the job but never written to the run folder.",
    )
    snapshot: bool = key(
        True, "Train from a copy of the code in the run folder; without Slurm only for a COMMAND."
    )


class RequeueConfig(Section):
    """When a run that was interrupted restarts automatically."""

    on: tuple[Literal["preempted", "timeout", "node_fail", "crash", "hang"], ...] = key(
        ("preempted", "timeout", "node_fail", "crash", "hang"), "Causes after which the run restarts."
    )
    max: NotNegative = key(100, "Maximum number of restarts of a run, besides those after a slice.")
    max_crashes: NotNegative = key(3, "Maximum number of restarts after crashes without progress.")
    signal: Literal["auto", "USR2", "TERM"] = key(
        "auto",
        "Signal sent before the job ends; auto: USR2 for the trainer, and for a COMMAND "
        "the one that it handles, TERM or USR2. Not USR1, which NCCL catches.",
    )
    grace_s: Positive = key(120.0, "Seconds between that signal and the end of the job.")
    hang_factor: Positive | None = key(
        20.0, "A step hangs when it takes this many times the median step time; null disables this."
    )
    hang_min_s: Positive = key(300.0, "Seconds before which no step counts as hanging.")
    inspect_s: Positive | None = key(
        600.0,
        "Seconds without output of any rank after which a COMMAND is inspected, and reported if"
        " it has not printed anything yet or waits for a lock file; null disables this.",
    )
    silence_s: Positive | None = key(
        None, "Seconds without output after which a COMMAND counts as a hang; null disables this."
    )
    slow_hosts: Literal["ignore", "exclude", "restart"] = key(
        "ignore",
        "What happens to the hosts of slow ranks, on Slurm; exclude: continue without them after"
        " the next interruption; restart: also save and restart without such a host, on a spare node or on"
        " fewer nodes of a range.",
    )
    slow_after_s: Positive = key(
        300.0, "Seconds for which a rank must stay slow before slow_hosts: restart restarts the run."
    )
    follow_ups: NotNegative = key(
        0, "Dependent jobs that continue the run, for nodes without scontrol and sbatch."
    )


WEBHOOK_VARIABLE = "TRAINKIT_WEBHOOK_URL"
"""The default of `notify.webhook`; unlike other variables with this prefix, it sets no config key."""


MAIL_TYPES = {"finished": "END", "failed": "FAIL", "requeued": "REQUEUE"}
"""Slurm's name of each event of `notify.on` that it knows."""


class NotifyConfig(Section):
    """What the run reports to a webhook or by email."""

    on: tuple[Literal["finished", "failed", "requeued", "stalled", "slow"], ...] = key(
        ("finished", "failed", "requeued", "stalled"),
        "Events to report; failed: the run ended without finishing; requeued: it restarts; stalled: no"
        " progress, no output, or no checkpoints; slow: a rank slows down the others.",
    )
    webhook: str | None = key(
        WEBHOOK_VARIABLE,
        "Name of the environment variable that contains the URL of the webhook, which is a"
        " secret; without the variable, or with null, there is no webhook.",
        allowed="the name of an environment variable, or null",
    )
    mail: OneLine | None = key(
        None, "Recipient of Slurm's emails about these events, except stalled and slow."
    )
    min_interval_s: NotNegative = key(
        600, "Seconds between two reports of the same kind; finished and failed are always reported."
    )
    stalled_after_s: Positive = key(
        1800.0, "Seconds without progress after which a run is reported as stalled."
    )


class MlflowConfig(Section):
    """Where the metrics are in MLflow."""

    tracking_uri: OneLine | None = key(
        None,
        "URL of a server or database, or a folder for a SQLite store, relative to that of the"
        " command; null uses MLFLOW_TRACKING_URI, else mlflow/ next to the run folder.",
    )
    experiment: OneLine | None = key(
        None, "Experiment; null uses MLFLOW_EXPERIMENT_NAME, else the name of the run."
    )


class WandbConfig(Section):
    """Where the metrics are in Weights & Biases."""

    project: OneLine | None = key(None, "Project; null uses WANDB_PROJECT, else trainkit.")
    entity: OneLine | None = key(None, "User or team; null uses WANDB_ENTITY, else your default.")
    mode: Literal["online", "offline"] = key(
        "online", "offline writes to wandb/ of the run folder, for `wandb sync`."
    )


class LoggingConfig(Section):
    """Where metrics are logged, in addition to metrics.jsonl."""

    tensorboard: bool | Literal["auto"] = key(
        "auto", "Write TensorBoard files; auto: if installed; true: refuse to run without."
    )
    health_every_s: Positive | None = key(
        10.0,
        "Seconds between samples of processors, memory, network, disks and GPUs of each node, in"
        " health/ of the run folder; null for none.",
    )
    pattern: str | None = key(
        "auto",
        "How the curve of a COMMAND is read from the log of rank 0: auto, null for not at all, or a "
        "regular expression with the group step and others such as loss, lr and val_loss.",
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
        """The settings of each tracker that is on, by its name, which is that of its module and extra."""
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
