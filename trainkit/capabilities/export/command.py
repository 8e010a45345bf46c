"""Implements `trainkit ckpt export`, which writes the model in a checkpoint for use in other programs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypedDict

import click

from trainkit.cli.ckpt import checkpoints_of
from trainkit.cli.help import as_command, option
from trainkit.cli.options import INDEX, PATH, json_option, refuse_untrusted, run_argument, trust_option
from trainkit.cli.output import echo_result
from trainkit.errors import EXIT_FAILED, EXIT_OK, UsageError
from trainkit.folders import shown_path
from trainkit.formats import JsonObject
from trainkit.job.processes import module_argv
from trainkit.run import manifest
from trainkit.run.own_folders import own_environ
from trainkit.run.pins import pinned, run_of
from trainkit.run.registry import find_run
from trainkit.run.rundir import MANIFEST_NAME, RunDir

checkpoint_option = option(
    "--checkpoint DIR",
    "Use the checkpoint in this folder, such as a folder that `trainkit ckpt average` wrote.",
    name="folder",
    type=PATH,
)
ema_option = option("--ema", "Use the average of the weights, which runs with ema.decay save.")


class ExportedJson(TypedDict):
    """An exported model."""

    out: str
    """The folder that contains the exported model."""
    checkpoint: str
    files: list[str]
    """The names of the files in the folder."""


@as_command(
    "trainkit ckpt export last --out exported",
    "trainkit ckpt export last --out exported --dtype bf16",
    "trainkit ckpt export last --out exported --ema",
)
@run_argument
@option("--out", "Folder to create.", name="out_name", type=PATH, required=True)
@option("--step N", "Export the checkpoint of this step.", type=INDEX)
@checkpoint_option
@ema_option
@option(
    "--format",
    "Output format: hf writes files that transformers can load. If you use your own "
    "task, the task decides which files are written.",
    name="format_name",
    type=click.Choice(["hf"]),
    default="hf",
    show_default=True,
)
@option(
    "--dtype",
    "Data type of the weights.",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    default="fp32",
    show_default=True,
)
@option("--merge", "Merge the adapters of model.lora into the weights of the model.")
@trust_option
@json_option("trainkit.capabilities.export.command:ExportedJson")
def command(
    run_name: str,
    out_name: Path,
    step: int | None,
    folder: Path | None,
    format_name: str,
    dtype: str,
    merge: bool,
    ema: bool,
    as_json: bool,
) -> int:
    """Export the model from the best checkpoint of RUN, or else the newest, for use in other programs.

    For a run with model.lora, only the adapters are exported, in the format of peft. With --merge, the
    adapters are merged into the model's weights.
    """
    run = find_run(run_name)
    refuse_untrusted(run.path)
    checkpoint = chosen_checkpoint(run, step, folder)
    request = {**places_of(run, checkpoint), "dtype": dtype, "merge": merge, "ema": ema}
    with pinned_while_read("ckpt export", [checkpoint]):
        code = write_folder("trainkit.capabilities.export.worker", request, out_name)
    if code:
        return code
    files = sorted(item.name for item in out_name.iterdir())
    value: ExportedJson = {"out": str(out_name), "checkpoint": str(checkpoint.path), "files": files}
    echo_result(value, f"exported {checkpoint.path.name} to {out_name}: {', '.join(files)}", as_json)
    return EXIT_OK


@contextlib.contextmanager
def pinned_while_read(by: str, checkpoints: Iterable[manifest.Checkpoint]) -> Iterator[None]:
    """Pin checkpoints of a run during the block, so that a running attempt does not delete them meanwhile.

    A checkpoint outside of a run folder, which no run deletes, is not pinned. A checkpoint of a run whose
    folder this user cannot write to is not pinned either; a note on stderr says so.
    """
    with contextlib.ExitStack() as stack:
        for checkpoint in checkpoints:
            if (found := run_of(checkpoint.path)) is None:
                continue
            run, step = found
            try:
                stack.enter_context(pinned(run, step, by))
            except OSError as error:
                reason = f"{shown_path(run.pins_dir)}: {error.strerror}"
                click.echo(
                    f"note: {checkpoint.path.name} is not pinned while it is read ({reason})", err=True
                )
        yield


def write_folder(module: str, request: JsonObject, out: Path) -> int:
    """Run a module that writes the folder `out`; return the exit code, or 0 once the folder is complete.

    The module receives the request as JSON on stdin, with a temporary folder as `out`.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"--out {out} exists already", hint="choose a new or empty folder")
    partial = out.absolute().with_name(f".{out.name}.partial-{os.getpid()}")
    text = json.dumps({**request, "out": str(partial)})
    try:
        partial.mkdir(parents=True)
        # Use another process, because trainkit commands must not import torch.
        code = subprocess.run(module_argv(module), input=text, text=True, env=own_environ()).returncode
        if code:
            return code if code > 0 else EXIT_FAILED
        partial.rename(out)
    except OSError as error:
        message = f"--out {out} cannot be written: {error.strerror}"
        raise UsageError(message, hint="choose a new folder in a writable location") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return EXIT_OK


def chosen_checkpoint(run: RunDir, step: int | None, folder: Path | None = None) -> manifest.Checkpoint:
    """Return the checkpoint in `folder`, or the run's checkpoint at `step`.

    Without `folder` and `step`, return the best or else the newest intact checkpoint.
    """
    if folder is not None:
        if step is not None:
            raise UsageError("--step and --checkpoint both choose a checkpoint", hint="remove one of them")
        return _checkpoint_in(folder)
    there = checkpoints_of(run, step)
    best = [item for item in there if item.step == manifest.best_step(run.checkpoints_dir)]
    chosen = manifest.newest_intact(best) or manifest.newest_intact(there)
    if chosen is None:
        newest = shown_path(there[-1].path)
        raise UsageError(
            f"{newest} is damaged: {manifest.find_damage(there[-1])}", hint="name another --step"
        )
    if chosen.manifest().model is None:
        hint = "export the model with your own code"
        raise UsageError(f"{shown_path(chosen.path)} was saved by your own training loop", hint=hint)
    return chosen


def _checkpoint_in(folder: Path) -> manifest.Checkpoint:
    try:
        found = manifest.Checkpoint(folder, manifest.Checkpoint(folder, 0).manifest().step)
        damage = manifest.find_damage(found)
    except (OSError, ValueError):
        damage = f"it contains no {MANIFEST_NAME}, or a damaged one"
    if damage:
        message = f"--checkpoint {folder} is not an intact checkpoint: {damage}"
        raise UsageError(message, hint="name a folder that `trainkit ckpt average` wrote, or use --step")
    return found


def places_of(run: RunDir, checkpoint: manifest.Checkpoint) -> dict[str, str]:
    """Return the paths that another process needs to load a checkpoint and its config, keyed by name."""
    number = run.latest_number()
    config_file = run.config_file if number is None else run.attempt(number).config_file
    files = {"run": run.path, "config_file": config_file, "checkpoint": checkpoint.path}
    return {name: str(path.absolute()) for name, path in files.items()}
