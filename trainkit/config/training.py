"""Defines the config sections for the computation: model, data, training, optimizer, schedule, precision."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from trainkit.config.optimizers import OPTIMIZERS, kind_of
from trainkit.config.section import AtLeastOne, BelowOne, Fraction, NotNegative, Positive, Section, key
from trainkit.formats import JsonObject

OPTIMIZER_NAMES = ", ".join(OPTIMIZERS)
DECODER, TRANSFORMERS = "llama", "transformers"
"""Architecture values: trainkit's own decoder, which can be planned without running its code, or any model in
the transformers library."""
RopeType = Literal["llama3", "linear", "yarn"]
RopeKey = Literal[
    "type",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
]
Score = Literal["softmax", "sigmoid"]
Activation = Literal["silu", "gelu_tanh"]
Preset = Literal["nano", "tiny", "mini", "60m", "125m", "350m", "1b", "3b", "7b", "8b", "13b", "70b"]


NewtonSchulzPrecision = Literal["fp32", "tf32x3", "bf16"]


class MoeConfig(Section):
    """Experts that replace the feed-forward network of decoder blocks."""

    num_experts: int = key(8, "Number of experts in each block.", ge=2)
    top_k: AtLeastOne = key(2, "Number of experts that process each token.")
    expert_ffn_dim: AtLeastOne | None = key(
        None, "Hidden size of each expert, a multiple of 8; null uses the value of ffn_dim."
    )
    num_shared: NotNegative = key(
        0, "Number of additional experts that process every token, computed as one feed-forward network."
    )
    first_dense: NotNegative = key(
        0, "Number of blocks, from the first one, that keep a feed-forward network of hidden size ffn_dim."
    )
    score: Score = key(
        "softmax", "How the router turns logits into scores: softmax over all experts, or sigmoid of each."
    )
    norm_topk: bool = key(True, "Divide the scores of a token's chosen experts by their sum.")
    scale: Positive = key(1.0, "Factor of the experts' outputs, not of the shared experts' output.")
    bias_rate: float = key(
        0.001,
        "How much each step changes the bias of an expert, which balances the load without an auxiliary "
        "loss; 0 disables the bias.",
        ge=0,
    )
    aux_coef: float = key(
        0.0,
        "Coefficient of the auxiliary loss that balances the load of each microbatch; 0 disables the loss.",
        ge=0,
    )


class ModelConfig(Section):
    """The model, given as a preset and overrides of the preset's values."""

    architecture: str = key(
        DECODER,
        "llama, FILE.py:CLASS for your own subclass of trainkit.trainer.models.model.Model, or "
        "transformers. If hf is set and architecture is not, the default is llama for models that "
        "trainkit's decoder can run, and transformers for all other models.",
        pattern=r"^(llama|transformers|.+\.py:[A-Za-z_][A-Za-z0-9_]*)$",
        allowed="llama, transformers or FILE.py:CLASS",
    )
    preset: Preset = key("tiny", "Preset model size, which provides the values of all sizes that are null.")
    vocab_size: AtLeastOne | None = key(
        None,
        "Vocabulary size; null uses the larger of the preset's size and the tokenizer's size "
        "rounded up to a multiple of 64.",
    )
    dim: AtLeastOne | None = key(None, "Width of the residual stream.")
    num_layers: AtLeastOne | None = key(None, "Number of decoder blocks.")
    num_heads: AtLeastOne | None = key(None, "Number of query heads; must divide dim unless head_dim is set.")
    num_kv_heads: AtLeastOne | None = key(None, "Number of key and value heads; must divide num_heads.")
    head_dim: AtLeastOne | None = key(None, "Size of each attention head; null uses dim / num_heads.")
    ffn_dim: AtLeastOne | None = key(None, "Hidden size of the feed-forward network.")
    moe: MoeConfig | None = key(
        None,
        "Mixture of experts: `num_experts`, `top_k`, `expert_ffn_dim`, `num_shared`, `first_dense`, `score` "
        "(softmax or sigmoid), `norm_topk`, `scale`, `bias_rate` and `aux_coef`. null trains a dense model.",
        allowed="a mapping with num_experts, top_k, expert_ffn_dim, num_shared, first_dense, score, "
        "norm_topk, scale, bias_rate and aux_coef,",
    )
    norm_eps: Positive | None = key(None, "Epsilon of every RMSNorm.")
    rope_theta: Positive | None = key(None, "Base of the rotary position embedding.")
    rope_scaling: dict[RopeKey, Positive | RopeType] | None = key(
        None,
        "How to extend the rotary position embedding to longer contexts, with the keys of rope_scaling in "
        "transformers, except that `type` replaces rope_type: llama3 (the default, as in Llama 3.1), linear "
        "or yarn.",
        allowed="a mapping with `type` (llama3, linear or yarn) and numbers above 0 for factor, "
        "original_max_position_embeddings, low_freq_factor, high_freq_factor, beta_fast, beta_slow or "
        "attention_factor",
    )
    sliding_window: AtLeastOne | None = key(
        None,
        "Number of positions to which a token attends, counted back from its own position, as in Mistral; "
        "null lets a token attend to all earlier positions.",
    )
    full_attention_every: AtLeastOne | None = key(
        None,
        "With N, every Nth block ignores sliding_window: 2 in Gemma 2, and 6 in Gemma 3. null applies the "
        "window to all blocks.",
    )
    rope_local_theta: Positive | None = key(
        None,
        "Base of the rotary position embedding in blocks with a sliding window, which rope_scaling then does "
        "not affect, as in Gemma 3; null uses rope_theta.",
    )
    query_pre_attn_scalar: Positive | None = key(
        None, "Attention scores are divided by the square root of this number; null uses head_dim."
    )
    attention_soft_cap: Positive | None = key(
        None, "Limit c of attention scores s, computed as c * tanh(s / c), as in Gemma 2; null sets no limit."
    )
    logit_soft_cap: Positive | None = key(
        None, "Limit c of logits x, computed as c * tanh(x / c), as in Gemma 2; null sets no limit."
    )
    activation: Activation = key(
        "silu", "Activation of feed-forward networks: silu, or gelu_tanh as in Gemma (not with experts)."
    )
    post_norms: bool = key(
        False,
        "Also apply an RMSNorm to the output of attention and of the feed-forward network, as in Gemma.",
    )
    zero_centered_norms: bool = key(
        False, "Multiply by 1 + weight instead of by the weight in every RMSNorm, as in Gemma."
    )
    scale_embeddings: bool = key(
        False, "Multiply the output of the embedding by the square root of dim, as in Gemma."
    )
    qkv_bias: bool = key(False, "Add biases to the query, key and value projections, as in Qwen2.")
    qk_norm: bool = key(False, "Apply an RMSNorm to each query and key head, as in Qwen3.")
    dropout: BelowOne = key(0.0, "Dropout probability at the output of each residual branch.")
    tie_embeddings: bool = key(False, "Share the weights of the embedding and the output projection.")
    hf: str | None = key(
        None,
        "Hugging Face model to train instead of a preset: its folder, or the Hub name of a downloaded model.",
    )
    from_scratch: bool = key(
        False, "Use only the architecture of the hf model, and initialize the weights randomly."
    )
    lora: JsonObject | None = key(
        None,
        "Train low-rank adapters for the hf model, or for the modules that your task adapts. The entries "
        "are arguments of peft's LoraConfig, such as r.",
    )
    quantize: Literal["nf4"] | None = key(
        None, "Quantize the frozen linear layers to 4 bits, as QLoRA does; requires lora (experimental)."
    )
    init_from: str | None = key(
        None, "Run folder or checkpoint that provides the initial weights of a new run."
    )
    init_include: tuple[str, ...] = key(
        (), "Patterns of the parameters to load from init_from, such as encoder.*; [] loads all parameters."
    )
    init_weights: Literal["ema"] | None = key(
        None, "Load the average of the weights from init_from (see `ema.decay`) instead of the weights."
    )


class DataConfig(Section):
    """The training and validation data."""

    source: str | list[str] | Annotated[dict[str, Positive], Field(min_length=1)] = key(
        "stdlib",
        "Files or folders of .txt, .jsonl or .parquet, saved Hugging Face datasets, or prepared "
        "shards; stdlib reads Python's standard library. A mapping such as {web: 0.7, code: 0.3} mixes "
        "sources by weight.",
        allowed="a path, a list of paths, or a mapping of paths to weights above 0",
    )
    val_source: str | list[str] | None = key(
        None, "Validation data; null holds out the fraction val_fraction of the source."
    )
    tokenizer: str = key("bytes", "bytes, or the path of a Hugging Face tokenizer.json.")
    text_key: str = key(
        "text",
        "Name of the key (.jsonl) or column (tables) that contains the text.",
        min_length=1,
    )
    seq_len: AtLeastOne = key(256, "Tokens per sample.")
    num_workers: NotNegative = key(
        2, "Number of data loading threads per rank, or of worker processes if `task` is not causal_lm."
    )
    val_fraction: BelowOne = key(0.01, "Fraction of the source held out for validation.")
    document_mask: bool = key(False, "Let tokens attend only to tokens of the same document.")
    shuffle: bool = key(True, "Shuffle the samples of each epoch.")
    cache_dir: str | None = key(
        None, "Folder for tokenized data; null uses trainkit/data in your cache folder (by default ~/.cache)."
    )


class WarmupStage(Section):
    """The global batch size of the first steps."""

    steps: int = Field(ge=1)
    global_batch_size: int = Field(ge=1)


class SpikeConfig(Section):
    """The rule for a loss spike, after which the run goes back to an earlier checkpoint."""

    factor: float = key(2.0, "A loss is high if it exceeds this factor times the median of the window.", gt=1)
    window_steps: int = key(
        100, "Number of the last losses that were not high, of which the median is computed.", ge=1, le=1000
    )
    patience_steps: AtLeastOne = key(
        5, "Go back after this many consecutive steps with a high or non-finite loss."
    )
    max_rollbacks: AtLeastOne = key(3, "Fail instead if the run has already gone back this many times.")


class TrainConfig(Section):
    """The length of the run, and its batch sizes."""

    steps: AtLeastOne | None = key(200, "Number of optimizer steps; null if epochs is set.")
    epochs: Positive | None = key(
        None, "Number of passes over the training data, as an alternative to steps; can be fractional."
    )
    stop_at_step: AtLeastOne | None = key(
        None,
        "Save a checkpoint after this step, and exit with exit code 75; `trainkit resume` continues the run.",
    )
    device_batch_size: AtLeastOne = key(
        8,
        "Number of samples per process and accumulation step. The default is reduced if it exceeds the "
        "process's share of the global batch size.",
    )
    global_batch_size: AtLeastOne | None = key(
        32,
        "Number of samples per optimizer step, across all processes. The default is adjusted to the layout; "
        "null disables gradient accumulation.",
    )
    batch_warmup: tuple[WarmupStage, ...] = key(
        (),
        "Global batch sizes of the first steps, such as [{steps: 500, global_batch_size: 8}, {steps: 500, "
        "global_batch_size: 16}]. After these stages, each step has global_batch_size samples. Not supported "
        "with pipeline parallelism.",
        allowed="a list of mappings with `steps` and `global_batch_size` (integers of at least 1)",
    )
    z_loss: float = key(
        0.0,
        "Coefficient of the squared logarithm of the softmax denominator, whose gradient is added to the "
        "gradient of the loss to keep logits small; 0 disables the z-loss. The logged loss does not contain "
        "the z-loss.",
        ge=0,
    )
    grad_clip: Positive | None = key(1.0, "Maximum global gradient norm; null disables clipping.")
    eval_every: AtLeastOne | None = key(50, "Steps between validations; null disables validation.")
    eval_batches: AtLeastOne | None = key(
        None, "Maximum number of batches of global_batch_size per validation; null reads all batches."
    )
    eval_at_start: bool = key(True, "Validate once before the first step.")
    log_every: AtLeastOne = key(10, "Number of steps between log lines.")
    max_nonfinite_steps: AtLeastOne = key(
        5, "Stop the run after this many consecutive steps with a non-finite loss or gradient."
    )
    spike: SpikeConfig | None = key(
        None,
        "Go back to the newest checkpoint before a loss spike, and leave out the samples up to the end of "
        "the spike: `factor`, `window_steps`, `patience_steps` and `max_rollbacks`. A spike is a loss that "
        "exceeds factor (2) times the median of the last window_steps (100) losses, or is not finite, for "
        "patience_steps (5) consecutive steps. After max_rollbacks (3) rollbacks, the run fails at the next "
        "spike. null never goes back.",
        allowed="a mapping with factor, window_steps, patience_steps and max_rollbacks,",
    )
    deterministic: bool = key(False, "Use only deterministic kernels on GPUs.")


class ParameterGroup(Section):
    """Settings for the parameters whose names match a pattern."""

    match: str = Field(min_length=1)
    lr_scale: float = Field(default=1.0, ge=0)
    weight_decay: float | None = Field(default=None, ge=0)


class OptimizerConfig(Section):
    """The optimizer and its hyperparameters."""

    name: str = key(
        "adamw",
        f"{OPTIMIZER_NAMES}, or FILE.py:CLASS for your own subclass of torch.optim.Optimizer. adamw_8bit is "
        "AdamW with 8-bit optimizer state. muon updates the matrices of the decoder blocks with Muon, and "
        "all other parameters with AdamW.",
        pattern=rf"^({'|'.join(OPTIMIZERS)}|.+\.py:[A-Za-z_][A-Za-z0-9_]*)$",
        allowed=f"{OPTIMIZER_NAMES} or FILE.py:CLASS",
    )
    lr: Positive = key(3.0e-4, "Peak learning rate, before scaling by lr_scale.")
    lr_scale: Literal["none", "linear", "sqrt"] = key(
        "none", "How the learning rate is scaled with the data-parallel size."
    )
    lr_scale_base: AtLeastOne = key(1, "Data-parallel size for which lr was tuned.")
    weight_decay: float = key(0.1, "Decoupled weight decay, applied only to matrices.", ge=0)
    groups: tuple[ParameterGroup, ...] = key(
        (),
        'Settings for parameters by name, such as {match: "*norm*", lr_scale: 0.1, weight_decay: 0.0}. The '
        "first entry whose pattern matches a parameter applies. lr_scale multiplies the learning rate. If "
        "weight_decay is null, optimizer.weight_decay applies to matrices.",
        allowed="a list of mappings with `match` (a pattern of parameter names), `lr_scale` and "
        "`weight_decay` (numbers of at least 0)",
    )
    betas: tuple[BelowOne, BelowOne] = key(
        (0.9, 0.95),
        "Coefficients of the running averages of the gradient and its square, as in torch.optim.AdamW. For "
        "lion, the coefficients of the update and of the running average; the default is then [0.9, 0.99].",
    )
    eps: Positive = key(
        1.0e-8, "Term added to the denominator for numerical stability (adamw, adamw_8bit and muon)."
    )
    momentum: BelowOne = key(
        0.9,
        "Factor of the earlier gradients (sgd and muon); with 0, sgd keeps no optimizer state. For muon, the "
        "default is 0.95.",
    )
    nesterov: bool = key(False, "Use Nesterov momentum (sgd only).")
    state_dtype: Literal["fp32", "bf16"] = key(
        "fp32",
        "Data type of the optimizer state; bf16 saves 2 bytes per parameter for sgd and lion, and 4 for "
        "adamw.",
    )
    ns_precision: NewtonSchulzPrecision = key(
        "fp32",
        "Precision in which muon orthogonalizes matrices: float32, three TF32 products for each float32 "
        "product (GPUs only), or bf16. With bf16, a run that resumes on a different layout does not "
        "continue the same loss curve.",
    )
    options: JsonObject = key({}, "Keyword arguments for your own optimizer (FILE.py:CLASS only).")


SCHEDULES = ("cosine", "linear", "wsd", "constant")
SCHEDULE_NAMES = ", ".join(SCHEDULES)


class ScheduleConfig(Section):
    """The learning rate schedule."""

    name: str = key(
        "cosine",
        f"Shape of the schedule after warmup: {SCHEDULE_NAMES}, or FILE.py:FUNCTION for your own function of "
        "the step and the number of steps. wsd is constant with a decay at the end.",
        pattern=rf"^({'|'.join(SCHEDULES)}|.+\.py:[A-Za-z_][A-Za-z0-9_]*)$",
        allowed=f"{SCHEDULE_NAMES} or FILE.py:FUNCTION",
    )
    warmup_steps: NotNegative = key(
        20,
        "Number of steps over which the learning rate rises linearly from 0. For FILE.py:FUNCTION, the "
        "default is 0.",
    )
    min_lr_ratio: Fraction = key(
        0.1,
        "Final learning rate as a fraction of the peak (cosine, linear and wsd); with 0, the last step "
        "changes no weights.",
    )
    decay_steps: AtLeastOne | None = key(
        None, "Number of steps of the final decay (wsd only); null decays over the last fifth of the run."
    )

    @property
    def is_own(self) -> bool:
        """Return whether `name` is FILE.py:FUNCTION, a user's schedule."""
        return self.name not in SCHEDULES


Named = Literal["optimizer", "schedule"]
NAMED: tuple[Named, ...] = ("optimizer", "schedule")
"""The sections whose key `name` determines the defaults of other keys."""


def named_defaults(section: Named, name: str) -> Mapping[str, JsonValue]:
    """Return the keys of a section whose defaults the optimizer or the schedule `name` replaces."""
    if section == "optimizer":
        return kind_of(name).defaults
    return {} if name in SCHEDULES else {"warmup_steps": 0}


class PrecisionConfig(Section):
    """The numeric precision of training."""

    dtype: Literal["fp32", "bf16", "fp16"] = key(
        "bf16", "Data type of activations and gradients; master weights are fp32."
    )
    init_loss_scale: Positive = key(65536.0, "Initial loss scale (fp16 only).")
    loss_scale_growth_interval: AtLeastOne = key(
        2000, "Double the loss scale after this many consecutive steps without overflow (fp16 only)."
    )
    tf32: bool = key(
        False, "Use TF32 for matrix multiplications on GPUs, which is faster but less accurate (fp32 only)."
    )
    float8: bool | Literal["gather", "rowwise"] = key(
        False,
        "Run the linear layers of decoder blocks in float8; needs torchao and a supported GPU. "
        "`gather` also gathers the sharded weights in float8, and gives the same losses as `true`. "
        "`rowwise` uses one scale per row instead of one per matrix, which is more accurate but slower.",
    )
