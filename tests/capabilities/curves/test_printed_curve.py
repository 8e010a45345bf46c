"""Tests that the output of real training loops has a curve, and that the output of other programs has none.

The logs in printed_logs/ were recorded by running each framework on a CPU. The log of Megatron-LM follows the
format strings of its training loop.
"""

import math
import time
from pathlib import Path

import pytest

from trainkit.capabilities.curves.printed_curve import MAX_LINE, Found, PrintedCurve, read_line, shown_lines

LOGS = Path(__file__).parent / "printed_logs"


def read(text: str | bytes, **options) -> PrintedCurve:
    curve = PrintedCurve(**options)
    for line in shown_lines((text if isinstance(text, bytes) else text.encode()) + b"\n")[0]:
        curve.read(line)
    curve.finish()
    return curve


def losses(text: str, **options) -> dict[int, float]:
    return {step: values["loss"] for step, values in read(text, **options).records.items()}


RECORDED = {
    # name: (what counts, names, total steps, steps of an epoch), some steps and losses, validations
    "accelerate": (("progress bar", ("loss", "lr"), None, None), {1: 9.97, 29: 4.8, 30: 7.81}, []),
    "deepspeed": (("step", ("loss",), None, None), {0: 2.69806, 39: 12.54815}, []),
    "hf-trainer": (
        ("progress bar", ("loss", "grad_norm", "lr", "val_loss"), 60, None),
        {5: 11.51, 20: 3.874, 25: 4.182, 60: 0.8519},
        [(20, 4.669), (40, 2.053), (60, 1.371)],
    ),
    "keras": (
        ("progress bar", ("loss", "val_loss"), 64, 16),
        {1: 12.3641, 16: 11.4186, 17: 12.4267, 64: 10.8303},
        [(16, 13.0181), (32, 12.7959), (48, 12.5814), (64, 12.3673)],
    ),
    "keras-lines": (
        ("progress bar", ("loss", "val_loss"), 64, 16),
        {16: 11.4186, 32: 11.2155, 48: 11.0216, 64: 10.8303},
        [(16, 13.0181), (32, 12.7959), (48, 12.5814), (64, 12.3673)],
    ),
    "lightning": (
        ("progress bar", ("loss", "val_loss"), None, 40),
        {10: 5.71, 30: 8.36, 70: 5.13, 80: 3.72},
        [(40, 6.81), (80, 4.34)],
    ),
    "megatron": (
        ("iteration", ("loss", "lr", "grad_norm", "val_loss"), 100, None),
        {10: 9.142003, 50: 4.693661, 100: 2.039857},
        [(50, 4.73712), (100, 2.058744)],
    ),
    "nanogpt": (
        ("iteration", ("loss", "val_loss"), None, None),
        {0: 9.0091, 10: 7.4929, 200: 1.246},
        [(0, 8.2059), (50, 5.3403), (100, 2.991), (150, 1.7651), (200, 0.9958)],
    ),
    "plain": (("step", ("loss", "lr"), None, None), {10: 6.8161, 200: 0.0029}, []),
    "rich": (("progress bar", ("loss",), 100, None), {5: 5.1996, 100: 0.2806}, []),
    "tqdm": (("progress bar", ("loss", "lr"), None, 30), {3: 9.1454, 60: 0.8111}, []),
}


@pytest.mark.parametrize("name", RECORDED)
def test_the_curve_in_the_log_of_a_framework(name):
    of_curve, some, validations = RECORDED[name]
    curve = read((LOGS / f"{name}.log").read_bytes())
    found = curve.found
    assert (found.kind, found.names, found.total_steps, found.length) == of_curve
    assert {step: curve.records[step]["loss"] for step in some} == some
    assert (min(curve.records), max(curve.records)) in ((min(some), max(some)), (0, max(some)))
    assert list(curve.records) == sorted(curve.records)
    assert curve.evaluations == validations


def test_a_loss_without_a_step_is_no_curve():
    curve = read((LOGS / "hf-trainer-no-bar.log").read_bytes())
    assert (curve.found, curve.records, curve.num_losses) == (None, {}, 16)


LINES = {
    "CIFAR tutorial": ("[{0},  {1}] loss: {2}", (1, 2000), (1, 4000), (1, 6000), (2, 2000)),
    "MNIST example": (
        "Train Epoch: {0} [{1}/60000 ({1}%)]\tLoss: {2}",
        *((1, 0), (1, 640), (1, 59904), (2, 0)),
    ),
    "ImageNet example": (
        "Epoch: [{0}][{1}/500]\tTime  0.5 ( 0.6)\tData  0.1 ( 0.2)\tLoss {2} (7.0e+00)\tAcc@1   0.0 (  0.1)",
        *((0, 0), (0, 10), (1, 0)),
    ),
    "torchvision": (
        "Epoch: [{0}]  [ {1}/1252]  eta: 0:10:00  lr: 0.1  loss: {2} (6.95)  time: 0.4  data: 0.1",
        *((0, 10), (0, 20), (1, 10)),
    ),
    "tutorial": ("Epoch [{0}/10], Step [{1}/600], Loss: {2}", (1, 100), (1, 600), (2, 100)),
    "torchtitan": (
        "\x1b[32m[titan] 2026-11-26 10:00:00,123 - root - INFO - \x1b[0mstep: {1}  \x1b[32mloss: {2}  "
        "\x1b[38;2;180;60;0mgrad_norm:  1.2  memory: 10.50GiB(13.27%)  tps: 12,345  mfu: 39.1%",
        *((0, 1), (0, 10), (0, 20)),
    ),
    "nanochat": (
        "step {1:05d}/21400 (0.05%) | loss: {2} | lrm: 1.00 | dt: 300.12ms | tok/sec: 1,234,567 | mfu: 45.2",
        *((0, 1), (0, 10), (0, 20)),
    ),
    "litgpt": (
        "Epoch {0} | iter {1} step {1} | loss train: {2}, val: n/a | iter time: 12.50 ms (step)",
        *((1, 1), (1, 2), (2, 3)),
    ),
    "mmengine": (
        "11/26 10:00:00 - mmengine - INFO - Epoch(train)   [{0}][ {1}/500]  lr: 1.0e-02  eta: 0:12:00  "
        "memory: 1000  loss: {2}",
        *((1, 50), (1, 100), (2, 50)),
    ),
    "fairseq": (
        "epoch 001:   {1} / 500 loss={2}, ppl=550.1, wps=1234, num_updates={1}, lr=1e-07",
        *((1, 10), (1, 20), (1, 30)),
    ),
    "scikit-learn": ("Iteration {1}, loss = {2}", (0, 1), (0, 2), (0, 3)),
    "number sign": ("Iteration #{1}: loss = {2}", (0, 1), (0, 2), (0, 3)),
    "JSON": ('{{"step": {1}, "loss": {2}, "lr": 0.001}}', (0, 1), (0, 2), (0, 3)),
    "DeepSpeed pipeline": (
        "steps: {1} loss: {2} iter time (s): 0.012 samples/sec: 123.4",
        *((0, 10), (0, 20), (0, 30)),
    ),
    "logging": (
        "11/26/2026 10:00:00 - INFO - __main__ - global_step = {1}, average loss = {2}",
        *((0, 500), (0, 1000), (0, 1500)),
    ),
    "units": ("step {1}k: loss {2}nats, 12.3k tok/s, 45.2%", (0, 1), (0, 2), (0, 3)),
    "of ranks": ("[rank0]: step {1} loss {2}\n[rank1]: step {1} loss 99", (0, 1), (0, 2), (0, 3)),
    "tensors": ("step {1} loss tensor({2}, grad_fn=<MseLossBackward0>)", (0, 1), (0, 2), (0, 3)),
    "epochs": ("Epoch {0}: train_loss = {2}", (1, 0), (2, 0), (3, 0)),
}
STEPS = {
    "CIFAR tutorial": [2000, 4000, 6000, 8000],
    "MNIST example": [0, 640, 59904, 60000],
    "ImageNet example": [0, 10, 500],
    "torchvision": [10, 20, 1262],
    "tutorial": [100, 600, 700],
    "mmengine": [50, 100, 550],
    "units": [1000, 2000, 3000],
    "epochs": [1, 2, 3],
}
"""Curves whose steps restart at each epoch, are printed in thousands, or are epochs."""


@pytest.mark.parametrize("name", LINES)
def test_the_curve_in_lines(name):
    line, *places = LINES[name]
    found = read("\n".join(line.format(*place, 3 - n / 2) for n, place in enumerate(places)))
    steps = STEPS.get(name) or [step for _, step in places]
    values = {step: values["loss"] for step, values in found.records.items()}
    assert values == {step: 3 - n / 2 for n, step in enumerate(steps)}


def test_other_values_of_a_step():
    line = "step 1 | loss: 2.5 | lr 1.0e-03 | norm: 3 | grad norm: 0.25 | 12 ms | tok/sec: 1,234,567 (45.2%)"
    reading = read_line(line)
    assert reading.values == {"lr": 1e-3, "grad_norm": 0.25, "tokens_per_s": 1_234_567}


def test_a_number_with_a_decimal_comma_is_not_cut():
    for text, loss in {
        "1,45": {},
        "1,2345": {},
        "1234,567": {},
        "1,234": {"": 1234.0},
        "1,": {"": 1.0},
    }.items():
        reading = read_line(f"step 4 loss {text}, lr 0.5")
        assert (reading.positions, reading.losses, reading.values) == ({"step": (4, None)}, loss, {"lr": 0.5})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # The second number does not restart at an epoch, so it is the step.
        ("epoch 0 iter 9 loss 5\nepoch 1 iter 19 loss 4\nepoch 2 iter 29 loss 3", {9: 5, 19: 4, 29: 3}),
        ("\n".join(f"stage 1 step 1/3 iter {n} loss {n}" for n in (1, 2, 3)), {2: 2, 3: 3}),
        ("micro_step: 4 step: 2 loss: 5\nmicro_step: 8 step: 4 loss: 4", {2: 5, 4: 4}),
        # Only the second epoch shows which of two numbers is the step.
        (
            "\n".join(f"epoch {e} step {n} iter {10 * e + n} loss 1" for e in (0, 1) for n in (1, 5, 9)),
            dict.fromkeys((1, 5, 9, 11, 15, 19), 1),
        ),
        # The script resumed from a checkpoint, so it computes some steps again.
        ("\n".join(f"step {n} loss {n}" for n in (1, 2, 3, 4, 3, 4, 5)), {1: 1, 2: 2, 3: 3, 4: 4, 5: 5}),
        # The lines of the set-up are numbered too, and the name of a checkpoint has a number.
        ("Step 1: load\nStep 2: build\nloaded step 500 loss 9\nstep 1 loss 5\nstep 2 loss 4", {1: 5, 2: 4}),
        ("iter 1 loss nan\niter 2 loss inf\niter 3 loss 1", {1: math.nan, 2: math.inf, 3: 1}),
        # Averages of an epoch are printed between the steps.
        ("iter 5 loss 3\niter 6 loss 2\nEpoch 1 done, average loss: 9\niter 7 loss 1", {5: 3, 6: 2, 7: 1}),
        ("step 1 box_loss 1 cls_loss 2 loss 3\nstep 2 box_loss 1 cls_loss 2 loss 4", {1: 3, 2: 4}),
    ],
)
def test_the_step_is_what_grows(text, expected):
    assert str(losses(text)) == str({step: float(loss) for step, loss in expected.items()})


def test_a_bar_of_epochs_is_not_mixed_with_that_of_their_steps():
    bar = "{0}:  10%|█  | {1}/{2} [00:01<00:09, 5it/s, loss={3}]"
    lines = []
    for epoch in range(2):
        lines += [bar.format("train", n, 10, epoch * 10 + n) for n in (2, 5, 10)]
        lines.append(bar.format("epochs", epoch + 1, 2, 99))
    assert losses("\n".join(lines)) == {step: step for step in (2, 5, 10, 12, 15, 20)}
    lines = []
    for epoch, (begin, length) in enumerate(((0, 10), (10, 9), (19, 10))):
        lines += [bar.format(f"epoch {epoch}", n, length, begin + n) for n in (2, 5, length)]
    assert losses("\n".join(lines)) == {step: step for step in (2, 5, 10, 12, 15, 19, 21, 24, 29)}


def test_several_losses_are_in_doubt():
    text = "\n".join(f"[{n}/5][{n}/9]\tLoss_D: {n}.5\tLoss_G: 3.4\tD(x): 0.6" for n in range(4))
    curve = read(text)
    assert (curve.ambiguous, curve.num_losses) == (("loss_d", "loss_g"), 4)
    assert (curve.found.names, curve.found.metrics) == ((), ("loss_d", "loss_g"))
    assert curve.records[3] == {"loss_d": 3.5, "loss_g": 3.4}


def test_ranks_that_print_into_one_log_are_one_curve():
    lines = [f"step {n} loss {n}.{rank}" for n in range(3) for rank in (0, 1)]
    lines[2:4] = lines[3:1:-1]  # a rank that is late
    lines.insert(3, "step 0 loss 0.7")
    assert losses("\n".join(lines), is_shared=True) == {0: 0.0, 1: 1.1, 2: 2.0}


def test_validation_losses():
    text = """
    step 10 loss 3.0
    step 20 loss 2.5
    Validation:  50%|█████     | 5/10 [00:01<00:01, 5it/s, loss=9.9]
    validation step 3/10 loss 8.8
    Validation: loss 2.75
    step 30 loss 2.0, val_loss 2.25
    step 40 loss 1.5, val_loss 2.25
    test loss 7.0 at step 40
    """
    curve = read(text)
    assert [values["loss"] for values in curve.records.values()] == [3.0, 2.5, 2.0, 1.5]
    assert curve.evaluations == [(20, 2.75), (30, 2.25)]


@pytest.mark.parametrize("between", ["", "saved the best\n"])
def test_a_validation_loss_after_each_bar(between):
    bar = "Epoch {0}/3:  {1}%|█  | {1}/50 [00:01<00:09, 9it/s, loss=1.5]\r"
    epochs = ("".join(bar.format(e, n) for n in range(1, 51)) + f"\nval_loss: 0.{5 - e}\n" for e in (1, 2, 3))
    found = read("".join(epoch + between for epoch in epochs))
    assert found.evaluations == [(50, 0.4), (100, 0.3), (150, 0.2)]


def test_an_attempt_counts_on_from_the_epoch_in_which_it_resumes():
    first = read("\n".join(f"epoch {e} batch {n}/10 loss 1" for e in (0, 1) for n in (5, 10)))
    assert (list(first.records), first.found.length, first.found.first_epoch) == ([5, 10, 15, 20], 10, 0)
    again = read("epoch 1 batch 5/10 loss 1\nepoch 1 batch 10/10 loss 1", previous=first.found)
    assert list(again.records) == [15, 20]
    other = Found("step", (), None, None, None)
    assert list(read("step 300 loss 1\nstep 310 loss 1", previous=other).records) == [300, 310]


NO_CURVES = {
    "pip": ("     ━━━━━━━━━━━ {0}/899 MB 9 MB/s eta 0:00:09\r", 10, 20),
    "download": ("model.safetensors:   1%|▏      | {0}.5M/4.0G [00:01<05:00, 10MB/s]\r", 10, 20),
    "tokenization": ("Map:  {0}0%|█   | {0}000/10000 [00:01<00:09, 999 examples/s]\r", 1, 2),
    "weights": ("Loading checkpoint shards:  50%|█████     | {0}/2 [00:01<00:01]\r", 1, 2),
    "pytest": ("tests/test_loss.py::test_step_{0} PASSED [ {0}%]\n", 10, 20),
    "config": ("{{'loss': 'mse', 'lr': 0.001, 'steps': 1000, 'loss_weight': 0.{0}, 'epochs': 10}}\n", 1, 2),
    "arguments": ("Namespace(epochs=10, lr=0.1, loss_scale=0, steps={0}00, lr=0.1)\n", 1, 2),
    "docker": ("Step {0}/10 : RUN pip install loss==0.{0}\n ---> 0a1b2c\n", 1, 2),
    "ping": ("iter {0}: 3 packets, packet loss 0.{0}\niter {0}: loss {0}%\n", 1, 2),
    "traceback": ('  File "train.py", line {0}, in step\n    loss = 2.5\nValueError: loss {0}\n', 1, 2),
    "evaluation": ("Evaluating:  10%|█  | {0}/10 [00:01<00:09, loss=1.{0}]\r", 1, 2),
    "batches": ("validation step {0} loss 3\nwarmup step {0} loss 3.{0}\n", 1, 2),
    "result": ("final loss 0.2{0} after 100 steps\ntest loss: 0.3\n", 1, 2),
    "once": ("step 100 loss 0.25\n", 1),
    "same step": ("step 5 loss {0}.5\n", 1, 2, 3),
    "trading": ("step {0} stop loss 101.5\n", 1, 2),
    "k-means": ("Iteration {0}, inertia 123.5.\n", 1, 2),
    "prose": ("Step {0}: think of the loss of heat, and multiply 3 by 4.\n", 1, 2),
    "server": ("INFO:     127.0.0.1:100{0} - GET /loss/{0} HTTP/1.1 200\n", 1, 2),
    "git": ("Receiving objects:  10% ({0}/100), 1.5 MiB | 2 MiB/s\r", 1, 2),
    "ffmpeg": ("frame=  {0} fps= 25 q=28.0 size=     256kB time=00:00:04\r", 1, 2),
    "best": ("new best loss 0.{0} at step 1{0}\n", 1, 2),
    "numbers": ("{0} 2 3 4.5 nan inf 7/8 [{0}/10]\n", 1, 2),
}


@pytest.mark.parametrize("name", NO_CURVES)
def test_none_is_invented(name):
    line, *numbers = NO_CURVES[name]
    curve = read("".join(map(line.format, numbers)))
    assert (curve.found, curve.records, curve.evaluations) == (None, {}, [])


def test_lines_as_they_were_shown():
    assert shown_lines(b"a\r\rb\r\nc\x08\x08\x08d\n \xff\n unfinished") == (
        ["a", "b", "c", "d", " \ufffd"],
        b" unfinished",
    )


@pytest.mark.parametrize("text", ["loss " * 9999, "1/" * 9999, "[" * 9999, " " * 9999, "step:" * 9999 + "1"])
def test_the_time_of_a_line_is_bounded(text):
    began_s = time.process_time()
    for _ in range(20):
        read_line(text[: 9 * MAX_LINE])
    assert time.process_time() - began_s < 0.5
