"""The sections that decide where and how it is computed: layout, checkpoints, resources, launch, requeue."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from trainkit.config.section import AtLeastOne, NotNegative, Positive, Section, list_field

PipelineSchedule = Literal[
    "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipe_v"
]
DataParallelDegree = Literal[-1] | AtLeastOne
OneLine = Annotated[
    str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", json_schema_extra={"allowed": "one line of text"})
]
OptionName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
SLURM_TIME = r"^(\d+-\d{1,2}(:\d{1,2}){0,2}|\d+(:\d{1,2}){0,2})$"


class ParallelConfig(Section):
    """How the processes share the work; the product of the degrees is the number of processes."""

    dp_replicate: DataParallelDegree = Field(
        default=1, description="Copies of the model; -1 takes what the other degrees leave."
    )
    dp_shard: DataParallelDegree = Field(
        default=-1, description="Processes a copy is sharded over; -1 takes what the other degrees leave."
    )
    tp: AtLeastOne = Field(default=1, description="Tensor-parallel degree.")
    pp: AtLeastOne = Field(default=1, description="Pipeline stages.")
    cp: AtLeastOne = Field(default=1, description="Context-parallel degree.")
    sequence_parallel: bool = Field(
        default=True, description="Split norms over the sequence under tensor parallel."
    )
    loss_parallel: bool = Field(
        default=True, description="Split the loss over the vocabulary under tensor parallel."
    )
    zero: Literal[2, 3] = Field(
        default=3,
        description="What dp_shard splits: 3 parameters, gradients and optimizer state; 2 keeps parameters"
        " that were gathered for the forward pass until the backward pass.",
    )
    pp_schedule: PipelineSchedule = Field(
        default="1f1b", description="Order of the microbatches in the pipeline."
    )
    pp_microbatches: AtLeastOne = Field(
        default=4,
        description="Microbatches that a pipeline cuts a device batch into, adapted to it unless set.",
    )
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        default="none",
        description="Which activations are computed again in the backward pass instead of kept.",
    )
    compile: bool = Field(default=False, description="Compile every decoder block with torch.compile.")
    offload: bool = Field(default=False, description="Keep parameters and optimizer state in host memory.")


class CheckpointConfig(Section):
    """When the state is saved and how much of it is kept."""

    every_steps: AtLeastOne | None = Field(
        default=100, description="Steps between checkpoints; null for none."
    )
    every_minutes: Positive | None = Field(
        default=None, description="Minutes between checkpoints; null for none."
    )
    keep_last: AtLeastOne = Field(default=3, description="Newest checkpoints kept, besides the best one.")
    best_metric: Literal["val_loss", "loss"] | None = Field(
        default="val_loss",
        description="Metric whose lowest value marks the best checkpoint; null keeps no best. `loss` is that"
        " of the step at which a checkpoint is due.",
    )
    async_save: bool = Field(default=True, alias="async", description="Write checkpoints in the background.")


class ResourcesConfig(Section):
    """What the run asks of the cluster; keys that only Slurm knows have no effect without it."""

    nodes: AtLeastOne = Field(default=1, description="Number of nodes.")
    gpus_per_node: AtLeastOne | Literal["auto"] = Field(
        default="auto",
        description="Training processes a node: one a GPU, or CPU workers where there is no GPU.",
    )
    cpus_per_gpu: AtLeastOne | Literal["auto"] = Field(
        default="auto", description="CPU cores a training process."
    )
    mem: str | None = Field(
        default=None,
        pattern=r"^\d+[KMGT]?$",
        description="Memory a node, as Slurm writes it.",
        json_schema_extra={"allowed": 'an amount such as "64G"'},
    )
    time: str | None = Field(
        default="01:00:00",
        pattern=SLURM_TIME,
        description="Time limit of a job, as Slurm writes it.",
        json_schema_extra={"allowed": 'a time in quotes, such as "01:00:00" or "2-12:00:00"'},
    )
    partition: OneLine | None = Field(default=None, description="Slurm partition.")
    account: OneLine | None = Field(default=None, description="Slurm account.")
    qos: OneLine | None = Field(default=None, description="Slurm quality of service.")
    constraint: OneLine | None = Field(default=None, description="Node features that Slurm must match.")
    exclude: OneLine | None = Field(default=None, description="Nodes that Slurm must not use.")
    reservation: OneLine | None = Field(default=None, description="Slurm reservation.")
    gpu_type: str | None = Field(
        default=None, pattern=r"^[A-Za-z0-9_.-]+$", description="Type of the GPUs, as the cluster calls it."
    )
    comment: OneLine | None = Field(default=None, description="Words that Slurm keeps with the job.")
    mail_user: OneLine | None = Field(default=None, description="Address that Slurm writes mail to.")
    mail_type: OneLine | None = Field(default=None, description="Events that Slurm writes mail about.")
    extra: dict[OptionName, OneLine | int | bool] = Field(
        default={},
        description="Further sbatch options by their long names; true stands for an option without a value.",
    )
    spare_nodes: NotNegative = Field(
        default=0, description="Nodes that the job gets beyond `nodes`, to stand in for those that fail."
    )


class LaunchConfig(Section):
    """How the processes are started."""

    backend: Literal["auto", "sbatch", "submitit", "local"] = Field(
        default="auto",
        description="What starts the job; auto is Slurm where there is one, else this machine.",
    )
    cluster: OneLine | None = Field(
        default=None, description="Cluster profile, by name; null takes that of the cluster here."
    )
    per: Literal["gpu", "node"] = Field(
        default="gpu", description="A Slurm task for every GPU or one for a node."
    )
    env: dict[str, str] = Field(default={}, description="Environment variables of every process.")
    modules: tuple[OneLine, ...] = list_field((), "Environment modules to load.")
    python: OneLine | None = Field(
        default=None,
        description="Interpreter of the processes; null takes that of venv, conda, uv or container.",
    )
    venv: OneLine | None = Field(default=None, description="Virtual environment to activate.")
    conda: OneLine | None = Field(default=None, description="Conda environment to activate.")
    uv: OneLine | None = Field(default=None, description="Folder of a uv project whose environment is used.")
    container: OneLine | None = Field(default=None, description="Container image to run in.")
    container_runtime: Literal["auto", "apptainer", "pyxis"] = Field(
        default="auto", description="What runs the container; auto takes what the cluster has."
    )
    container_mounts: tuple[OneLine, ...] = list_field((), "Folders to mount into the container, as SRC:DST.")
    setup: tuple[str, ...] = list_field((), "Shell lines to run before the processes start.")
    network: str = Field(
        default="auto",
        min_length=1,
        description="Preset for traffic between nodes (auto, ib, socket, debug), or an interface's name.",
    )
    srun_extra: dict[OptionName, OneLine | int | bool] = Field(
        default={}, description="Further srun options by their long names, as in resources.extra."
    )
    secrets: tuple[VariableName, ...] = list_field(
        ("HF_TOKEN", "WANDB_API_KEY"), "Variables that reach the job but no file of the run."
    )
    snapshot: bool = Field(
        default=True, description="On Slurm: copy the code into the run folder and train from the copy."
    )


class RequeueConfig(Section):
    """When a run that ended early starts again by itself."""

    on: tuple[Literal["preempted", "timeout", "node_fail", "crash", "hang"], ...] = list_field(
        ("preempted", "timeout", "node_fail", "crash", "hang"), "Ends after which the run starts again."
    )
    max: NotNegative = Field(default=100, description="Most restarts of a run.")
    max_crashes: NotNegative = Field(default=3, description="Most restarts after a crash without progress.")
    signal: Literal["USR2", "TERM"] = Field(
        default="USR2", description="Signal that announces the end; not USR1, which NCCL catches."
    )
    grace_s: Positive = Field(default=120.0, description="Seconds from that signal to the end.")
    hang_factor: Positive | None = Field(
        default=20.0,
        description="A step hangs when it takes this many times as long as usual; null for never.",
    )
    hang_min_s: Positive = Field(
        default=300.0, description="No step counts as hanging before this many seconds."
    )
    follow_ups: NotNegative = Field(
        default=0,
        description="Jobs that wait in the queue to continue the run, for nodes without scontrol.",
    )


class LoggingConfig(Section):
    """Where metrics go besides metrics.jsonl."""

    tensorboard: bool = Field(default=True, description="Write TensorBoard event files.")
    mlflow: JsonValue = Field(default=None, description="MLflow settings.")
    wandb: JsonValue = Field(default=None, description="Weights & Biases settings.")


class ProfilerConfig(Section):
    """A window of steps recorded with the torch profiler."""

    start_step: AtLeastOne | None = Field(
        default=None, description="First step of the window; null records none."
    )
    num_steps: AtLeastOne = Field(default=5, description="Steps in the window.")
    ranks: tuple[Annotated[int, Field(ge=0)], ...] = list_field((0,), "Ranks that record.")
