"""The sections that decide what is computed: model, data, training, optimizer, schedule, precision."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trainkit.config.section import AtLeastOne, BelowOne, Fraction, NotNegative, Positive, Section, list_field

Preset = Literal["nano", "tiny", "mini", "60m", "125m", "350m", "1b", "3b", "7b", "8b", "13b", "70b"]


class ModelConfig(Section):
    """The model: a preset, and what differs from it."""

    architecture: str = Field(
        default="llama",
        pattern=r"^(llama|.+\.py:[A-Za-z_][A-Za-z0-9_]*)$",
        description="llama, or FILE.py:CLASS of your own, a subclass of trainkit.trainer.models.model.Model.",
        json_schema_extra={"allowed": "llama or FILE.py:CLASS"},
    )
    preset: Preset = Field(
        default="tiny", description="Named size that every size left at null is taken from."
    )
    vocab_size: AtLeastOne | None = Field(
        default=None,
        description="Rows of the embedding; null takes the tokenizer's, rounded up to a multiple of 64.",
    )
    dim: AtLeastOne | None = Field(default=None, description="Width of the residual stream.")
    num_layers: AtLeastOne | None = Field(default=None, description="Number of decoder blocks.")
    num_heads: AtLeastOne | None = Field(default=None, description="Number of query heads; divides dim.")
    num_kv_heads: AtLeastOne | None = Field(
        default=None, description="Number of key and value heads; divides num_heads."
    )
    ffn_dim: AtLeastOne | None = Field(default=None, description="Hidden width of the feed-forward network.")
    norm_eps: Positive | None = Field(default=None, description="Epsilon of every RMSNorm.")
    rope_theta: Positive | None = Field(default=None, description="Base of the rotary position embedding.")
    dropout: BelowOne = Field(
        default=0.0, description="Probability of dropping a residual branch's output value."
    )
    tie_embeddings: bool = Field(
        default=False, description="Use the embedding also as the output projection."
    )
    hf: str | None = Field(
        default=None, description="Folder of a Hugging Face model to train instead of a preset."
    )
    init_from: str | None = Field(default=None, description="Checkpoint whose weights the model starts from.")


class DataConfig(Section):
    """What the model reads."""

    source: str | list[str] = Field(
        default="stdlib",
        description="Files or folders of .txt, .jsonl or prepared shards; stdlib is the embedded corpus.",
    )
    val_source: str | list[str] | None = Field(
        default=None, description="Validation files; null splits val_fraction off the source."
    )
    tokenizer: str = Field(
        default="bytes", description="bytes, or the path of a Hugging Face tokenizer.json."
    )
    text_key: str = Field(
        default="text", min_length=1, description="Key of the text in a line of a .jsonl file."
    )
    seq_len: AtLeastOne = Field(default=256, description="Tokens the model reads in one sample.")
    num_workers: NotNegative = Field(
        default=2, description="Threads that read ahead in every training process."
    )
    val_fraction: BelowOne = Field(default=0.01, description="Share of the source kept for validation.")
    shuffle: bool = Field(default=True, description="Read the samples of an epoch in a random order.")
    cache_dir: str | None = Field(
        default=None, description="Folder for tokenized data; null is the user's cache."
    )


class TrainConfig(Section):
    """The length of the run and the size of a step."""

    steps: AtLeastOne | None = Field(
        default=200, description="Optimizer steps of the whole run; null when epochs is given."
    )
    epochs: Positive | None = Field(
        default=None, description="Passes over the training data, in place of steps; fractions are allowed."
    )
    stop_at_step: AtLeastOne | None = Field(
        default=None, description="Save after this step and end with exit code 75, to cut a run into slices."
    )
    device_batch_size: AtLeastOne = Field(
        default=8,
        description="Samples a process computes at once; fewer where the global batch needs it, unless set.",
    )
    global_batch_size: AtLeastOne | None = Field(
        default=32,
        description="Samples of one optimizer step over all processes, adapted to the layout unless set;"
        " null means no accumulation.",
    )
    grad_clip: Positive | None = Field(
        default=1.0, description="Largest global norm of the gradient; null does not clip."
    )
    eval_every: AtLeastOne | None = Field(
        default=50, description="Steps between validations; null never validates."
    )
    eval_batches: AtLeastOne | None = Field(
        default=None, description="Most batches of device_batch_size read in one validation; null reads all."
    )
    eval_at_start: bool = Field(default=True, description="Validate once before the first step.")
    log_every: AtLeastOne = Field(default=10, description="Steps between log lines.")
    max_nonfinite_steps: AtLeastOne = Field(
        default=5,
        description="Steps in a row with a loss or gradient that is not finite before the run stops.",
    )
    deterministic: bool = Field(
        default=False, description="Use only kernels that give the same bits every time."
    )


class OptimizerConfig(Section):
    """The optimizer and its learning rate."""

    name: Literal["adamw", "adamw_8bit"] = Field(default="adamw", description="Optimizer.")
    lr: Positive = Field(default=3.0e-4, description="Peak learning rate, before lr_scale.")
    lr_scale: Literal["none", "linear", "sqrt"] = Field(
        default="none", description="How the learning rate grows with the data-parallel size."
    )
    lr_scale_base: AtLeastOne = Field(default=1, description="Data-parallel size that lr was tuned for.")
    weight_decay: float = Field(default=0.1, ge=0, description="Decoupled weight decay of matrices.")
    betas: tuple[BelowOne, BelowOne] = list_field((0.9, 0.95), "Decay rates of the two moments.")
    eps: Positive = Field(default=1.0e-8, description="Added to the root of the second moment.")


class ScheduleConfig(Section):
    """The learning rate over the steps."""

    name: Literal["cosine", "linear", "wsd", "constant"] = Field(
        default="cosine", description="Shape after the warm-up; wsd is constant with a decay at the end."
    )
    warmup_steps: NotNegative = Field(
        default=20, description="Steps over which the rate rises linearly from 0."
    )
    min_lr_ratio: Fraction = Field(default=0.1, description="Last learning rate as a share of the peak.")
    decay_steps: AtLeastOne | None = Field(
        default=None, description="Steps of the decay at the end (wsd only); null is a fifth of the run."
    )


class PrecisionConfig(Section):
    """The numbers that are computed with."""

    dtype: Literal["fp32", "bf16", "fp16"] = Field(
        default="bf16", description="Type of activations and gradients; the master weights are fp32."
    )
    init_loss_scale: Positive = Field(default=65536.0, description="First loss scale (fp16 only).")
    loss_scale_growth_interval: AtLeastOne = Field(
        default=2000, description="Steps without overflow before the loss scale doubles (fp16 only)."
    )
    float8: bool = Field(
        default=False,
        description="Multiply the matrices of the blocks in float8; needs torchao and a GPU that has it.",
    )
