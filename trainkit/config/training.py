"""Config sections for what a run computes: model, data, training, optimizer, schedule, precision."""

from typing import Annotated, Literal

from pydantic import Field

from trainkit.config.section import AtLeastOne, BelowOne, Fraction, NotNegative, Positive, Section, list_field
from trainkit.formats import JsonObject

DECODER, TRANSFORMERS = "llama", "transformers"
"""The architecture whose rules and memory are known without running its code, and any of that library."""
RopeKey = Literal["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
Preset = Literal["nano", "tiny", "mini", "60m", "125m", "350m", "1b", "3b", "7b", "8b", "13b", "70b"]


class ModelConfig(Section):
    """The model: a preset and changes to it."""

    architecture: str = Field(
        default=DECODER,
        pattern=r"^(llama|transformers|.+\.py:[A-Za-z_][A-Za-z0-9_]*)$",
        description="llama, FILE.py:CLASS for your own subclass of trainkit.trainer.models.model.Model, or"
        " transformers; unset with hf: llama where trainkit's decoder can run the model, else transformers.",
        json_schema_extra={"allowed": "llama, transformers or FILE.py:CLASS"},
    )
    preset: Preset = Field(default="tiny", description="Named model size; it sets every size that is null.")
    vocab_size: AtLeastOne | None = Field(
        default=None,
        description="Vocabulary size; null uses the preset's, or the tokenizer's in steps of 64 if larger.",
    )
    dim: AtLeastOne | None = Field(default=None, description="Width of the residual stream.")
    num_layers: AtLeastOne | None = Field(default=None, description="Number of decoder blocks.")
    num_heads: AtLeastOne | None = Field(default=None, description="Number of query heads; must divide dim.")
    num_kv_heads: AtLeastOne | None = Field(
        default=None, description="Number of key and value heads; must divide num_heads."
    )
    ffn_dim: AtLeastOne | None = Field(default=None, description="Hidden size of the feed-forward network.")
    norm_eps: Positive | None = Field(default=None, description="Epsilon of every RMSNorm.")
    rope_theta: Positive | None = Field(default=None, description="Base of the rotary position embedding.")
    rope_scaling: dict[RopeKey, Positive] | None = Field(
        default=None, description="How Llama 3.1 stretches the rotary position embedding to longer contexts."
    )
    qkv_bias: bool = Field(default=False, description="Biases of queries, keys and values, as in Qwen2.")
    dropout: BelowOne = Field(
        default=0.0, description="Dropout probability at the output of each residual branch."
    )
    tie_embeddings: bool = Field(
        default=False, description="Share the weights of the embedding and the output projection."
    )
    hf: str | None = Field(
        default=None,
        description="Hugging Face model to train instead of a preset: its folder, or the name of a"
        " downloaded one.",
    )
    from_scratch: bool = Field(
        default=False, description="Use only the architecture of hf, and initialise the weights."
    )
    lora: JsonObject | None = Field(
        default=None,
        description="Train low-rank adapters of hf, or of what your task adapts: the arguments of peft's"
        " LoraConfig, such as r.",
    )
    quantize: Literal["nf4"] | None = Field(
        default=None,
        description="With lora: keep the frozen linear layers in 4 bits, as QLoRA (experimental).",
    )
    init_from: str | None = Field(
        default=None, description="Run folder or checkpoint whose weights a new run starts with."
    )
    init_include: tuple[str, ...] = list_field(
        (), "Patterns of the parameters to take from init_from, such as encoder.*; [] takes all."
    )


class DataConfig(Section):
    """The training and validation data."""

    source: str | list[str] | Annotated[dict[str, Positive], Field(min_length=1)] = Field(
        default="stdlib",
        description="Files or folders of .txt, .jsonl or .parquet, saved Hugging Face datasets, or prepared"
        " shards; stdlib: Python's standard library. A mapping mixes them: {web: 0.7, code: 0.3}.",
        json_schema_extra={"allowed": "a path, a list of paths, or a mapping of paths to weights above 0"},
    )
    val_source: str | list[str] | None = Field(
        default=None, description="Validation files; null holds out val_fraction of the source."
    )
    tokenizer: str = Field(
        default="bytes", description="bytes, or the path of a Hugging Face tokenizer.json."
    )
    text_key: str = Field(
        default="text",
        min_length=1,
        description="Key of the text in each line of a .jsonl file, or column of the text in a table.",
    )
    seq_len: AtLeastOne = Field(default=256, description="Tokens per sample.")
    num_workers: NotNegative = Field(default=2, description="Loader threads per rank; processes for a task.")
    val_fraction: BelowOne = Field(
        default=0.01, description="Fraction of the source held out for validation."
    )
    document_mask: bool = Field(
        default=False, description="Let tokens attend only to tokens of their own document."
    )
    shuffle: bool = Field(default=True, description="Shuffle the samples of each epoch.")
    cache_dir: str | None = Field(
        default=None, description="Folder for tokenized data; null uses your cache folder."
    )


class TrainConfig(Section):
    """The length of the run and its batch sizes."""

    steps: AtLeastOne | None = Field(
        default=200, description="Number of optimizer steps; null if epochs is set."
    )
    epochs: Positive | None = Field(
        default=None, description="Passes over the training data, instead of steps; can be a fraction."
    )
    stop_at_step: AtLeastOne | None = Field(
        default=None, description="Save after this step and exit with code 75; `trainkit resume` continues."
    )
    device_batch_size: AtLeastOne = Field(
        default=8,
        description="Samples per process and accumulation step; reduced to fit the global batch unless set.",
    )
    global_batch_size: AtLeastOne | None = Field(
        default=32,
        description="Samples per optimizer step over all processes, adapted to the layout unless set;"
        " null disables gradient accumulation.",
    )
    grad_clip: Positive | None = Field(
        default=1.0, description="Maximum global gradient norm; null disables clipping."
    )
    eval_every: AtLeastOne | None = Field(
        default=50, description="Steps between validations; null never validates."
    )
    eval_batches: AtLeastOne | None = Field(
        default=None, description="Maximum batches of global_batch_size per validation; null reads all."
    )
    eval_at_start: bool = Field(default=True, description="Validate once before the first step.")
    log_every: AtLeastOne = Field(default=10, description="Steps between log lines.")
    max_nonfinite_steps: AtLeastOne = Field(
        default=5,
        description="Consecutive steps with a non-finite loss or gradient after which the run stops.",
    )
    deterministic: bool = Field(default=False, description="Use only deterministic kernels on GPUs.")


class OptimizerConfig(Section):
    """The optimizer and its learning rate."""

    name: Literal["adamw", "adamw_8bit"] = Field(
        default="adamw", description="Optimizer; adamw_8bit is AdamW with running averages in 8 bits."
    )
    lr: Positive = Field(default=3.0e-4, description="Peak learning rate, before scaling by lr_scale.")
    lr_scale: Literal["none", "linear", "sqrt"] = Field(
        default="none", description="How the learning rate scales with the data-parallel size."
    )
    lr_scale_base: AtLeastOne = Field(default=1, description="Data-parallel size that lr was tuned for.")
    weight_decay: float = Field(default=0.1, ge=0, description="Decoupled weight decay, for matrices only.")
    betas: tuple[BelowOne, BelowOne] = list_field(
        (0.9, 0.95), "Coefficients of the running averages of the gradient and its square."
    )
    eps: Positive = Field(
        default=1.0e-8, description="Term added to the denominator for numerical stability."
    )
    state_dtype: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="Data type in which both running averages are kept; bf16 saves 4 bytes per parameter.",
    )


class ScheduleConfig(Section):
    """The learning rate schedule."""

    name: Literal["cosine", "linear", "wsd", "constant"] = Field(
        default="cosine", description="Shape after warmup; wsd is constant with a decay at the end."
    )
    warmup_steps: NotNegative = Field(default=20, description="Steps of linear warmup from 0.")
    min_lr_ratio: Fraction = Field(default=0.1, description="Final learning rate as a fraction of the peak.")
    decay_steps: AtLeastOne | None = Field(
        default=None, description="Steps of the final decay (wsd only); null uses a fifth of the run."
    )


class PrecisionConfig(Section):
    """The numeric precision."""

    dtype: Literal["fp32", "bf16", "fp16"] = Field(
        default="bf16", description="Data type of activations and gradients; master weights are fp32."
    )
    init_loss_scale: Positive = Field(default=65536.0, description="Initial loss scale (fp16 only).")
    loss_scale_growth_interval: AtLeastOne = Field(
        default=2000,
        description="Consecutive steps without overflow before the loss scale doubles (fp16 only).",
    )
    tf32: bool = Field(
        default=False, description="Multiply matrices in TF32 on a GPU, faster and less exact (fp32 only)."
    )
    float8: bool | Literal["gather", "rowwise"] = Field(
        default=False,
        description="Run the linear layers of decoder blocks in float8; needs torchao and a supported GPU. "
        "`gather` also gathers their sharded weights in float8, with the same losses as `true`. "
        "`rowwise` has a scale for each row instead of one for a matrix: more exact, less fast.",
    )
