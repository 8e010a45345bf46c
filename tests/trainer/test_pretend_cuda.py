"""Tests that every line under a CUDA condition runs, on CPUs that pretend to be GPUs.

See `support/pretend_cuda.py`.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pack_sequence

from tests.capabilities.generate.test_generate import request
from tests.support import pretend_cuda, tasks
from tests.support.cuda_lines import not_run
from tests.support.hf_models import need
from tests.support.ranks import start_ranks, wait_for_all
from tests.support.runs import TIMEOUT_S, fork_workers, free_port, log_text, make_attempt, wait_for
from trainkit.capabilities.doctor.bandwidth import Layout as Hosts
from trainkit.capabilities.generate.worker import generate
from trainkit.errors import TrainkitError, UsageError
from trainkit.run.events import read_metrics
from trainkit.run.rundir import AttemptDir, RunDir

# One process runs all these tests, because they read the same runs.
pytestmark = [pytest.mark.slow(seconds=6), pytest.mark.smoke, pytest.mark.xdist_group("pretend_cuda")]

MAIN = "MainThread"
COMMON = (
    *("parallel.compile=false", "train.steps=3", "train.eval_every=3", "train.eval_batches=1"),
    *("train.global_batch_size=8", "train.device_batch_size=4", "model.num_layers=1"),
    *("checkpoint.every_steps=2", "checkpoint.best_metric=null"),
)
SMALL = "train.device_batch_size=2"
"""Each of two ranks with different samples accumulates two microbatches with this value too."""
PROFILED = ("profiler.start_step=2", "profiler.num_steps=2", "profiler.memory=true")
SCHEDULE = "1f1b" if torch.__version__ < "2.12" else "zbv"
"""torch 2.11 has each stage send to the next before its first step, which gloo cannot do on one rank."""
BF16, TASK = "precision.dtype=bf16", f"task={Path(tasks.__file__)}:Classify"

WINDOWS = ("model.sliding_window=100", "model.attention_soft_cap=5", "model.logit_soft_cap=3")


@dataclass(frozen=True)
class Layout:
    num_procs: int
    overrides: tuple[str, ...]
    microbatches: int = 2
    """The number of microbatches of a rank in a step."""
    tolerance: float = 1e-6
    """The allowed difference of each metric from the run on CPUs.

    It is larger if GPUs compute attention in another way.
    """


LAYOUTS = {
    "fp16": Layout(1, ("precision.dtype=fp16", "precision.init_loss_scale=5e5")),
    "mask-8bit": Layout(1, (BF16, "data.document_mask=true", "optimizer.name=adamw_8bit"), tolerance=5e-4),
    "blocks": Layout(
        1,
        (BF16, "data.document_mask=true", "parallel.compile=true", "optimizer.name=adamw_8bit"),
        tolerance=5e-4,
    ),
    "windows": Layout(1, (BF16, *WINDOWS, "parallel.compile=true"), tolerance=5e-4),
    "windows-cp": Layout(2, (BF16, *WINDOWS, "parallel.cp=2"), tolerance=5e-4),
    "stream": Layout(1, (f"{TASK}Stream", "parallel.mesh_of_one=true", *PROFILED)),
    "fsdp": Layout(2, (BF16, "parallel.dp_shard=2", SMALL)),
    "replicate": Layout(
        2,
        (
            *("parallel.dp_replicate=2", "parallel.dp_shard=1", "train.steps=10", "precision.tf32=true"),
            *("optimizer.name=muon", SMALL),
        ),
    ),
    "tp": Layout(
        2, ("parallel.tp=2", "checkpoint.async=false", "train.deterministic=true", "optimizer.name=muon")
    ),
    "cp": Layout(2, ("parallel.cp=2", BF16), tolerance=5e-4),
    "cp-exact": Layout(2, ("parallel.cp=2", BF16, "train.deterministic=true"), tolerance=5e-4),
    "pipeline": Layout(2, ("parallel.pp=2", f"parallel.pp_schedule={SCHEDULE}", "model.num_layers=2")),
    "offload": Layout(2, ("parallel.dp_shard=2", "parallel.offload=true", SMALL)),
    "task": Layout(2, (TASK, "parallel.dp_shard=2", "data.num_workers=1", SMALL)),
}


def as_gpu() -> None:
    """Pretend to be a GPU, and record where steps begin and end and on which GPU the task's code runs."""
    pretend_cuda.install()
    # no backend can compile for a pretended GPU
    torch.compile = lambda function=None, **_: function or (lambda other: other)

    from trainkit.trainer import worker
    from trainkit.trainer.progress import Progress

    begin, end, build_task = Progress.begin_step, Progress.end_step, worker.build_task

    def begin_noted(progress: Progress, step: int) -> None:
        begin(progress, step)
        pretend_cuda.note("begin step")

    def end_noted(progress: Progress) -> None:
        pretend_cuda.note("end step")
        end(progress)

    def build_noted(*args: Any, **kwargs: Any) -> Any:
        pretend_cuda.note(f"task is built on {pretend_cuda.current_device()}")
        return build_task(*args, **kwargs)

    Progress.begin_step, Progress.end_step = begin_noted, end_noted  # type: ignore[method-assign]
    worker.build_task = build_noted


@dataclass(frozen=True)
class Record:
    """The events that one process has recorded."""

    notes: list[tuple[str, str]]
    lines: set[tuple[str, int]]
    used: list[int]

    def of(self, thread: str) -> list[str]:
        return [what for what, name in self.notes if name == thread]

    def steps(self) -> list[list[str]]:
        """Return the events of the main thread in each step."""
        found: list[list[str]] = []
        inside = False
        for what in self.of(MAIN):
            if what == "begin step":
                found.append([])
            elif inside and what != "end step":
                found[-1].append(what)
            inside = what == "begin step" or (inside and what != "end step")
        return found


def pretend(attempt: AttemptDir, num_procs: int, codes: int = 0) -> list[Record]:
    folder = attempt.path / "pretend"
    folder.mkdir()
    env = {pretend_cuda.RECORD_VARIABLE: str(folder)}
    assert wait_for(fork_workers(attempt, num_procs, env, as_gpu)) == [codes] * num_procs, log_text(attempt)
    return read_records(folder)


def read_records(folder: Path) -> list[Record]:
    values = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    return [
        Record(item["notes"], {(name, line) for name, line in item["lines"]}, item["used"]) for item in values
    ]


def curve(run: Path) -> list[list[float]]:
    """Return some values of each step, with NaN for missing values and for losses that are not finite."""
    keys = ("step", "loss", "grad_norm", "val_loss", "tokens")
    records = read_metrics(RunDir(run))
    return [[math.nan if record.get(key) is None else record[key] for key in keys] for record in records]


def in_ranks(folder: Path, num_procs: int, function: Callable[..., None], *args: Any) -> list[Record]:
    folder.mkdir()
    procs = start_ranks(_pretending, num_procs, str(folder), num_procs, free_port(), function, args)
    assert wait_for_all(procs, TIMEOUT_S) == [0] * num_procs
    return read_records(folder)


def _pretending(
    rank: int, folder: str, num_procs: int, port: int, function: Callable[..., None], args: Any
) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_procs, "LOCAL_WORLD_SIZE": num_procs}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ[pretend_cuda.RECORD_VARIABLE] = folder
    function(rank, *args)


class Runs:
    """Makes each run when a test first needs it, and keeps its records."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._records: dict[str, list[Record]] = {}

    def of(self, name: str) -> list[Record]:
        if name not in self._records:
            self._records[name] = self.train(name) if name in LAYOUTS else PROGRAMS[name](self, self.folder)
        return self._records[name]

    def train(self, name: str) -> list[Record]:
        """Train a layout on pretended GPUs, and on CPUs at the same time."""
        layout = LAYOUTS[name]
        options = [*COMMON, *layout.overrides]
        # this matches the other run, and compiling would take longer than the rest
        eager = "parallel.compile=false"
        on_cpu = make_attempt(self.folder / f"{name}-cpu", [*options, eager], layout.num_procs)
        workers = fork_workers(on_cpu, layout.num_procs)
        attempt = make_attempt(self.folder / name, [*options, "device=cuda"], layout.num_procs)
        records = pretend(attempt, layout.num_procs)
        assert wait_for(workers) == [0] * layout.num_procs, log_text(on_cpu)
        return records


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("pretend"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout(runs, name):
    """The results equal the results on CPUs, each rank uses one GPU, and the host waits once per step."""
    layout, records = LAYOUTS[name], runs.of(name)
    gpu, cpu = (curve(runs.folder / folder) for folder in (name, f"{name}-cpu"))
    for mine, other in zip(gpu, cpu, strict=True):
        assert mine == pytest.approx(other, rel=layout.tolerance, abs=layout.tolerance, nan_ok=True)
    said = log_text(RunDir(runs.folder / name).attempt(1))
    equal = "bit-identical" if "train.deterministic=true" in layout.overrides else "equal up to rounding"
    assert f"{equal} (train.deterministic)" in said
    assert ("(precision.tf32)" in said) == ("precision.tf32=true" in layout.overrides)
    said_skipped = {*re.findall(r"step=(\d+) skipped", said)}
    skipped = [str(step + 1) in said_skipped for step in range(len(gpu))]
    # fp16 begins with a loss scale that is too large.
    assert (any(skipped), skipped[-1]) == (name == "fp16", False)
    assert not any(math.isnan(loss) for _, loss, *_ in gpu)
    for rank, record in enumerate(records):
        assert record.of(MAIN)[0] == f"set_device {rank}"
        assert record.used == [rank]
        assert [what for what, _ in record.notes if what.startswith("task")] == [f"task is built on {rank}"]
        if name == "offload":
            continue  # gradients and the divisor are copied to the host, which waits for them
        # In the first step of a pipeline, its stages exchange their shapes.
        for number, step in [*enumerate(record.steps(), 1)][name == "pipeline" :]:
            copies = 3 * layout.microbatches + 1 + (layout.num_procs > 1 and number % 10 == 0)
            expected = {"copy pinned to gpu": copies, "copy gpu to pinned": 1, "Event.synchronize": 1}
            if skipped[number - 1]:
                # the host reads whether the loss scale can be halved
                expected["wait for _local_scalar_dense"] = 1
            assert Counter(filter(host_notices, step)) == expected, number


def host_notices(what: str) -> bool:
    return what.startswith(("copy", "wait")) or what.endswith("synchronize")


def test_saves(runs):
    """A step waits only for the stream. Another thread copies tensors, except numbers, to pinned memory."""
    for record in runs.of("fsdp"):
        steps = record.of(MAIN)
        # Before the save, the ranks agree whether it fits on the disk.
        first = steps.index("end step", steps.index("Stream.synchronize") - 4)
        assert [*filter(host_notices, steps[first : steps.index("begin step", first)])] == [
            "Stream.synchronize"
        ]
        [staging] = {name for what, name in record.notes if what == "Stream.synchronize" and name != MAIN}
        num_params = Counter(record.of(staging))["copy gpu to pageable, waits"]
        assert Counter(record.of(staging)) == {
            "copy gpu to pageable, waits": num_params,  # torch copies the step count of each parameter
            "copy gpu to pinned": 3 * num_params,
            "Stream.synchronize": 2,  # after steps 2 and 3
        }


def stop_and_resume(runs: Runs, folder: Path) -> list[Record]:
    options = [*COMMON, *LAYOUTS["fsdp"].overrides, "device=cuda"]
    pretend(make_attempt(folder / "stopped", [*options, "train.stop_at_step=2"], 2), 2, codes=75)
    return pretend(make_attempt(folder / "stopped", options, 2), 2)


def test_a_resume(runs):
    """`test_stop.py` stops ranks during a save."""
    assert [record.used for record in runs.of("stopped")] == [[0], [1]]
    runs.of("fsdp")
    stopped, whole = (curve(runs.folder / name) for name in ("stopped", "fsdp"))
    assert [row[:3] for row in stopped] == [row[:3] for row in whole]


def continue_prompt(rank: int, request: dict[str, Any], out: str) -> None:
    pretend_cuda.install()
    from trainkit.capabilities.generate.worker import generate

    with Path(out).open("w") as stream, redirect_stdout(stream):
        generate(request)


def continue_prompts(runs: Runs, folder: Path) -> list[Record]:
    runs.of("fp16")
    asked = request(folder / "fp16", as_json=True, device="auto", dtype="fp32")
    return in_ranks(folder / "generate", 1, continue_prompt, asked, str(folder / "text"))


def test_generate(runs, capsys):
    [record] = runs.of("generate")
    asked = request(runs.folder / "fp16", as_json=True)
    generate(asked)
    assert (runs.folder / "text").read_text() == capsys.readouterr().out
    assert Counter(record.of(MAIN))["copy gpu to pageable, waits"] == asked["max_tokens"]
    with pytest.raises(UsageError, match="this machine has no GPU that torch can use"):
        generate({**asked, "device": "cuda"})


def own_loop(rank: int, folder: str) -> None:
    pretend_cuda.install()
    os.chdir(folder)

    from trainkit.loop import attach

    run = attach("run")
    assert (run.device, pretend_cuda.current_device()) == (torch.device("cuda", rank), rank)
    torch.manual_seed(0)  # other seeds may begin so near the smallest loss that a step passes it
    model = torch.nn.Linear(4, 1).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(3, save_every=2, log_every=1):
        loss = model(torch.ones(8, 4, device=run.device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)


def loop_in_ranks(runs: Runs, folder: Path) -> list[Record]:
    (folder / "own").mkdir()
    return in_ranks(folder / "loop", 2, own_loop, str(folder / "own"))


def test_a_loop_of_ones_own(runs):
    assert [record.used for record in runs.of("loop")] == [[0], [1]]
    losses = [record["loss"] for record in read_metrics(RunDir(runs.folder / "own/run"))]
    assert losses == sorted(losses, reverse=True)


def bandwidth(rank: int, layout: Hosts) -> None:
    pretend_cuda.install()
    from trainkit.capabilities.doctor import bandwidth

    bandwidth.SIZE_MIB["nccl"] = 1
    bandwidth.measure(rank, 0, layout, "")


def measure(runs: Runs, folder: Path) -> list[Record]:
    layout = Hosts(("a",), (2,), "127.0.0.1", free_port())
    return in_ranks(folder / "bandwidth", 2, bandwidth, layout)


def test_bandwidth(runs):
    for rank, record in enumerate(runs.of("bandwidth")):
        assert record.used == [rank]
        count = Counter(record.of(MAIN))
        assert count["torch.cuda.synchronize"] >= count["nccl allreduce_"] > 1


def four_bits(rank: int) -> None:
    import bitsandbytes  # noqa: F401  # as on a CPU: on a GPU it would load libraries of CUDA

    pretend_cuda.install()
    from trainkit.trainer.quantization import NF4Linear

    linear = torch.nn.Linear(96, 40).requires_grad_(False)
    results = []
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        layer = NF4Linear(linear)
        layer.quantize(linear.weight.to(device))
        layer.bias = torch.nn.Parameter(linear.bias.to(device))
        x = torch.linspace(0, 1, 5 * 96).view(5, 96).to(device).requires_grad_()
        with torch.autocast(device.type, torch.bfloat16):
            y = layer(x)
        y.float().sum().backward()
        assert x.grad is not None
        assert {item.device for item in (y, x.grad, layer.packed)} == {device}
        assert y.dtype == torch.bfloat16
        results.append((y.cpu(), x.grad.cpu()))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_nf4(tmp_path):
    need("bitsandbytes")
    in_ranks(tmp_path / "gpu", 1, four_bits)


def what_a_gpu_refuses(rank: int) -> None:
    pretend_cuda.install()
    gpu, host = torch.zeros(2, device="cuda:1"), torch.ones(2)
    assert {(gpu + 1).device, gpu[:1].device, torch.empty_like(host, device=gpu.device).device} == {
        gpu.device
    }
    assert (host * 2).device == torch.tensor([1.0]).device == gpu.cpu().device == torch.device("cpu")
    assert (gpu * torch.tensor(2.0)).device == gpu.device
    for refused in (
        lambda: gpu + host,
        lambda: torch.stack((gpu, host)),
        lambda: gpu + gpu.to("cuda:2"),
        gpu.numpy,
        gpu.pin_memory,
        lambda: torch.cuda.set_device(pretend_cuda.NUM_GPUS),
    ):
        with pytest.raises((RuntimeError, TypeError, AssertionError)):
            refused()
    torch.cuda.set_device(1)
    assert ThreadPoolExecutor(1).submit(torch.cuda.current_device).result() == 0
    assert [what for what, _ in pretend_cuda.notes] == ["copy gpu to pageable, waits", "set_device 1"]
    dist.init_process_group("cpu:gloo,cuda:nccl")
    for backend, wrong in (("nccl", host), ("gloo", gpu)):
        with pytest.raises(RuntimeError, match="No backend"):
            dist.all_reduce(wrong, group=dist.new_group(backend=backend))


def small_parts(rank: int) -> None:
    sys.modules |= {name: ModuleType(name) for name in ("torchao", "torchao.float8")}
    pretend_cuda.install()

    from trainkit.trainer.causal_lm import to_device
    from trainkit.trainer.models.linear import plus_product
    from trainkit.trainer.precision import require_float8
    from trainkit.trainer.profiler import summary_of
    from trainkit.trainer.torch_private import fix_segments, flight_record

    device = torch.device("cuda", 0)
    packed, pair = to_device([pack_sequence([torch.ones(2), torch.ones(1)]), Pair(torch.ones(1), 2)], device)
    assert packed.data.device == pair.values.device == device
    assert (packed.batch_sizes.device, pair.rest) == (torch.device("cpu"), 2)
    require_float8(device)
    pretend_cuda.CAPABILITY = (8, 0)
    with pytest.raises(TrainkitError, match="H100 80GB HBM3 does not support float8"):
        require_float8(device)
    kernels = [
        kernel("nccl_all_reduce", 0.0, 2.0),
        kernel("sm90_gemm", 1.0, 3.0),
        kernel("gemm", 0, 9, "CPU"),
    ]
    summary = summary_of(kernels, num_steps=1, wall_s=4.0, cuda=True)
    seconds = {kind: value for kind, value in summary["seconds_per_step"].items() if value}
    assert seconds == {"communication": 2.0, "gemm": 2.0, "idle": 1.0}
    assert flight_record("cuda", 200) is None
    fix_segments()
    total, left, right = (torch.rand(3, 3, device=device) for _ in range(3))
    left, right = left.bfloat16(), right.bfloat16()
    product = left.float() @ right.float()
    assert torch.equal(plus_product(None, left, right), product)
    expected = total + product
    assert plus_product(total, left, right) is total
    assert torch.equal(total, expected)


class Pair(NamedTuple):
    values: Any
    rest: int


def kernel(name: str, start_s: float, end_s: float, device: str = "CUDA") -> Any:
    span = SimpleNamespace(start=1e6 * start_s, end=1e6 * end_s)
    kind, own_us = SimpleNamespace(name=device), span.end - span.start
    values = {"device_type": kind, "self_device_time_total": own_us, "time_range": span}
    return SimpleNamespace(name=name, is_user_annotation=False, **values)


def test_small_parts(runs):
    runs.of("parts")


def test_what_a_gpu_refuses_is_refused(tmp_path):
    in_ranks(tmp_path / "gpu", 1, what_a_gpu_refuses)
    assert torch.zeros(2).device == torch.device("cpu")
    assert not torch.cuda.is_available()


PROGRAMS: dict[str, Callable[[Runs, Path], list[Record]]] = {
    "stopped": stop_and_resume,
    "generate": continue_prompts,
    "loop": loop_in_ranks,
    "bandwidth": measure,
    "parts": lambda runs, folder: in_ranks(folder / "parts", 1, small_parts),
}
OLD, NO_GPU, VIRTUAL, SHARED = (
    "test_distributed.py::test_a_driver_that_is_too_old_for_torch",
    "test_distributed.py::test_no_gpu_for_a_rank",
    "test_distributed.py::test_a_virtual_gpu_without_expandable_segments",
    "test_distributed.py::test_two_tasks_that_see_the_same_gpu",
)
IMAGES = "../capabilities/media/test_media.py::test_a_value_on_a_gpu_is_copied_without_a_wait"
ELSEWHERE = {
    ("generate", "raise UsageError("): "test_generate, on a CPU",
    ("select_device", "driver = driver_cuda(library)"): OLD,
    ("select_device", "raise TrainkitError("): NO_GPU,
    ("select_device", 'listed = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))'): NO_GPU,
    ("select_device", "is_bound = listed is not None and len(listed) <= local_rank"): NO_GPU,
    ("select_device", "fix_segments()"): VIRTUAL,
    ("select_device", "torch.empty(1, device=device)"): VIRTUAL,
    ("select_device", '_refuse(bf16_problem(name), "precision.dtype ")'): (
        "test_distributed.py::test_a_gpu_that_torch_or_its_tensor_cores_do_not_support"
    ),
    ("join_world", "refuse_shared_gpu(env, gpu, store)"): SHARED,
    ("refuse_shared_gpu", 'if (_read(env, store, _arrival(other)) or "").endswith(f" {gpu}"):'): SHARED,
    ("refuse_shared_gpu", "raise FatalError("): SHARED,
    ("_stage", 'if tensor.device.type != "cuda":'): IMAGES,
    ("_stage", "host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)"): IMAGES,
    ("_stage", "host.copy_(tensor, non_blocking=True)"): IMAGES,
    ("_stage", "copied = torch.cuda.Event()  # type: ignore[no-untyped-call]"): IMAGES,
    ("_stage", "copied.record()"): IMAGES,
    ("_stage", "return Staged(host, copied)"): IMAGES,
}
"""Maps statements that no run here reaches, by function, to the tests that run them, or to a reason."""
OF_A_RANK = """
import torch
COMPILED = ("cuda",)

def update(device, tensors):
    host = device.type not in COMPILED
    if device.type in COMPILED:
        compiled(tensors)
    if host:
        return one_by_one(tensors)
    return at_once(tensors)

def count(tensors):
    match tensors:
        case []:
            return 0
    return len(tensors)
"""


def test_every_line_under_a_cuda_condition_runs(runs):
    ran = {line for name in (*LAYOUTS, *PROGRAMS) for record in runs.of(name) for line in record.lines}
    missing = {(item.function, item.text) for item in not_run(ran)}
    assert sorted(missing - ELSEWHERE.keys()) == []
    assert sorted(ELSEWHERE.keys() - missing) == [], "these run, or are gone"
    for file, _, test in (reason.partition("::") for reason in ELSEWHERE.values()):
        assert not test or f"def {test}(" in (Path(__file__).parent / file).read_text()


def test_a_line_that_does_not_run_is_found(tmp_path):
    (tmp_path / "rank.py").write_text(OF_A_RANK)
    lines = {("rank.py", line) for line in (6, 7, 8, 9, 11)}
    assert {(item.file, item.line) for item in not_run(set(), tmp_path)} == lines
    for missing in lines:
        [found] = not_run(lines - {missing}, tmp_path)
        assert (found.file, found.line) == missing
