"""Runs that fail for real on this machine, each for a reason of its own, and their folders as one file each.

`python -m tests.support.broken_runs NAME…` makes runs (all of them without NAME) and records them in
tests/observe/broken_runs, with the names of this machine and its folders replaced. `--table` writes only the
table of all recorded runs there.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[1] / "observe" / "broken_runs"
HOST = "node01"
TIMEOUT_S = 180
MAX_LINES = 60
"""How many lines of a recorded log are kept: its last ones."""

PREAMBLE = """\
import datetime, errno, os, signal, socket, sys, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
print(f"rank {rank} of {world} starts", flush=True)
"""
GROUP = "import torch, torch.distributed as dist\n"


@dataclass(frozen=True)
class Broken:
    """A run that fails: its script or settings, and what a diagnosis has to say."""

    expect: dict[str, Any]
    script: str = ""
    """The Python code of every rank; empty for the built-in trainer."""
    options: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    num_ranks: int = 2
    env: dict[str, str] = field(default_factory=dict)
    launcher: bool = False
    """Whether torchrun starts the ranks."""
    about: str = ""
    """How it is broken, where the code does not show it."""
    package: str | None = None
    """A package that the script needs and that the tests do not install."""


def expect(name: str | None, rank: int | None = 1, confidence: str = "certain") -> dict[str, Any]:
    return {"name": name, "rank": rank, "host": HOST, "confidence": confidence}


GATED = """\
if rank != 1: signal.pause()
import http.server, threading
class Hub(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_response(403)
        self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("X-Error-Message", "Access to this model is restricted")
        self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
from huggingface_hub import hf_hub_download
hf_hub_download("organization/model", "config.json")
"""
"""The client of the Hugging Face Hub, against a server that answers as the Hub does for a gated model."""
SUPERVISOR = """\
import json
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(3))
with open(os.environ["TRAINKIT_JOB_RUN_DIR"] + "/job.json") as file:
    supervisor = json.load(file)["attempts"][-1]["pid"]
time.sleep(1)
"""
WAIT = "if rank != 1: signal.pause()\n"
TRAINER = ("model.preset=nano", "data.seq_len=64", "train.device_batch_size=4", "train.global_batch_size=16")
TRAINER += ("train.log_every=1", "train.eval_every=null", "device=cpu", "logging.tensorboard=false")
BROKEN = {
    "killed": Broken(expect("killed"), WAIT + "os.kill(os.getpid(), signal.SIGKILL)"),
    "segfault": Broken(expect("killed"), WAIT + "os.kill(os.getpid(), signal.SIGSEGV)"),
    "import-error": Broken(expect("import-error"), WAIT + "import a_package_that_is_not_there"),
    "syntax-error": Broken(expect("syntax-error", None), "def broken(:\n"),
    "disk-full": Broken(expect("disk-full"), WAIT + "open('/dev/full', 'w').write('x' * 10**6)"),
    "quota": Broken(
        expect("quota"),
        WAIT + "raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), '/scratch/user/model.pt')",
        about="A rank raises the error of a quota itself.",
    ),
    "memory-limit": Broken(
        expect("host-oom"),
        WAIT + "import resource\nresource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))\nbytearray(2**32)",
    ),
    "port-in-use": Broken(
        expect("port-in-use", 0),
        GROUP + "if rank: signal.pause()\nbusy = socket.create_server(('127.0.0.1', 0))\n"
        "dist.TCPStore('127.0.0.1', busy.getsockname()[1], 2, True)",
    ),
    "rendezvous": Broken(
        expect("rendezvous", 1),
        GROUP + "if rank: signal.pause()\n"
        "dist.TCPStore('127.0.0.1', 0, 2, True, datetime.timedelta(seconds=1), wait_for_workers=True)",
    ),
    "wrong-interface": Broken(
        expect("wrong-interface", None),
        GROUP + "os.environ['GLOO_SOCKET_IFNAME'] = 'nope0'\ndist.init_process_group('gloo')",
    ),
    "own-exception": Broken(
        expect("exception"),
        GROUP + "dist.init_process_group('gloo')\ndist.barrier()\n"
        "if rank == 1: raise ValueError('the table of labels has 10 classes, not 12')\ndist.barrier()",
    ),
    "shape-mismatch": Broken(
        expect("shape-mismatch"),
        GROUP + WAIT + "torch.nn.Linear(4, 8).load_state_dict(torch.nn.Linear(4, 16).state_dict())",
    ),
    "loss-is-nan": Broken(
        expect("diverged"),
        WAIT + "raise FloatingPointError(f'loss is {float(\"nan\")} at step 12')",
        about="A rank raises the error itself.",
    ),
    "bad-arguments": Broken(
        expect("bad-config", None, "likely"),
        "import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--lr')\nparser.parse_args()",
        arguments=("--learning-rate", "3"),
    ),
    "hf-gated": Broken(
        expect("hf-login"),
        GATED,
        about="The client of the Hub, against a server that answers as the Hub does for a gated model.",
    ),
    "wandb-no-key": Broken(
        expect("wandb-login"),
        WAIT + "os.environ['HOME'] = os.getcwd()\nimport wandb\nwandb.init(project='x')",
        about="The client of Weights & Biases without a key.",
        package="wandb",
    ),
    "exit-code": Broken(expect("exit-code", 1, "likely"), WAIT + "print('giving up'); sys.exit(5)"),
    "caught-oom": Broken(
        expect("killed"),
        WAIT + "print('RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB; skipping this batch')\n"
        "for step in range(3): print(f'step {step} loss 2.1')\n"
        "sys.stdout.flush()\nos.kill(os.getpid(), signal.SIGKILL)",
    ),
    "torchrun-oom": Broken(
        expect("cuda-oom"),
        GROUP + "dist.init_process_group('gloo')\ndist.barrier()\n"
        "if rank == 1: raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1"
        " has a total capacity of 79.11 GiB of which 1.03 GiB is free.')\ndist.barrier()",
        about="A rank raises the error of a GPU itself.",
        launcher=True,
    ),
    "torchrun-killed": Broken(expect("killed"), WAIT + "os.kill(os.getpid(), signal.SIGKILL)", launcher=True),
    "diverged": Broken(
        expect("diverged", None),
        options=("--set", "optimizer.lr=1e30", "--set", "train.steps=100", "--set", "precision.dtype=fp32"),
    ),
    "hang": Broken(
        expect("hang"),
        options=(
            *(
                "--set",
                "train.steps=100000",
                "--set",
                "requeue.hang_min_s=5",
                "--set",
                "requeue.hang_factor=2",
            ),
            *("--set", "checkpoint.every_steps=null"),
        ),
    ),
    "fails-when-stopped": Broken(
        expect("stop-signal", None, "likely"),
        SUPERVISOR + "if rank == 1: os.kill(supervisor, signal.SIGTERM)\nsignal.pause()",
    ),
    "supervisor-killed": Broken(
        {"name": None, "rank": None, "host": None, "confidence": "unknown"},
        SUPERVISOR + "if rank == 1: os.kill(supervisor, signal.SIGKILL)\nsignal.pause()",
    ),
    "finished": Broken(
        {"name": None, "state": "nothing failed"}, "print('CUDA out of memory, but not here')"
    ),
}


def make(name: str, folder: Path) -> Path:
    """Make one run below a folder, to its end; returns its run folder."""
    broken = BROKEN[name]
    run, home = folder / "run", folder / "home"
    argv = [
        sys.executable,
        "-m",
        "trainkit",
        "submit",
        "--backend",
        "local",
        "--follow",
        "--run-dir",
        str(run),
    ]
    argv += [
        "--nodes",
        "1",
        "--gpus-per-node",
        str(broken.num_ranks),
        "--set",
        "requeue.max=0",
        *broken.options,
    ]
    if broken.script:
        (folder / "train.py").write_text(PREAMBLE * (name != "syntax-error") + broken.script + "\n")
        argv += ["--launcher", "torchrun"] * broken.launcher
        argv += ["--", *([] if broken.launcher else ["python"]), "train.py", *broken.arguments]
    else:
        argv += [part for setting in TRAINER for part in ("--set", setting)]
    env = {**os.environ, "XDG_STATE_HOME": str(home), "XDG_CONFIG_HOME": str(home), "OMP_NUM_THREADS": "1"}
    if broken.package is not None and find_spec(broken.package) is None:
        raise SystemExit(f"{name} needs {broken.package}: install it below DIR, and set PYTHONPATH=DIR")
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    env |= {"PYTHONPATH": os.pathsep.join(paths), **broken.env}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    env["GLOO_SOCKET_IFNAME"] = "lo"
    with (folder / "submit.log").open("wb") as log:
        started = subprocess.Popen(argv, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            if name == "hang":
                _stop_rank(run, 1)
            started.wait(timeout=TIMEOUT_S)
        finally:
            started.kill()
            started.wait()
    return run


def _stop_rank(run: Path, rank: int) -> None:
    """Stop the process of a rank once it trains."""
    import signal
    import time

    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        if (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 1000:
            for path in Path("/proc").glob("[0-9]*/environ"):
                try:
                    command = (path.parent / "cmdline").read_bytes()
                    environ = path.read_bytes().split(b"\0")
                except OSError:
                    continue
                if (
                    str(run).encode() in command
                    and b"trainkit.trainer" in command
                    and f"RANK={rank}".encode() in environ
                ):
                    os.kill(int(path.parent.name), signal.SIGSTOP)
                    return
        time.sleep(0.1)
    raise TimeoutError(f"{run} does not train")


KEPT = (
    "attempts/*/end.json",
    "attempts/*/plan.json",
    "attempts/*/rendezvous.json",
    "attempts/*/errors/*.json",
)
KEPT += ("events.jsonl", "attempts/*/hangs/*.json", "attempts/*/logs/*.log", "attempts/*/config.yaml")


def record(name: str) -> None:
    """Make a run and write its folder as one YAML file."""
    with tempfile.TemporaryDirectory() as temporary:
        files = recorded_files(make(name, Path(temporary)), lambda text: neutral(text, temporary))
    about = f"Recorded from a real run by tests/support/broken_runs.py. {BROKEN[name].about}".strip()
    write(name, {"about": about, "expect": BROKEN[name].expect, "files": files})


def recorded_files(run: Path, neutral: Callable[[str], str]) -> dict[str, str]:
    """The files of a run that a diagnosis reads, by their path; of a log, its last lines."""
    files = {}
    for pattern in KEPT:
        for path in sorted(run.glob(pattern)):
            if "latest" in path.parts:
                continue
            lines = path.read_text(errors="replace").splitlines()
            text = neutral("\n".join(lines[-MAX_LINES:] if path.suffix == ".log" else lines))
            if text:
                files[str(path.relative_to(run))] = text + "\n"
    return files


def neutral(text: str, folder: str) -> str:
    """A text without the names and folders of this machine."""
    for found, name in (
        (folder, "/home/user/project"),
        (str(Path(__file__).parents[2]), "/home/user/trainkit"),
        (str(Path(sys.prefix)), "/home/user/venv"),
        (str(Path(sys.base_prefix)), "/usr"),
    ):
        text = text.replace(found, name)
    return re.sub(rf"(?<![\w.-]){re.escape(socket.gethostname())}(?![\w-])", HOST, text)


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def write(name: str, content: dict[str, Any]) -> None:
    (FOLDER / f"{name}.yaml").write_text(
        yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=10**6, allow_unicode=True)
    )


def unpack(content: dict[str, Any], run: Path) -> None:
    """Write a recorded run folder."""
    for name, text in content["files"].items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)


README = FOLDER / "README.md"
INTRODUCTION = """\
# Broken runs

The files of failed runs, each with what `trainkit diagnose` has to say;
`tests/observe/test_diagnose.py` compares.

`python -m tests.support.broken_runs [NAME…]` makes those of one host again, and
`python -m tests.on_slurm.broken_runs --record [NAME…]` those of the test cluster. What needs a GPU is built
around an error that a real tool printed, with its source. Without a rank, all fail alike, or none does.

| run | cause | first | made |
|---|---|---|---|
"""


def is_real(content: Mapping[str, Any]) -> bool:
    """Whether a run failed for real, or its error was printed by a real tool."""
    return content["about"].startswith("Recorded") or str(content.get("source")).startswith("https://")


def table() -> str:
    """The table of all recorded runs."""
    rows = []
    for path in sorted(FOLDER.glob("*.yaml")):
        content = yaml.safe_load(path.read_text())
        expected = content["expect"]
        cause = expected["name"] or expected.get("state", "unknown")
        first = expected.get("host") or ""
        if expected.get("rank") is not None:
            first = f"rank {expected['rank']} on {first}"
        made = content["about"].replace(
            "Recorded from a real run by tests/support/broken_runs.py.", "On one host."
        )
        made = made.replace("Recorded by tests/on_slurm/broken_runs.py.", "On the test cluster.")
        made = " ".join(made.split())
        if str(content.get("source")).startswith("https://"):
            made = f"Around [an error of the real tool]({content['source']})."
        rows.append(f"| {path.stem} | {cause} | {first} | {made} |\n")
    return INTRODUCTION + "".join(rows)


if __name__ == "__main__":
    if sys.argv[1:] != ["--table"]:
        for chosen in sys.argv[1:] or BROKEN:
            print(chosen, flush=True)
            record(chosen)
    README.write_text(table())
