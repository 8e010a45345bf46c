"""Tests of the metrics on the progress lines of training loops, and of their names."""

import math

import pytest

from tests.capabilities.curves.test_printed_curve import LOGS, read
from tests.support.runs import launch_plan
from tests.support.said import said
from trainkit.capabilities.curves.log_curve import LogCurve
from trainkit.capabilities.curves.printed_curve import MAX_NAMES, read_line
from trainkit.plan.workload import Workload
from trainkit.run.events import best_result, read_events, training_curve
from trainkit.run.files import read_jsonl

PLAN = launch_plan(num_nodes=1, workload=Workload(("train",)))
LINES = {
    # name: a line, its metrics by name
    "plain": ("step 3 loss 0.5 acc 0.91", {"loss": 0.5, "acc": 0.91}),
    "without a loss": ("step 3 acc 0.91", {"acc": 0.91}),
    "commas": ("step 3, loss 0.5, acc 0.91, kl 0.02", {"loss": 0.5, "acc": 0.91, "kl": 0.02}),
    "two words": (
        "Step: 3 | Loss: 0.5 | Val Accuracy: 0.9 | Train Acc 0.8",
        {"loss": 0.5, "val_accuracy": 0.9, "train_acc": 0.8},
    ),
    "percent": ("epoch 2 | val_accuracy: 91.2%", {"val_accuracy": 91.2}),
    "percent apart": ("epoch 2 loss=0.1 acc=91.2 %", {"loss": 0.1, "acc": 91.2}),
    "Trainer of Hugging Face": (
        "{'loss': 1.2, 'grad_norm': 0.8, 'learning_rate': 3e-5, 'rewards/margins': 0.25, 'epoch': 0.1}",
        {"loss": 1.2, "rewards/margins": 0.25},
    ),
    "its evaluation": (
        "{'eval_loss': '0.52', 'eval_accuracy': '0.91', 'eval_runtime': '1.2', "
        "'eval_samples_per_second': '99', 'epoch': '1'}",
        {"eval_accuracy": 0.91},
    ),
    "tqdm": (
        "train:  33%|███▎      | 10/30 [00:01<00:02, 20.1it/s, loss=0.12, acc=0.9, d_loss=1e-3]",
        {"loss": 0.12, "acc": 0.9, "d_loss": 1e-3},
    ),
    "Lightning": (
        "Epoch 0:  25%|██▌       | 10/40 [00:00<00:00, 98.21it/s, v_num=0, train_loss_step=5.71, "
        "train_acc_epoch=0.5]",
        {"train_loss_step": 5.71, "train_acc_epoch": 0.5},
    ),
    "Keras": (
        "16/16 ━━━━━━━━━━━━━━━━━━━━ 1s 10ms/step - accuracy: 0.0625 - loss: 12.3641 - val_accuracy: 0.125",
        {"accuracy": 0.0625, "loss": 12.3641, "val_accuracy": 0.125},
    ),
    "JSON": (
        '{"step": 3, "loss": 2.5, "train/acc": 0.9, "time": 12.5, "name": "exp1", "ts": "2026-11-26"}',
        {"loss": 2.5, "train/acc": 0.9},
    ),
    "nested JSON": ('{"step": 3, "loss": 2.5, "eval": {"bleu": 27.5}}', {"loss": 2.5, "bleu": 27.5}),
    "nanoGPT": ("iter 100: loss 2.3105, time 12.50ms, mfu 45.20%", {"loss": 2.3105, "mfu": 0.452}),
    "Megatron-LM": (
        " [2026-11-26 10:00:00] iteration       10/     100 | consumed samples:           80 | elapsed time "
        "per iteration (ms): 12.3 | learning rate: 1.0E-04 | global batch size:     8 | lm loss: 1.0E+01 | "
        "moe balance: 1.5 | loss scale: 1.0 | grad norm: 1.2 | number of skipped iterations:   0 | number "
        "of nan iterations:   0 |",
        {"lm_loss": 10.0, "moe_balance": 1.5, "loss_scale": 1.0},
    ),
    "torchtitan": (
        "[titan] 2026-11-26 10:00:00,123 - root - INFO - step: 10  loss:  4.2  grad_norm: 1.2  memory:  "
        "3.1GiB(4.2%)  tps: 1,234  tflops: 3.25  mfu: 12.3%",
        {"loss": 4.2, "tflops": 3.25, "mfu": 0.123},
    ),
    "timm": (
        "Train: 0 [  50/1251 (  4%)]  Loss: 6.95 (6.97)  Time: 0.5s, 200.1/s  LR: 1.0e-06  Data: 1.2 (1.2)",
        {"loss": 6.95},
    ),
    "ImageNet": (
        "Epoch: [0][ 10/500]\tTime  0.5 ( 0.6)\tData  0.1 ( 0.2)\tLoss 6.9 (7.0)\t"
        "Acc@1   1.5 (  0.1)\tAcc@5   4.5 (2)",
        {"loss": 6.9, "acc@1": 1.5, "acc@5": 4.5},
    ),
    "fairseq": (
        "epoch 001:   10 / 500 loss=8.1, ppl=550.1, wps=1234, wpb=3500, bsz=120, num_updates=10, lr=1e-07, "
        "gnorm=2.3, clip=0, train_wall=3, wall=5",
        {"loss": 8.1, "ppl": 550.1, "wps": 1234.0, "clip": 0.0},
    ),
    "detectron2": (
        "[11/26 10:00:00 d2.utils.events]:  eta: 0:12:34  iter: 19  total_loss: 2.5  loss_cls: 1.25  "
        "loss_box_reg: 0.5  time: 0.1  data_time: 0.01  lr: 0.0003  max_mem: 2000M",
        {"total_loss": 2.5, "loss_cls": 1.25, "loss_box_reg": 0.5},
    ),
    "MMDetection": (
        "11/26 10:00:00 - mmengine - INFO - Epoch(train)   [1][  50/500]  lr: 1.0e-02  eta: 0:12:00  "
        "time: 0.2  memory: 1000  loss: 2.5  loss_cls: 0.2  loss_bbox: 0.1  acc: 93.5",
        {"loss": 2.5, "loss_cls": 0.2, "loss_bbox": 0.1, "acc": 93.5},
    ),
    "DCGAN": ("[1/5][50/99]\tLoss_D: 1.5\tLoss_G: 3.5", {"loss_d": 1.5, "loss_g": 3.5}),
    "GAN": ("step 3 d_loss 0.4 g_loss 1.2", {"d_loss": 0.4, "g_loss": 1.2}),
    "slashes": ("step=3 train/loss=0.5 val/acc=0.25", {"train/loss": 0.5, "val/acc": 0.25}),
    "validation": ("Validation: step 20 loss 2.75, acc 0.81", {"val_acc": 0.81}),
    "test": (
        "Test set: Average loss: 0.0456, Accuracy: 9845/10000 (98%)",
        {"test_average_loss": 0.0456, "test_accuracy": 0.9845},
    ),
    "tensors": ("step 3 loss tensor(0.5) acc tensor(0.75, device='cuda:0')", {"loss": 0.5, "acc": 0.75}),
    "negative": ("step 3 loss -0.5 reward -12.5 elbo=-3e2", {"loss": -0.5, "reward": -12.5, "elbo": -300.0}),
    "nan and inf": ("step 3 loss 0.5, acc: nan, kl: inf", {"loss": 0.5, "acc": math.nan, "kl": math.inf}),
    "nan in a row": ("step 3 loss nan r2 nan kl -inf", {"loss": math.nan, "r2": math.nan, "kl": -math.inf}),
    "decibels": ("step 3 loss 0.5 psnr: 31.5dB", {"loss": 0.5, "psnr": 31.5}),
    "top": ("step 3 loss 0.5 top1: 45.5 top-5: 80.5", {"loss": 0.5, "top1": 45.5, "top-5": 80.5}),
    "twice": ("step 3 loss 0.5 acc: 0.9 acc: 0.1", {"loss": 0.5, "acc": 0.9}),
    "logger": ("INFO:root:step 3 loss 0.5 acc: 0.9", {"loss": 0.5, "acc": 0.9}),
    "sentence": ("Epoch 3 done. Validation accuracy: 91.5%", {"validation_accuracy": 91.5}),
    "unicode": (
        "🚀 step 3 ▸ loss 0.5 ▸ 精度: 0.9 ▸ précision: 0.5",
        {"loss": 0.5, "精度": 0.9, "précision": 0.5},
    ),
    "words between": ("step 3 d_loss 0.4 and then g_loss 1.2", {"d_loss": 0.4, "g_loss": 1.2}),
}


@pytest.mark.parametrize("name", LINES)
def test_the_metrics_of_a_line(name):
    line, metrics = LINES[name]
    assert str(dict(sorted(read_line(line).metrics.items()))) == str(dict(sorted(metrics.items())))


NOISE = {
    "time of day": "step 3 loss 0.5 at 10:00:05",
    "date": "step 3 loss 0.5 date: 2026-11-26",
    "remaining": "step 3 loss 0.5 eta: 0:12:34, elapsed 12.5, remaining: 99s",
    "version": "step 3 loss 0.5 torch: 2.13.0, model v1: 1.2.3",
    "memory": "step 3 loss 0.5 mem: 3.1GiB, peak: 12.5 GB, gpu_mem: 12",
    "duration": "step 3 loss 0.5 forward: 12.5ms, backward: 13 ms, save: 3s",
    "speed": "step 3 loss 0.5 (12.5 it/s, 99 samples/s)",
    "prose": "step 3 loss 0.5, saved 3 files to 2 places and wait for 4",
    "counts": "step 3 loss 0.5 tokens: 4096 samples: 64 batch_size: 8 num_workers: 4",
    "best": "step 3 loss 0.5 best_acc: 0.9 lowest loss: 0.1",
    "list": "step 3 loss 0.5 betas: [0.9, 0.999] shape: (3, 4)",
    "process": "step 3 loss 0.5 rank: 0 pid 1234 port: 29500 device cuda:0",
    "long name": f"step 3 loss 0.5 {'a' * 65}: 1",
    "bar": "map:  10%|█  | 3/30 [00:01<00:09, 5it/s, loss=0.5]",
    "equality": "step 3 loss 0.5 acc == 0.9",
    "expression": "step 3 loss 0.5 and x > 0.5 or y < 3",
    "file": "step 3 loss 0.5 wrote out/model-3.pt, sha 12ab",
    "fraction": "step 3 loss 0.5 done: 3/4",
    "line of code": "2026-11-26 10:00:05 | INFO | train:main:42 - [train.py:42] step 3 loss 0.5",
    "decimal comma": "step 3 loss 0.5 acc: 0,95",
    "nan as a word": "step 3 loss 0.5 number of nan iterations: 0, skipped nan batches: 1",
}


@pytest.mark.parametrize("name", NOISE)
def test_other_numbers_are_no_metrics(name):
    assert read_line(NOISE[name]).metrics == {"loss": 0.5}


CURVES = {
    # name: lines with the placeholder n for the step, the record of step 2
    "several lines": (
        "step {n} loss 0.5\nstep {n} acc 0.9\nstep {n} val_loss 0.{n}",
        {"loss": 0.5, "acc": 0.9, "val_loss": 0.2},
    ),
    "the metric first": ("step {n} acc 0.9\nstep {n} loss 0.5", {"acc": 0.9, "loss": 0.5}),
    "without a loss": ("step {n} acc 0.9\nstep {n} f1 0.8", {"acc": 0.9, "f1": 0.8}),
    "no total": ("step {n}/9 loss 0.5\nstep {n} acc 0.9", {"loss": 0.5, "acc": 0.9}),
    "GAN": ("step {n} d_loss 0.4 g_loss 1.2", {"d_loss": 0.4, "g_loss": 1.2}),
    "GAN with JSON": (
        'step {n}/3 d_loss 0.4 g_loss 1.2\n{{"step": {n}, "fid": 9.5}}\nstep {n} is odd: 1',
        {"d_loss": 0.4, "g_loss": 1.2, "fid": 9.5, "is_odd": 1.0},
    ),
    "several losses": (
        "step {n} loss 3 loss_cls 2 loss_box 1",
        {"loss": 3.0, "loss_cls": 2.0, "loss_box": 1.0},
    ),
    "a total": ("step {n} total_loss 3 loss_cls 2", {"loss": 3.0, "loss_cls": 2.0}),
    "an epoch": ("step {n} loss 0.5\nepoch 1 | val_accuracy: 91.2%", {"loss": 0.5, "val_accuracy": 91.2}),
    "a validation": (
        "step {n} loss 0.5\nValidation: loss 0.{n}, acc 0.9",
        {"loss": 0.5, "val_loss": 0.2, "val_acc": 0.9},
    ),
    "a test": ("epoch {n} loss 0.5\nTest set: Accuracy: 9/10 (90%)", {"loss": 0.5, "test_accuracy": 0.9}),
    "nan": ("step {n} loss nan acc: nan lr 1", {"loss": math.nan, "lr": 1.0, "acc": math.nan}),
    "another number": ("step {n} loss 0.5\nepoch 3 batch 7/99 acc 0.9", {"loss": 0.5}),
}


@pytest.mark.parametrize("name", CURVES)
def test_lines_of_one_step_are_one_record(name):
    lines, record = CURVES[name]
    curve = read("\n".join(lines.format(n=n) for n in (1, 2, 3)))
    assert str(curve.records[2]) == str(record)
    assert list(curve.records) == [1, 2, 3]


def test_metrics_of_recorded_logs():
    keras = read((LOGS / "keras-lines.log").read_bytes())
    last = {"loss": 10.8303, "mae": keras.records[64]["mae"], "val_loss": 12.3673, "val_mae": 2.8691}
    assert keras.records[64] == last
    assert keras.found.metrics == ("mae", "val_mae")
    for name in ("plain", "deepspeed", "rich", "tqdm"):
        assert read((LOGS / f"{name}.log").read_bytes()).found.metrics == (), name


def test_a_step_that_is_computed_again_has_nothing_of_before():
    curve = read("step 1 loss 9\nstep 2 loss 8\nstep 2 acc 0.5\nstep 3 loss 7\nstep 2 loss 6\nstep 3 loss 5")
    assert curve.records == {1: {"loss": 9.0}, 2: {"loss": 6.0}, 3: {"loss": 5.0}}


def test_of_several_ranks_the_first_counts():
    lines = [f"step {n} loss {n}.{rank} acc 0.{rank}" for n in range(3) for rank in (0, 1)]
    assert read("\n".join(lines), is_shared=True).records[2] == {"loss": 2.0, "acc": 0.0}


def records(attempt, text: str, pattern: str = "auto", parts: int = 1) -> dict[int, dict[str, object]]:
    """Return the records that are written if a text is printed in several chunks."""
    follower = LogCurve(attempt, PLAN, pattern)
    for index in range(parts):
        with attempt.rank_log(0).open("a") as log:
            log.write(text[len(text) * index // parts : len(text) * (index + 1) // parts])
        follower.poll()
    follower.end(is_finished=True)
    keys = ("step", "time", "attempt", "source")
    return {
        record.step: {key: value for key, value in record.values.items() if key not in keys}
        for record in training_curve(attempt.run)
    }


@pytest.mark.parametrize("parts", [1, 7])
def test_a_record_has_all_lines_of_its_step_wherever_the_log_is_cut(attempt, parts):
    text = "".join(f"step {n} loss 0.5\nstep {n} acc 0.{n}\n" for n in range(1, 5)) + "step 4 val_loss 0.25"
    found = records(attempt, text, parts=parts)
    whole = {n: {"loss": 0.5, "acc": n / 10} for n in (1, 2, 3)}
    assert found == {**whole, 4: {"loss": 0.5, "acc": 0.4, "val_loss": 0.25}}
    assert best_result(attempt.run).value == 0.25


def test_what_is_not_finite_is_null(attempt):
    found = records(attempt, "step 1 loss 1 acc: nan\nstep 2 loss nan acc: inf\nstep 3 val_loss nan acc 1\n")
    nothing = {"loss": None, "acc": None}
    assert found == {1: {"loss": 1.0, "acc": None}, 2: nothing, 3: {"acc": 1.0, "val_loss": None}}


def test_a_gan_has_a_curve_and_it_is_said_that_none_is_the_loss(attempt):
    found = records(attempt, "".join(f"step {n} d_loss 0.4 g_loss 1.{n}\n" for n in (1, 2, 3)))
    assert found[3] == {"d_loss": 0.4, "g_loss": 1.3}
    [event] = read_events(attempt.run, "curve")
    said(event.reason)


def test_names_are_bounded(attempt, capfd):
    lines = "".join(f"step {n} loss 1 own_{chr(97 + n % 26)}{chr(97 + n // 26)}: 1\n" for n in range(1, 90))
    found = records(attempt, lines, parts=3)
    assert len({name for record in found.values() for name in record} - {"loss"}) == MAX_NAMES
    warnings = [event.reason for event in read_events(attempt.run, "curve") if "more than" in event.reason]
    [warning] = warnings
    said(warning)
    assert f"warning: {warning}" in capfd.readouterr().out


def test_a_rare_metric_is_kept_when_much_was_printed(attempt):
    text = "".join(f"step {n} loss 1\n" + f"step {n} val_acc 0.5\n" * (n == 777) for n in range(5000))
    found = records(attempt, text)
    assert found[777] == {"loss": 1.0, "val_acc": 0.5}
    assert len(found) <= 101


PATTERNS = {
    "any names": (
        r"(?P<step>\d+)\) (?P<val_accuracy>\S+) (?P<perplexity>\S+)",
        "1) 91.5% 1,234\n2) nan inf",
        {1: {"val_accuracy": 91.5, "perplexity": 1234.0}, 2: {"val_accuracy": None, "perplexity": None}},
    ),
    "several lines": (
        r"at (?P<step>\d+)(?: loss (?P<loss>\S+))?(?: acc (?P<acc>\S+))?",
        "at 1 loss 3\nat 1 acc 0.5\nat 2 loss 2\nat 1 acc 0.25",
        {1: {"loss": 3.0, "acc": 0.25}, 2: {"loss": 2.0}},
    ),
    "lines without a step": (
        r"at (?P<step>\d+) loss (?P<loss>\S+)|^acc (?P<acc>\S+)",
        "acc 0.1\nat 1 loss 3\nacc 0.5\nat x\nat 2 loss 2",
        {1: {"loss": 3.0, "acc": 0.5}, 2: {"loss": 2.0}},
    ),
    "a step that is none": (r"at (?P<step>\S+) (?P<acc>\S+)", "at 1.5 3\nat nan 3\nat inf 3\nat -- 3", {}),
    "no numbers": (r"at (?P<step>\d+) (?P<acc>\S+)", "at 1 --\nat 2 0.5", {2: {"acc": 0.5}}),
    "a validation": (
        r"at (?P<step>\d+) (?P<val_loss>\S+)",
        "at 1 3.5\nat 2 2.5",
        {1: {"val_loss": 3.5}, 2: {"val_loss": 2.5}},
    ),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_with_names_of_ones_own(attempt, name):
    pattern, text, expected = PATTERNS[name]
    assert records(attempt, text + "\n", pattern) == expected


def test_no_more_lines_are_written_than_steps(attempt):
    records(attempt, "".join(f"step {n} loss 1\nstep {n} acc 1\n" for n in range(50)))
    assert len(list(read_jsonl(attempt.run.metrics_file))) == 50
