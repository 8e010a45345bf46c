"""Defines the config sections for a run's execution: layout, checkpoints, resources, launch, requeue."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from trainkit.config.section import AtLeastOne, NotNegative, Positive, Section, key, section
from trainkit.formats import MEMORY, slurm_memory

PipelineSchedule = Literal[
    "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipe_v"
]
Recomputation = Literal["none", "pointwise", "selective", "full"]
"""Modes of activation checkpointing, from no recomputation to the most."""
DataParallelDegree = Literal[-1] | AtLeastOne
OneLine = Annotated[
    str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", json_schema_extra={"allowed": "one line of text"})
]


def node_counts(nodes: int | str) -> Sequence[int]:
    """Return the node counts that a value of `resources.nodes` allows, in ascending order.

    A reversed range such as 4-2 contains no node counts.
    """
    first, dash, last = str(nodes).partition("-")
    return range(int(first), int(last) + 1) if dash else sorted(set(map(int, first.split(","))))


def _several(nodes: str) -> str:
    if len(node_counts(nodes)) < 2:
        # Users do not see this message: the reported problem lists the allowed values.
        raise ValueError("no range")
    return nodes


NodeRange = Annotated[
    str, Field(pattern=r"^[1-9]\d{0,6}(-[1-9]\d{0,6}|(,[1-9]\d{0,6})+)$"), AfterValidator(_several)
]
"""A range or a list of node counts, in Slurm's syntax."""
Names = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[a-z0-9_.-]+$")], ...],
    BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value),
]
"""A YAML list of names, or names separated by commas as in Slurm's options."""
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
    """The parallel layout; the product of all degrees except `ep` is the number of processes."""

    dp_replicate: DataParallelDegree = key(
        1, "Number of model replicas; -1 derives this number from the number of processes."
    )
    dp_shard: DataParallelDegree = key(
        -1,
        "Number of processes over which each replica is sharded; -1 derives this number from the number of "
        "processes.",
    )
    tp: AtLeastOne = key(1, "Tensor-parallel degree.")
    pp: AtLeastOne = key(1, "Pipeline stages.")
    cp: AtLeastOne = key(1, "Context-parallel degree.")
    ep: AtLeastOne = key(
        1,
        "Number of ranks over which the experts of a layer are divided (expert parallelism); must divide "
        "dp_shard x cp x tp.",
    )
    sequence_parallel: bool = key(
        True, "Shard the norms and the residual stream along the sequence if tp > 1."
    )
    loss_parallel: bool = key(True, "Shard the loss over the vocabulary if tp > 1.")
    zero: Literal[2, 3] = key(
        3,
        "ZeRO stage of dp_shard: 3 reshards parameters after the forward pass; 2 keeps them"
        " gathered until the backward pass.",
    )
    pp_schedule: PipelineSchedule = key("1f1b", "Pipeline schedule.")
    pp_microbatches: AtLeastOne = key(
        4, "Number of microbatches per device batch if pp > 1; the default depends on the batch size."
    )
    activation_checkpointing: Recomputation = key(
        "none", "Which activations to recompute in the backward pass instead of storing them."
    )
    compile: bool | None = key(
        None, "Compile each decoder block and the loss with torch.compile; null compiles on GPUs."
    )
    offload: bool = key(False, "Keep parameters and optimizer state in CPU memory.")
    mesh_of_one: bool = key(
        False, "Create process groups and wrap the model for sharding even if there is only one process."
    )

    @property
    def wraps_one(self) -> bool:
        """Return whether the model of a single-process run is wrapped with `fully_shard`.

        `offload` needs the wrapper, because `fully_shard` moves the parameters to CPU memory.
        """
        return self.mesh_of_one or self.offload


class KeepConfig(Section):
    """The rule for which checkpoints are kept."""

    last: AtLeastOne | None = key(3, "Number of newest checkpoints to keep; null keeps all checkpoints.")
    every: AtLeastOne | None = key(
        None, "Keep the first checkpoint at or after each multiple of this number of steps."
    )
    at: tuple[AtLeastOne, ...] = key((), "Save and keep a checkpoint after each of these steps.")
    log_spaced: bool = key(False, "Save and keep a checkpoint after steps 1, 2, 4, 8 and so on.")
    best: AtLeastOne = key(1, "Number of checkpoints with the best values of best_metric to keep.")


class CheckpointConfig(Section):
    """Settings for when checkpoints are saved and how many of them are kept."""

    every_steps: AtLeastOne | None = key(
        100, "Steps between checkpoints; null disables saving at step intervals."
    )
    every_minutes: Positive | None = key(
        None, "Minutes between checkpoints; null disables saving at time intervals."
    )
    keep: KeepConfig | None = key(
        None,
        "Which checkpoints to keep: `last`, `every`, `at`, `log_spaced` and `best`. A checkpoint is kept if "
        "at least one of these keeps it: the newest `last` (3; null keeps all checkpoints), the first one at "
        "or after each multiple of `every` steps, those after the steps in the list `at`, with `log_spaced` "
        "those after steps 1, 2, 4, 8 and so on, and the `best` (1) with the best values of best_metric. The "
        "run also saves after the steps of `at` and `log_spaced` if every_steps would not save there. null "
        "keeps the newest `checkpoint.keep_last` and the best one.",
        allowed="a mapping with last, every, at, log_spaced and best,",
    )
    keep_last: AtLeastOne | None = key(
        3,
        "Number of newest checkpoints to keep, in addition to the best one; null keeps all checkpoints. The "
        "same as `keep: {last: N}`; only one of the two keys can be set.",
    )
    best_metric: MetricName | None = key(
        "val_loss",
        "Metric that selects the best checkpoint: val_loss, loss, val_loss_ema (with `ema.decay`), or a "
        "metric of your own task. With the prefix val_, the value from validation is used; without the "
        "prefix, the training value of the checkpoint's step. If null, no best checkpoint is kept.",
        allowed="the name of a metric, or null",
    )
    best_mode: Literal["min", "max"] = key(
        "min",
        "Whether the best checkpoint has the lowest (min) or the highest (max) value of best_metric.",
    )
    async_save: bool = key(True, "Save checkpoints in the background.", alias="async")

    @property
    def last_key(self) -> str:
        """Return the key that sets the number of newest checkpoints to keep."""
        return "checkpoint.keep_last" if self.keep is None else "checkpoint.keep.last"

    @model_serializer(mode="wrap")
    def _without_unused(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Leave out `keep_last` if `keep` is set, because a config must not set both."""
        values: dict[str, object] = serialize(self)
        if self.keep is not None:
            values.pop("keep_last", None)
        return values


class ResourcesConfig(Section):
    """Resources that the run requests; Slurm-only keys have no effect without Slurm."""

    nodes: AtLeastOne | NodeRange = key(
        1,
        "Number of nodes. With a range such as 2-8 or a list such as 2,4,8, the job uses the "
        "largest number that Slurm can allocate.",
        allowed="a whole number of at least 1, a range such as 2-8, or a list such as 2,4,8",
    )
    grow: bool = key(
        False,
        "If nodes is a range, save and requeue to get more nodes when Slurm has free nodes and the restart "
        "saves time overall.",
    )
    gpus_per_node: AtLeastOne | Literal["auto"] = key(
        "auto",
        "Training processes per node: one per GPU, or the number of CPU processes on nodes without GPUs.",
    )
    cpus_per_gpu: AtLeastOne | Literal["auto"] = key("auto", "CPU cores per training process.")
    mem: SlurmMemory | None = key(
        None,
        "Memory per node, such as 64G or 3.5 GiB. Units are powers of 1024; 0 requests all memory of a node.",
    )
    time: SlurmTime | None = key("01:00:00", "Time limit of a job, in Slurm's format.")
    time_min: SlurmTime | None = key(
        None,
        "Minimum time limit; Slurm may reduce the time limit of the job to this value to start the job "
        "sooner.",
    )
    slice: SlurmTime | None = key(
        None,
        "Time limit of each job, to split the run into several jobs (slices). Each job saves a checkpoint "
        "and requeues before this limit; `time` then limits the total time of all jobs.",
    )
    max_gpu_hours: Positive | None = key(
        None,
        "Maximum number of GPU-hours that a submission may use if every job reaches its time limit. The "
        "number of GPU-hours is GPUs x time limit x jobs, where requeue.max limits the number of jobs; the "
        "runs of a group are added up. With `slice`, it is GPUs x total time. If Slurm allocates whole "
        "nodes, all GPUs of the nodes count, even with `device: cpu`. Reject larger submissions.",
    )
    partition: OneLine | None = key(None, "Slurm partition.")
    clusters: Names = key(
        (),
        "Slurm cluster, or a list of clusters; from a list, Slurm chooses the cluster that can start the "
        "job first.",
    )
    account: OneLine | None = key(None, "Slurm account.")
    qos: OneLine | None = key(None, "Slurm quality of service.")
    constraint: OneLine | None = key(None, "Required node features, in Slurm's syntax.")
    exclude: OneLine | None = key(None, "Nodes to exclude, as a Slurm host list.")
    reservation: OneLine | None = key(None, "Slurm reservation.")
    gpu_type: str | None = key(
        None,
        "GPU type, as named in Slurm. A list such as h100,a100 requests whichever type becomes available "
        "first.",
        pattern=r"^[A-Za-z0-9_.-]+( *, *[A-Za-z0-9_.-]+)*$",
        allowed="a GPU type, or a comma-separated list of GPU types such as h100,a100",
    )
    comment: OneLine | None = key(None, "Comment that Slurm stores with the job.")
    mail_user: OneLine | None = key(None, "Recipient of Slurm's emails.")
    mail_type: OneLine | None = key(None, "Job events for which Slurm sends emails.")
    extra: dict[OptionName, OneLine | int | bool] = key(
        {}, "Other sbatch options, by their long names; the value true sets an option that takes no value."
    )
    spare_nodes: NotNegative = key(
        0, "Number of additional nodes to allocate as replacements for nodes that fail."
    )

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """Return the GPU types that are acceptable for the job."""
        return () if self.gpu_type is None else tuple(map(str.strip, self.gpu_type.split(",")))

    @property
    def job_time(self) -> str | None:
        """Return the time limit of one job."""
        return self.slice or self.time

    @property
    def node_counts(self) -> Sequence[int]:
        """Return the node counts that are acceptable for the job, in ascending order."""
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
        "auto", "Where the job runs; auto uses Slurm if it is available, otherwise this machine."
    )
    cluster: OneLine | None = key(
        None, "Name of the cluster profile; null detects the profile of this cluster."
    )
    per: Literal["gpu", "node"] = key("gpu", "Whether Slurm starts one task per GPU or one per node.")
    env: dict[str, str] = key({}, "Environment variables for every process.")
    modules: tuple[OneLine, ...] = key((), "Environment modules to load.")
    python: OneLine | None = key(
        None,
        "Python interpreter; null uses the interpreter of the venv, conda, uv or container "
        "setting, or the interpreter that runs trainkit.",
    )
    venv: OneLine | None = key(None, "Virtual environment to activate.")
    conda: OneLine | None = key(None, "Conda environment to activate (experimental).")
    uv: OneLine | None = key(None, "Folder of the uv project whose environment is used.")
    container: OneLine | None = key(None, "Container image to run in (experimental).")
    container_runtime: Literal["auto", "apptainer", "pyxis"] = key(
        "auto", "Container runtime; auto uses the runtime available on the cluster."
    )
    container_mounts: tuple[OneLine, ...] = key((), "Folders to mount in the container, as SRC:DST.")
    setup: tuple[str, ...] = key((), "Shell lines to run before the processes start.")
    network: str = key(
        "auto", "Network preset (auto, ib, socket, debug), or the name of a network interface.", min_length=1
    )
    numa: Literal["auto", "none"] = key(
        "auto",
        "CPU binding; auto binds each rank of trainkit's trainer to the allowed CPUs closest to its GPU.",
    )
    srun_extra: dict[OptionName, OneLine | int | bool] = key(
        {}, "Other srun options, by their long names; the value true sets an option that takes no value."
    )
    secrets: tuple[VariableName, ...] = key(
        ("HF_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD"),
        "Names of environment variables whose values are passed to the job but never written to the run "
        "folder.",
    )
    snapshot: bool = key(
        True,
        "Copy the code to the run folder and train from the copy. Without Slurm, the code is copied only "
        "for a COMMAND.",
    )


class RequeueConfig(Section):
    """Settings for the automatic restart of an interrupted run."""

    on: tuple[Literal["preempted", "timeout", "node_fail", "crash", "hang"], ...] = key(
        ("preempted", "timeout", "node_fail", "crash", "hang"),
        "Causes of interruption that trigger an automatic restart.",
    )
    max: NotNegative = key(
        100,
        "Maximum number of restarts of a run; restarts at the end of a slice (see "
        "resources.slice) are not counted.",
    )
    max_crashes: NotNegative = key(
        3, "Maximum number of consecutive restarts after crashes without progress in between."
    )
    signal: Literal["auto", "USR2", "TERM"] = key(
        "auto",
        "Stop signal that the processes receive before the job is killed. auto sends USR2 to trainkit's "
        "trainer, "
        "and TERM or USR2 to a COMMAND, depending on which of the two the COMMAND handles. USR1 is not "
        "allowed, because NCCL catches it.",
    )
    grace_s: Positive = key(120.0, "Seconds between the stop signal and the end of the job.")
    hang_factor: Positive | None = key(
        20.0,
        "A step is considered hung if it takes this many times the median step time, and at least "
        "`requeue.hang_min_s`; null disables this check.",
    )
    hang_min_s: Positive = key(300.0, "Minimum duration in seconds before a step is considered hung.")
    inspect_s: Positive | None = key(
        600.0,
        "Inspect a COMMAND after this many seconds without output from any rank. The inspection reports "
        "whether the COMMAND has printed nothing so far or is waiting for a lock file. null "
        "disables the inspection.",
    )
    silence_s: Positive | None = key(
        None, "Consider a COMMAND hung after this many seconds without output; null disables this check."
    )
    slow_hosts: Literal["ignore", "exclude", "restart"] = key(
        "ignore",
        "What to do about hosts with slow ranks (Slurm only). exclude stops using these hosts from the next "
        "restart on. restart immediately saves a checkpoint and restarts without these hosts, on spare "
        "nodes or, if resources.nodes is a range, on fewer nodes.",
    )
    slow_after_s: Positive = key(
        300.0,
        "Seconds that a rank must stay slow before the run is restarted because of slow_hosts: restart.",
    )
    follow_ups: NotNegative = key(
        0,
        "Number of follow-up jobs to submit in advance as a chain, for clusters whose nodes "
        "lack scontrol and sbatch.",
    )


WEBHOOK_VARIABLE = "TRAINKIT_WEBHOOK_URL"
"""Default of `notify.webhook`: the name of an environment variable. Despite its prefix, the variable sets no
config key.
"""


MAIL_TYPES = {"finished": "END", "failed": "FAIL", "requeued": "REQUEUE"}
"""Maps an event of `notify.on` to Slurm's --mail-type value."""


class NotifyConfig(Section):
    """Events that the run reports to a webhook or by email."""

    on: tuple[Literal["finished", "failed", "requeued", "stalled", "slow"], ...] = key(
        ("finished", "failed", "requeued", "stalled"),
        "Events to report. finished: the run has finished; failed: the run stopped without finishing; "
        "requeued: the run restarts; stalled: there is no progress, no output or no new "
        "checkpoint; slow: one rank slows down the run.",
    )
    webhook: str | None = key(
        WEBHOOK_VARIABLE,
        "Name of the environment variable that contains the URL of the webhook. The URL is a "
        "secret. If the variable is not set, or the key is null, no webhook is used.",
        allowed="the name of an environment variable, or null",
    )
    mail: OneLine | None = key(
        None, "Recipient of emails from Slurm about the events in notify.on, except stalled and slow."
    )
    min_interval_s: NotNegative = key(
        600, "Minimum seconds between two reports of the same event; finished and failed are always reported."
    )
    stalled_after_s: Positive = key(
        1800.0, "Report a run as stalled after this many seconds without progress."
    )


class MlflowConfig(Section):
    """Settings for logging metrics to MLflow."""

    tracking_uri: OneLine | None = key(
        None,
        "URL of a server or database, or a folder for a SQLite store, relative to the working directory of "
        "the command. null uses MLFLOW_TRACKING_URI if it is set, otherwise mlflow/ next to the run folder.",
    )
    experiment: OneLine | None = key(
        None,
        "Name of the experiment; null uses MLFLOW_EXPERIMENT_NAME if it is set, otherwise "
        "the name of the run.",
    )


class WandbConfig(Section):
    """Settings for logging metrics to Weights & Biases."""

    project: OneLine | None = key(
        None, "Name of the project; null uses WANDB_PROJECT if it is set, otherwise trainkit."
    )
    entity: OneLine | None = key(
        None, "User or team; null uses WANDB_ENTITY if it is set, otherwise your default entity."
    )
    mode: Literal["online", "offline"] = key(
        "online",
        "online uploads the metrics; offline writes them to wandb/ in the run folder, for `wandb sync`.",
    )


class LoggingConfig(Section):
    """Settings for where metrics are logged in addition to metrics.jsonl."""

    tensorboard: bool | Literal["auto"] = key(
        "auto",
        "Write TensorBoard files. auto writes them if TensorBoard is installed; true requires TensorBoard.",
    )
    health_every_s: Positive | None = key(
        10.0,
        "Interval in seconds at which the usage of the processors, memory, network, disks and GPUs of each "
        "node is measured and written to health/ in the run folder; null disables the measurements.",
    )
    pattern: str | None = key(
        "auto",
        "How to read a COMMAND's metrics from the log of rank 0: auto recognizes common formats, null reads "
        "none, and a regular expression must have a group named step and may have other groups such as "
        "loss, lr and val_loss.",
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
        """Map the name of each enabled experiment tracker to its settings.

        A tracker's name is also the name of its Python module and of its pip extra.
        """
        found: dict[str, MlflowConfig | WandbConfig] = {}
        if self.mlflow:
            found["mlflow"] = MlflowConfig() if self.mlflow is True else self.mlflow
        if self.wandb:
            found["wandb"] = WandbConfig() if self.wandb is True else self.wandb
        return found


class ProfilerConfig(Section):
    """Selects the steps to record with the PyTorch profiler."""

    start_step: AtLeastOne | None = key(None, "First step to profile; null disables the profiler.")
    num_steps: AtLeastOne = key(5, "Number of steps to profile.")
    memory: bool = key(
        False, "Also record every GPU memory allocation with its stack trace, for PyTorch's memory_viz."
    )
    ranks: tuple[Annotated[int, Field(ge=0)], ...] = key((0,), "Ranks to profile.")


class EmaConfig(Section):
    """Settings for the exponential moving average of the weights."""

    decay: Annotated[float, Field(gt=0, lt=1)] | None = key(
        None,
        "Average the float32 weights during training: an update multiplies the average by decay, and adds "
        "1 - decay times the weights. null computes no average.",
        allowed="a number above 0 and below 1",
    )
    every: AtLeastOne = key(1, "Number of steps between updates of the average.")


class ReplicasConfig(Section):
    """Settings for comparing the replicas of the model."""

    compare_every: AtLeastOne | None = key(
        1000,
        "Number of steps between comparisons of the weights across the ranks of dp_replicate, which must be "
        "bit-identical; null disables the comparison.",
    )
    on_difference: Literal["warn", "stop"] = key(
        "warn",
        "What to do if the weights of a rank differ from its replicas: warn continues the run, and stop ends "
        "the run with exit code 78, without saving a checkpoint.",
    )


class KeepBestConfig(Section):
    """The metric of the evaluations that selects the checkpoint to keep."""

    metric: MetricName
    mode: Literal["min", "max"] = "max"


class EvaluationResourcesConfig(Section):
    """Resources of the Slurm job that evaluates a checkpoint."""

    gpus: NotNegative = key(0, "Number of GPUs of the job, on one node.")
    cpus: AtLeastOne = key(1, "Number of CPU cores of the job.")
    mem: SlurmMemory | None = key(None, "Memory of the job, such as 64G; null uses the cluster's default.")
    time: SlurmTime = key("01:00:00", "Time limit of the job, in Slurm's format.")
    partition: OneLine | None = key(None, "Slurm partition; null uses resources.partition.")
    account: OneLine | None = key(None, "Slurm account; null uses resources.account.")
    qos: OneLine | None = key(None, "Slurm quality of service; null uses resources.qos.")
    extra: dict[OptionName, OneLine | int | bool] = key(
        {}, "Other sbatch options, by their long names; the value true sets an option that takes no value."
    )


class OnCheckpointConfig(Section):
    """A command that evaluates each checkpoint while the training continues."""

    command: str | None = key(
        None,
        "Command, run by bash in the folder of the submission, that evaluates the checkpoint in "
        "TRAINKIT_CHECKPOINT and writes its metrics as a JSON object to the file TRAINKIT_EVAL_OUT. "
        "TRAINKIT_STEP is the step, and TRAINKIT_RUN_DIR is the run folder. null evaluates no checkpoint.",
        min_length=1,
        allowed="a command, or null",
    )
    every: AtLeastOne = key(1, "Evaluate every N-th checkpoint that the run publishes.")
    export: Literal["hf"] | None = key(
        None,
        "hf first exports the model like `trainkit ckpt export`, to the folder TRAINKIT_EXPORT, which is "
        "deleted after the evaluation.",
    )
    resources: EvaluationResourcesConfig = section(
        "Resources of the Slurm job that evaluates a checkpoint. Without Slurm, evaluations run on this "
        "machine, one at a time."
    )
    keep_best_by: KeepBestConfig | None = key(
        None,
        "Keep the checkpoint with the best value of a metric that the command writes: `metric`, and `mode` "
        "(max or min).",
        allowed="a mapping with metric and mode,",
    )
    max_waiting: AtLeastOne = key(
        4,
        "Maximum number of evaluations of a run that wait or run. If there are more, a new evaluation "
        "replaces the oldest waiting one, which is skipped.",
    )
