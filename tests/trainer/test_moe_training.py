"""Compares training with experts with a loop written by hand, and tests that the load becomes balanced."""

import random
import string
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.parity import close, make_trainer, saved_tensors
from tests.support.runs import fork_workers, losses, make_attempt, train
from trainkit.data.dataset_file import TRAIN
from trainkit.plan.batch import learning_rate
from trainkit.plan.model_shape import ModelShape
from trainkit.run.events import read_metrics
from trainkit.run.manifest import published
from trainkit.run.rundir import RunDir
from trainkit.trainer.checkpoint.state import TrainingState

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute with one thread, because several threads would wait for each other in small operations."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


SMALL = (
    *("data.seq_len=32", "train.device_batch_size=2", "train.global_batch_size=4", "data.num_workers=0"),
    *("model.dim=32", "model.num_heads=2", "model.num_kv_heads=1", "model.ffn_dim=64"),
)
STEPS = 200
REFERENCE_MOE = (
    "{num_experts: 6, top_k: 2, expert_ffn_dim: 16, num_shared: 1, first_dense: 1, score: sigmoid, "
    "scale: 1.5, bias_rate: 0.01, aux_coef: 0.02}"
)


def metrics_of(run: Path) -> list[Any]:
    return list(read_metrics(RunDir(run)))


class Reference:
    """A decoder with experts, its loss and its update, written without trainkit's modules."""

    def __init__(self, state: dict[str, Tensor], shape: ModelShape, config: Any) -> None:
        self.shape, self.config = shape, config
        biases = {name: value.clone() for name, value in state.items() if name.endswith("router.bias")}
        self.biases = {int(name.split(".")[1]): value for name, value in biases.items()}
        self.params = {
            name: value.clone().requires_grad_() for name, value in state.items() if name not in biases
        }
        matrices = [param for param in self.params.values() if param.dim() > 1]
        vectors = [param for param in self.params.values() if param.dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": config.optimizer.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=config.optimizer.betas, eps=config.optimizer.eps)

    def norm(self, x: Tensor, name: str) -> Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        return x * (mean + self.shape.norm_eps).rsqrt() * self.params[f"{name}.weight"]

    def rotated(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[1])[:, None] * self.shape.rope_theta ** (-torch.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def attention(self, x: Tensor, name: str) -> Tensor:
        heads = (*x.shape[:2], -1, self.shape.head_dim)
        q, k, v = (x @ self.params[f"{name}.{part}.weight"].t() for part in ("wq", "wk", "wv"))
        q, k = self.rotated(q.view(heads)), self.rotated(k.view(heads))
        groups = self.shape.num_heads // self.shape.num_kv_heads
        k, v = (part.view(heads).repeat_interleave(groups, 2) for part in (k, v))
        scores = torch.einsum("bqhc,bkhc->bhqk", q, k) / self.shape.head_dim**0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        out = torch.einsum("bhqk,bkhc->bqhc", weights, v).flatten(2)
        return out @ self.params[f"{name}.wo.weight"].t()

    def swiglu(self, x: Tensor, name: str, expert: int | None = None) -> Tensor:
        suffix = ".weight" if expert is None else ""
        parts = [self.params[f"{name}.{part}{suffix}"] for part in ("gate", "up", "down")]
        gate, up, down = parts if expert is None else [part[expert] for part in parts]
        return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()

    def experts(self, x: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, the number of tokens of each expert, and the auxiliary loss."""
        moe, name = self.shape.moe, f"blocks.{layer}.moe"
        assert moe is not None
        scores = (x @ self.params[f"{name}.router.weight"].t()).sigmoid()
        chosen = (scores + self.biases[layer]).topk(moe.top_k, -1).indices
        is_chosen = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        weights = scores * is_chosen
        weights = weights / weights.sum(-1, keepdim=True) * moe.scale
        y = self.swiglu(x, f"{name}.shared")
        for expert in range(moe.num_experts):
            y = y + weights[..., expert, None] * self.swiglu(x, f"{name}.experts", expert)
        counts = is_chosen.sum((0, 1))
        probabilities = (scores / scores.sum(-1, keepdim=True)).mean((0, 1))
        return y, counts, moe.num_experts * (counts / counts.sum() * probabilities).sum()

    def loss(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """Return the loss, the auxiliary loss, and the loads of one microbatch."""
        x, aux, loads = self.params["embedding.weight"][tokens], torch.zeros(()), {}
        for layer in range(self.shape.num_layers):
            name = f"blocks.{layer}"
            x = x + self.attention(self.norm(x, f"{name}.attention_norm"), f"{name}.attention")
            y = self.norm(x, f"{name}.ffn_norm")
            if layer in self.biases:
                y, loads[layer], own = self.experts(y, layer)
                aux = aux + own
            else:
                y = self.swiglu(y, f"{name}.ffn")
            x = x + y
        logits = self.norm(x, "norm") @ self.params["head.weight"].t()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), aux, loads

    def step(self, batch: Any, lr: float) -> tuple[float, dict[int, Tensor]]:
        """Update the parameters and the biases; return the loss and the loads of the step."""
        micros, total, loads = batch.microbatches, 0.0, dict[int, Any]()
        assert self.shape.moe is not None
        self.optimizer.zero_grad()
        for micro in micros:
            loss, aux, own = self.loss(micro.tokens, micro.labels)
            ((loss + self.shape.moe.aux_coef * aux) / len(micros)).backward()  # type: ignore[no-untyped-call]
            total += loss.item() / len(micros)
            loads = {layer: loads.get(layer, 0) + own[layer] for layer in own}
        torch.nn.utils.clip_grad_norm_(self.params.values(), self.config.train.grad_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        for layer, load in loads.items():
            self.biases[layer] += self.shape.moe.bias_rate * (load.mean() - load).sign()
        return total, loads


def test_training_equals_a_loop_written_by_hand(tmp_path: Path) -> None:
    options = [*SMALL, f"model.moe={REFERENCE_MOE}", f"train.steps={STEPS}", "optimizer.lr=0.002"]
    trainer = make_trainer(0, make_attempt(tmp_path / "run", options), keep_labels=True)
    [model] = trainer.built.model_parts
    reference = Reference(model.state_dict(), model.shape, trainer.config)
    batches = trainer.task.batches(TRAIN, trainer.plan.batch, trainer.world, TrainingState(), None)
    expected, imbalances = [], []
    for step in range(1, STEPS + 1):
        lr = learning_rate(step, STEPS, trainer.plan.lr, trainer.config.schedule)
        loss, loads = reference.step(next(batches), lr)
        expected.append(loss)
        own = [float(load.std(correction=0) / load.mean()) for load in loads.values()]
        imbalances.append(sum(own) / len(own))
        trainer.step()
    close(trainer)
    records = metrics_of(tmp_path / "run")
    worst = max(abs(record["loss"] / loss - 1) for record, loss in zip(records, expected, strict=True))
    assert worst < 1e-5
    assert [record["load_imbalance"] for record in records] == pytest.approx(imbalances, abs=1e-6)
    for layer, bias in reference.biases.items():
        torch.testing.assert_close(model.routers[layer].bias, bias, rtol=0, atol=1e-6)
    assert expected[-1] < expected[0] - 1


def test_the_bias_balances_the_load(tmp_path: Path) -> None:
    """At first, two experts get most tokens. The bytes are equally frequent.

    A frequent byte would overload an expert, because all its occurrences have similar scores.
    """
    chance = random.Random(3)
    (tmp_path / "text.txt").write_text("".join(chance.choices(string.printable[:64], k=200_000)))
    moe = "{num_experts: 8, top_k: 2, expert_ffn_dim: 16, score: sigmoid, bias_rate: 0.002}"
    batch = ("data.seq_len=64", "train.device_batch_size=16", "train.global_batch_size=16")
    more = (f"data.source={tmp_path}/text.txt", f"model.moe={moe}", "train.steps=300", "optimizer.lr=0.00001")
    attempt = make_attempt(tmp_path / "run", [*SMALL, *batch, "model.num_layers=1", *more])
    trainer = make_trainer(0, attempt, keep_labels=True)
    [router] = trainer.built.model_parts[0].routers.values()
    router.weight.data *= 5
    router.bias[:2] += 0.3
    trainer.train()
    close(trainer)
    imbalances = [record["load_imbalance"] for record in metrics_of(tmp_path / "run")]
    assert imbalances[0] > 1.0
    assert max(imbalances[-50:]) < 0.2


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_and_validation_count_no_tokens(tmp_path: Path, mode: str) -> None:
    options = [*SMALL, f"model.moe={REFERENCE_MOE}", "train.steps=2", "train.eval_every=1"]
    attempt = make_attempt(tmp_path / "run", [*options, f"parallel.activation_checkpointing={mode}"])
    trainer = make_trainer(0, attempt)
    balance, counted = trainer.built.load_balance, list[Tensor]()
    take = balance.take

    def counting() -> Tensor:
        counted.append(take())
        return counted[-1]

    balance.take = counting
    trainer.train()
    close(trainer)
    top_k, tokens, num_layers = 2, 4 * 32, 1
    counts = [sums.view(num_layers, -1)[:, :-1].sum().item() for sums in counted]
    assert counts == [num_layers * top_k * tokens] * 2


def test_a_skipped_step_changes_no_bias(tmp_path: Path) -> None:
    options = [*SMALL, f"model.moe={REFERENCE_MOE}", "train.steps=2"]
    trainer = make_trainer(0, make_attempt(tmp_path / "run", options))
    [model] = trainer.built.model_parts
    [bias] = trainer.built.load_balance.biases.values()
    healthy = model.head.weight.detach().clone()
    with torch.no_grad():
        model.head.weight.fill_(torch.inf)
    trainer.step()
    assert not bias.any()
    with torch.no_grad():
        model.head.weight.copy_(healthy)
    trainer.step()
    assert bias.any(), "a step that is not skipped changes the bias"
    close(trainer)


def test_a_killed_run_continues_bit_for_bit(tmp_path: Path) -> None:
    options = [*SMALL, f"model.moe={REFERENCE_MOE}", "train.steps=40", "checkpoint.every_steps=5"]
    train(tmp_path / "whole", options, 2)
    for _ in range(2):
        attempt = make_attempt(tmp_path / "cut", options, 2)
        before = len(published(attempt.run.checkpoints_dir))
        workers = fork_workers(attempt, 2)
        deadline_s = time.monotonic() + 120.0
        while len(published(attempt.run.checkpoints_dir)) <= before and time.monotonic() < deadline_s:
            time.sleep(0.05)
        for worker in workers:
            worker.kill()
            worker.wait()
    train(tmp_path / "cut", options, 2)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    whole, cut = (saved_tensors(tmp_path / name) for name in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    bias = "buffer.blocks.1.moe.router.bias"
    assert whole[bias].any()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
