"""Makes runs that really fail on this machine, each for a different reason, and records each as one file.

`python -m tests.support.broken_runs NAME…` makes runs (all of them without NAME) and records them in
tests/capabilities/diagnose/broken_runs, with the names of this machine and its folders replaced.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any

import yaml

from tests.support.programs import ranks_of, wait_for
from tests.support.recorded import filled_json
from trainkit.capabilities.diagnose.signatures import load_signatures
from trainkit.run.rundir import RunDir

FOLDER = Path(__file__).parents[1] / "capabilities" / "diagnose" / "broken_runs"
HOST = "node01"
TIMEOUT_S = 180
MAX_LINES = 14
"""The number of lines of a recorded log that are kept, counted from its end."""
PLAN_KEYS = ("backend", "num_nodes", "workers_per_node", "node_sizes", "batch", "command", "launcher")
CONFIG_KEYS = {
    **{"resources": ("mem", "time", "time_min", "slice", "extra"), "launch": ("network",)},
    **{
        "requeue": ("grace_s",),
        "data": ("num_workers",),
        "optimizer": ("lr",),
        "schedule": ("warmup_steps",),
    },
    **{"precision": ("dtype",), "train": ("log_every",)},
}
"""The keys of a plan and of the sections of a config that a diagnosis reads, and those of a broken config."""

PREAMBLE = """\
import datetime, errno, os, signal, socket, sys, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
print(f"rank {rank} of {world} starts", flush=True)
"""
TRAINER = ("model.preset=nano", "data.seq_len=64", "train.device_batch_size=4", "train.global_batch_size=16")
TRAINER += ("train.log_every=1", "train.eval_every=null", "device=cpu", "logging.tensorboard=false")


@dataclass(frozen=True)
class Broken:
    """A run of two ranks that fails: its script or settings, and the expected diagnosis."""

    expect: dict[str, Any]
    script: str = ""
    """The Python code of every rank. The built-in trainer runs if the code is empty."""
    options: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    about: str = ""
    """Describes how the run is broken, if the code does not show it."""
    package: str | None = None
    """A package that the script needs and that the tests do not install."""


def scripts(table: str) -> Iterator[tuple[list[Any], str, str]]:
    """Yield the head, the comment and the code of each script in a table. The code is indented."""
    for head, text in re.findall(r"^(\S.*)\n((?: .*\n)*)", table, re.MULTILINE):
        about, code = re.findall(r"\A(?:# (.*)\n)?((?:.*\n)*)", dedent(text))[0]
        yield [None if word == "-" else word for word in shlex.split(head)], about, code


TABLE = Path(__file__).with_suffix(".txt").read_text()
"""The runs: name, signature, rank, confidence, options, the script's arguments after --, and the script."""


def _broken() -> Iterator[tuple[str, Broken]]:
    for (name, cause, rank, confidence, *rest), about, code in scripts(TABLE):
        at = rest.index("--") if "--" in rest else len(rest)
        host = HOST if cause else None
        expect = {"name": cause, "rank": rank and int(rank), "host": host, "confidence": confidence}
        package = "wandb" if "import wandb" in code else None
        yield name, Broken(expect, code, tuple(rest[:at]), tuple(rest[at + 1 :]), about, package)
    finished = {"name": None, "state": "nothing failed"}
    yield "finished", Broken(finished, "print('CUDA out of memory, but not here')")


BROKEN = dict(_broken())


def make(name: str, folder: Path) -> Path:
    """Make one run below a folder, wait for its end, and return its run folder."""
    broken = BROKEN[name]
    run, home = folder / "run", folder / "home"
    argv = [sys.executable, "-m", "trainkit", "submit", "--backend", "local", "--follow"]
    argv += ["--run-dir", str(run), "--nodes", "1", "--gpus-per-node", "2"]
    argv += ["--set", "requeue.max=0", *broken.options]
    if broken.script:
        (folder / "train.py").write_text(PREAMBLE * (name != "syntax-error") + broken.script)
        argv += ["--", *([] if "--launcher" in argv else ["python"]), "train.py", *broken.arguments]
    else:
        argv += [part for setting in TRAINER for part in ("--set", setting)]
    if broken.package is not None and find_spec(broken.package) is None:
        raise SystemExit(f"{name} needs {broken.package}: install it below DIR, and set PYTHONPATH=DIR")
    env = {**os.environ, "XDG_STATE_HOME": str(home), "XDG_CONFIG_HOME": str(home), "OMP_NUM_THREADS": "1"}
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    env |= {"PYTHONPATH": os.pathsep.join(paths), "GLOO_SOCKET_IFNAME": "lo"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    with (folder / "submit.log").open("wb") as log:
        started = subprocess.Popen(argv, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            if name == "hang":
                metrics = run / "metrics.jsonl"
                wait_for(lambda: metrics.exists() and metrics.stat().st_size > 1000)
                os.kill(ranks_of(RunDir(run))[1], signal.SIGSTOP)
            started.wait(timeout=TIMEOUT_S)
        finally:
            started.kill()
            started.wait()
    return run


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
    """Return what a diagnosis reads of the files of a run, by their path."""
    return {
        str(path.relative_to(run)): text
        for pattern in KEPT
        for path in sorted(run.glob(pattern))
        if "latest" not in path.parts
        if (text := _recorded(path.name, neutral(path.read_text(errors="replace"))))
    }


_RANK = r"(?:\[rank\d+\]: )?"
LIBRARY_FRAME = re.compile(
    rf'^{_RANK}  File "(?:.*/site-packages/|.*/lib/python3|.*/trainkit/trainkit/|<frozen).*\n'
    rf'(?:{_RANK}    .*\n)*(?={_RANK}  File ")',
    re.MULTILINE,
)
"""Matches a frame of a library that another frame follows."""


def cut(text: str) -> str:
    """Return the last lines of a log, from the first line with a known error, without frames of libraries."""
    lines = LIBRARY_FRAME.sub("", text).splitlines()
    patterns = [pattern for signature in load_signatures() for pattern in signature.patterns]
    known = (index for index, line in enumerate(lines) if any(one.search(line) for one in patterns))
    lines = lines[min(max(0, len(lines) - MAX_LINES), next(known, len(lines))) :]
    while lines and lines[0].startswith("     "):  # the rest of a frame
        del lines[0]
    return "".join(f"{line}\n" for line in lines)


def neutral(text: str, folder: str) -> str:
    """Return a text without the names and folders of this machine."""
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


class _Flow(dict[str, Any]):
    """Is written on one line."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text[:-1] else '"' if "\n" in text else None
    ),
)
_Dumper.add_representer(
    _Flow, lambda dumper, value: dumper.represent_mapping("tag:yaml.org,2002:map", value, flow_style=True)
)


def write(name: str, content: dict[str, Any]) -> None:
    """Write a record, with the expected diagnosis and Slurm's view on one line each."""
    content = {key: _Flow(value) if key in ("expect", "slurm") else value for key, value in content.items()}
    text = yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=10**6, allow_unicode=True)
    (FOLDER / f"{name}.yaml").write_text(text)


def _recorded(name: str, text: str) -> str:
    """Return what a diagnosis reads of a file, with JSON in few lines."""
    if name.endswith(".log"):
        return cut(text)
    if name == "config.yaml":
        config = yaml.safe_load(text)
        chosen = {
            section: {key: value for key, value in config.get(section, {}).items() if key in keys and value}
            for section, keys in CONFIG_KEYS.items()
        }
        known = {section: own for section, own in chosen.items() if own}
        return yaml.safe_dump(known, default_flow_style=True, width=125)
    value = json.loads(text) if name.endswith(".json") else None
    if not isinstance(value, dict):
        return text
    if name == "plan.json":
        value = {key: value[key] for key in PLAN_KEYS if value.get(key) is not None}
    elif name == "rendezvous.json":
        value = {"hosts": value["hosts"]}
    elif name == "end.json":
        value = {key: own for key, own in value.items() if key not in ("mark", "best")}
    else:
        value = {key: own for key, own in value.items() if (key, own) != ("hint", "")}
        if value.get("type") in ("exit", "RankKilled"):
            value.pop("log_tail", None)
        if "log_tail" in value:
            value["log_tail"] = cut("\n".join(value["log_tail"])).splitlines()
        if "stack" in value:
            value["stack"] = value["stack"][:4]
    return filled_json(value)


def _indented(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"


def unpack(content: dict[str, Any], run: Path) -> None:
    """Write a recorded run folder, with JSON as trainkit writes it."""
    for name, recorded in content["files"].items():
        is_filled = name.endswith(".json") and recorded.startswith("{")
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(_indented(json.loads(recorded)) if is_filled else recorded)


def is_real(content: Mapping[str, Any]) -> bool:
    """Return whether a run really failed, or a real tool printed its error."""
    return content["about"].startswith("Recorded") or str(content.get("source")).startswith("https://")


if __name__ == "__main__":
    for chosen in sys.argv[1:] or BROKEN:
        print(chosen, flush=True)
        record(chosen)
