"""The training task, which defines the model, the data and the loss; the loop does everything else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainkit.config.schema import RunConfig
from trainkit.data.cache import has_validation
from trainkit.data.shards import TokenMixture, TokenShards, open_dataset
from trainkit.plan.launch import Batch, LaunchPlan
from trainkit.plan.model_shape import resolve_model_shape
from trainkit.run.rundir import RunDir
from trainkit.safetensors import StoredWeights
from trainkit.trainer.batches import IGNORE_LABEL, BatchSource, PrefetchedBatches
from trainkit.trainer.checkpoint.state import TrainingState
from trainkit.trainer.distributed import World
from trainkit.trainer.models import load_architecture, refuse_unsupported_layout
from trainkit.trainer.models.decoder import Decoder, read_decoder_weight
from trainkit.trainer.models.model import Model, StageSpec
from trainkit.trainer.task_batches import TaskBatches
from trainkit.trainer.user_task import UserTask


class CausalLM:
    """Next-token prediction on token shards."""

    def __init__(self, config: RunConfig, run: RunDir | None, checks_data: bool) -> None:
        seq_len = config.data.seq_len
        # Before the data is prepared, which may take long.
        self._model_class = load_architecture(config.model.architecture, run)
        refuse_unsupported_layout(config, self._model_class)
        self.train_data = open_dataset(config.data, seq_len, "train", checks_data)
        evaluates = config.train.eval_every is not None and has_validation(config.data, checks_data)
        self.val_data = open_dataset(config.data, seq_len, "val", checks_data) if evaluates else None
        self.shape = resolve_model_shape(config.model, self.train_data.vocab_size)
        self.num_params = self._model_class.num_params(self.shape)
        self.flops_per_sample: float | None = seq_len * self._model_class.flops_per_token(self.shape, seq_len)
        self.reads_weights = config.model.hf is not None and not config.model.from_scratch
        """Whether the initial weights are those of `model.hf`."""
        self._stored: StoredWeights | None = None
        self._config = config
        self._seq_len = seq_len

    def build_model(self, stage: StageSpec | None = None) -> Model:
        """The model, or one pipeline stage of it, on the meta device."""
        with torch.device("meta"):
            model = self._model_class(self.shape, self._seq_len, stage)
        if self._config.data.document_mask:
            assert isinstance(model, Decoder)
            model.eos_id = self.train_data.eos_id
        return model

    def read_weight(self, name: str, index: Sequence[slice]) -> Tensor:
        """Read a part of the initial value of a parameter."""
        if self._stored is None:  # not before: a resumed run does without the files
            self._stored = StoredWeights(Path(str(self._config.model.hf)))
        return read_decoder_weight(self._stored, name, index)

    def nll_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The negative log-likelihood, summed over all valid labels, float32 []."""
        nll_sum = F.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_LABEL, reduction="sum"
        )
        # A DTensor with loss parallelism, which splits logits over the vocabulary.
        return nll_sum.full_tensor() if isinstance(nll_sum, DTensor) else nll_sum

    def data_identity(self) -> dict[str, object]:
        return {
            "fingerprint": self.train_data.fingerprint,
            "data.seq_len": self._seq_len,
            "data.shuffle": self._config.data.shuffle,
            "seed": self._config.seed,
        }

    def describe_data(self) -> str:
        data = self.train_data
        counts = f"{data.num_tokens:,} training tokens in {data.num_samples:,} samples of {self._seq_len}"
        if isinstance(data, TokenShards):
            return f"{self._config.data.source}: {counts}"
        return f"mixture: {counts}; {'; '.join(data.describe(self._config.data.source))}"

    def train_batches(
        self, plan: LaunchPlan, world: World, state: TrainingState, end: int | None
    ) -> PrefetchedBatches:
        """The training batches of this rank from a state on, up to position `end` if it is not None."""
        shuffle = self._config.data.shuffle
        return self._batches(self.train_data, plan.batch, world, state.samples_seen, end, shuffle)

    def val_batches(self, batch: Batch, world: World, num_samples: int) -> PrefetchedBatches:
        """The validation batches of this rank; can be iterated over again and again."""
        assert self.val_data is not None
        return self._batches(self.val_data, batch, world, 0, num_samples, shuffle=False)

    def _batches(
        self,
        data: TokenShards | TokenMixture,
        batch: Batch,
        world: World,
        start: int,
        end: int | None,
        shuffle: bool,
    ) -> PrefetchedBatches:
        source = BatchSource(
            dataset=data,
            batch=batch,
            dp_rank=world.dp_rank,
            dp_size=world.layout.dp,
            seed=self._config.seed,
            shuffle=shuffle,
            end_position=end,
            pin_memory=world.device.type == "cuda",
        )
        return PrefetchedBatches(source, start, self._config.data.num_workers)


AnyTask = CausalLM | UserTask
Batches = PrefetchedBatches | TaskBatches
"""The batches of consecutive steps."""


def build_task(config: RunConfig, run: RunDir | None = None, checks_data: bool = True) -> AnyTask:
    """The task of a config; a run loads the user's own code from its code snapshot.

    With `checks_data` this rank looks at the size of every shard, which one of a job does.
    """
    if not config.has_decoder:
        return UserTask(config, run)
    return CausalLM(config, run, checks_data)
