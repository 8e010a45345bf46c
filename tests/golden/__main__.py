"""Writes what trainkit says of recorded runs and would submit: ``python -m tests.golden [FOLDER]``.

Writes one text for each run of folders/ and each case of dry_runs.yaml, by default to expected/, with which
`tests/test_golden.py` compares them. All commands run in this process, on a machine that is always the same:
its time, its name, one core, an empty home, and a cluster whose programs print a few lines of text.
"""

from __future__ import annotations

import contextlib
import datetime
import difflib
import io
import json
import os
import re
import shlex
import shutil
import socket
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from tests.support.recorded import changed_text, filled_json

HERE = Path(__file__).parent
NOW = datetime.datetime(2026, 1, 1, 13, tzinfo=datetime.timezone.utc)
WRITTEN = NOW.timestamp() - 1800
"""When the files of the recorded runs were last changed."""
PROJECT = "@PROJECT@"
HOST = "node01"
WHOLE_DRY_RUN = "dry_runs/conda-on-path.txt"
"""The dry run on Slurm whose text is recorded in full; the others are recorded as what differs from it."""
LENGTH = 80
"""The length of the path in which everything is done: lines are wrapped behind it."""
DIGITS = 14
"""How exact numbers are: `sum` of Python 3.12 rounds otherwise than that of 3.11."""
RUNS = {
    "array": (),
    "bench": (),
    "cancelled": ("diagnose", "ckpt", "logs"),
    "command": ("diagnose", "logs"),
    "command-crashed": ("diagnose",),
    "crashed": ("diagnose", "ckpt"),
    "finished": ("diagnose", "ckpt", "data"),
    "own-loop": ("diagnose", "ckpt"),
    "preempted": ("diagnose", "ckpt"),
    "restarted": ("diagnose", "ckpt", "logs"),
    "sbatch": ("diagnose", "logs"),
    "submitit": ("diagnose",),
    "supervisor-died": ("diagnose", "ckpt"),
    "sweep": (),
}
"""The recorded runs, with what else than status and report is said of them."""
COMMANDS = {
    "status": ("status {run}", "status {run} --json"),
    "report": ("report {run} --json",),
    "diagnose": ("diagnose {run}", "diagnose {run} --json"),
    "ckpt": ("ckpt ls {run}", "ckpt ls {run} --json"),
    "data": ("data show {run} --step 2 --json",),
    "logs": ("logs {run} --all",),
}
MORE = {
    "array": ("status {run}/1 --json", "status {run}/2 --json", "logs {run}/1"),
    "restarted": ("diagnose {run} --attempt 1 --json",),
    "sbatch": ("diagnose {run} --attempt 1 --json",),
    "sweep": ("status {run}/1 --json", "diagnose {run}/1 --json", "ckpt ls {run}/0"),
}
PROGRAMS = {
    "python": "",
    "srun": "",
    "squeue": '/bin/cat "$0.txt"',
    "sacct": "",
    "sbatch": "",
    # The word that says what is shown stands at another place with an option before it.
    "scontrol": '[ "$1" = show ] && what=$2 || what=$3; /bin/cat "$0-$what.txt"',
}
"""All programs on PATH, as shell; what those of Slurm print is in slurm/."""


class FixedTime(datetime.datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> FixedTime:
        return cls.fromtimestamp(NOW.timestamp(), tz)


def main(folder: Path) -> None:
    """Write all texts to a folder."""
    with tempfile.TemporaryDirectory() as temporary:
        here = Path(temporary).resolve()
        here /= "_" * (LENGTH - len(f"{here}/"))
        fix_machine(here)
        texts = {**texts_of_runs(here / "project"), **texts_of_dry_runs(here / "cases")}
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def fix_machine(here: Path) -> None:
    """Replace what differs between machines; call before trainkit is imported."""
    bin_folder = here / "bin"
    for name, body in PROGRAMS.items():
        program = bin_folder / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    shutil.copytree(HERE / "slurm", bin_folder, dirs_exist_ok=True)
    for name in ("accelerate", "deepspeed", "lightning"):  # installed or not
        (here / "packages" / name).mkdir(parents=True)
        (here / "packages" / name / "__init__.py").touch()
    sys.path.append(str(here / "packages"))
    os.environ.clear()
    os.environ.update(
        {
            **{"PATH": str(bin_folder), "SLURM_CONF": str(bin_folder / "slurm.conf"), "HOME": str(here)},
            **{"USER": "user", "LOGNAME": "user", "TZ": "UTC", "LC_ALL": "C.UTF-8", "COLUMNS": "110"},
            **{f"XDG_{kind}_HOME": str(here / kind.lower()) for kind in ("STATE", "CONFIG", "CACHE")},
        }
    )
    time.tzset()
    uname = os.uname()
    named = os.uname_result((uname.sysname, HOST, uname.release, uname.version, uname.machine))
    replaced: Any = os
    replaced.uname = lambda: named
    replaced.sched_getaffinity = lambda pid: {0}
    plenty = shutil.disk_usage("/")._replace(free=10**15)
    replaced = shutil
    replaced.disk_usage = lambda path: plenty
    replaced = socket
    replaced.gethostname = lambda: HOST
    replaced = datetime
    replaced.datetime = FixedTime


def unpack(project: Path) -> None:
    """Make a project folder with all recorded runs in its runs/, as they were written."""
    (project / "runs").mkdir(parents=True)
    write_text_file(project)
    for name in RUNS:
        unpack_run(HERE / "folders" / name, project)


def write_text_file(project: Path) -> None:
    """Write the text that the recorded runs were trained on."""
    (project / "text.txt").write_text("".join(f"line {i} says {i * i}\n" for i in range(401)))


def unpack_run(source: Path, project: Path, host: str = HOST) -> Path:
    """Make one recorded run in the runs/ of a project folder, as if it had been started on `host`.

    JSON files are recorded with fewer line breaks than trainkit writes. left_out.json describes what is
    not in git: empty folders, links, second copies, texts as changes of the same file of another run, and
    files of which only the size is recorded, filled with zeros here.
    """
    run = project / "runs" / source.name
    left_out = json.loads((source / "left_out.json").read_text())
    texts = {
        str(file.relative_to(source)): file.read_text()
        for file in source.rglob("*")
        if file.is_file() and file.name not in ("left_out.json", "tensors.tar.xz")
    }
    for path, (like, changes) in left_out.get("changed", {}).items():
        texts[path] = changed_text((source.parent / like).read_text(), changes)
    for path, recorded in texts.items():
        text = recorded.replace(PROJECT, str(project)).replace(HOST, host)
        if path.endswith(".json"):
            text = json.dumps(json.loads(text), ensure_ascii=False, indent=2) + "\n"
        (run / path).parent.mkdir(parents=True, exist_ok=True)
        (run / path).write_text(text)
    for path in left_out["folders"]:
        (run / path).mkdir(parents=True, exist_ok=True)
    for path, size in left_out["bytes"].items():
        (run / path).parent.mkdir(parents=True, exist_ok=True)
        with (run / path).open("wb") as empty:
            empty.truncate(size)
    for path, original in left_out["copies"].items():
        (run / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(run / original, run / path)
    for path, target in left_out["links"].items():
        (run / path).parent.mkdir(parents=True, exist_ok=True)
        (run / path).symlink_to(target.replace(PROJECT, str(project)))
    if (source / "tensors.tar.xz").exists():
        with tarfile.open(source / "tensors.tar.xz") as tensors:
            tensors.extractall(run, filter="data")
    for place in run.rglob("*"):
        os.utime(place, (WRITTEN, WRITTEN), follow_symlinks=False)
    return run


def texts_of_runs(project: Path) -> dict[str, str]:
    """Return what the commands that read say of every recorded run, and of all of them."""
    unpack(project)
    known = Path(os.environ["XDG_STATE_HOME"]) / "trainkit" / "runs.jsonl"
    known.parent.mkdir(parents=True)
    known.write_text((HERE / "folders" / "runs.jsonl").read_text().replace(PROJECT, str(project)))
    os.chdir(project)
    texts = {"records/all.txt": typed("status --all", project)}
    for name, also in RUNS.items():
        lines = [line for kind in ("status", "report", *also) for line in COMMANDS[kind]]
        lines += MORE.get(name, ())
        texts[f"records/{name}.txt"] = "\n".join(
            typed(line.format(run=f"runs/{name}"), project) for line in lines
        )
    return texts


def texts_of_dry_runs(cases: Path) -> dict[str, str]:
    """Return what would be submitted for every config of dry_runs.yaml, each in its own folder."""
    texts = {}
    for name, case in yaml.safe_load((HERE / "dry_runs.yaml").read_text()).items():
        project = cases / name
        for path, text in {
            "run.yaml": yaml.safe_dump(case.get("config", {})),
            **case.get("files", {}),
        }.items():
            (project / path).parent.mkdir(parents=True, exist_ok=True)
            (project / path).write_text(text)
            (project / path).chmod(0o755)
        os.chdir(project)
        line = case.get("line") or f"submit run.yaml --dry-run {case.get('options', '')}"
        environ = {
            key: value.replace(PROJECT, str(project)) for key, value in case.get("environ", {}).items()
        }
        os.environ.update(environ)
        texts[f"dry_runs/{name}.txt"] = typed(line, project)
        for key in environ:
            del os.environ[key]
    whole = texts[WHOLE_DRY_RUN]
    return {
        name: text if name == WHOLE_DRY_RUN or "#SBATCH" not in text else lines_that_differ(whole, text)
        for name, text in texts.items()
    }


def lines_that_differ(whole: str, text: str) -> str:
    """Return what differs from `WHOLE_DRY_RUN`, as ``diff -U0`` prints it, without line numbers."""
    lines = difflib.unified_diff(whole.splitlines(), text.splitlines(), n=0, lineterm="")
    return "".join("@@\n" if line.startswith("@@") else f"{line}\n" for line in list(lines)[2:])


def typed(line: str, project: Path) -> str:
    """A command, its output and its exit code, without the names of this machine; JSON fills its lines."""
    from trainkit.cli.main import main as trainkit
    from trainkit.config.schema import default_values

    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = trainkit(shlex.split(line))
    text = output.getvalue()
    if "--json" in line:
        assert text == json.dumps(json.loads(text), ensure_ascii=False) + "\n", (
            "indents would hide a difference"
        )
    text, said = (_neutral(printed, project) for printed in (text, errors.getvalue()))
    if "--json" in line:  # after the names are replaced: where a line breaks depends on their lengths
        value = json.loads(text, parse_float=lambda number: float(f"{float(number):.{DIGITS}g}"))
        if isinstance(value, dict) and isinstance(value.get("config"), dict):
            # The config of a report: keys with their default values are left out.
            base = default_values()
            value["config"] = {
                key: own for key, own in value["config"].items() if key not in base or base[key] != own
            }
        text = filled_json(value) + "\n"
    shown = _neutral(f"$ trainkit {line.strip()}\n", project) + text
    shown += f"--- standard error\n{said}" if said else ""
    return shown + f"--- exit code {code}\n"


def _neutral(text: str, project: Path) -> str:
    """Return a text without the names and hashes that differ between machines."""
    from trainkit import __version__

    for found, name in (
        (str(project), PROJECT),
        (str(Path(os.environ["HOME"])), "@HOME@"),
        (sys.executable, "@PYTHON@"),
        (str(Path(sys.executable).parent), "@BIN@"),
        (str(HERE.parents[1]), "@TRAINKIT@"),
        (f"trainkit {__version__}", "trainkit @VERSION@"),
    ):
        text = text.replace(found, name)
    text = re.sub(r"(?<=trainkit:)[0-9a-f]{16}\b", "@TOKEN@", text)  # a hash of the path of the run
    text = re.sub(r"\b[0-9a-f]{32}(:[0-9a-f]{32})?\b", "@HASH@", text)  # of config.yaml and plan.json
    return re.sub(r"(@PYTHON@\s+-u)\s+-P\b", r"\1", text)  # Python 3.10 does not have -P


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else HERE / "expected")
