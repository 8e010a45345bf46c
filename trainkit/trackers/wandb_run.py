"""A run in Weights & Biases: sent to the server, or written to the run folder for `wandb sync`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainkit.config.running import WandbConfig
from trainkit.folders import ensure_folder
from trainkit.trackers.records import Facts, Position, Sample

DEFAULT_PROJECT = "trainkit"
FOLDER = "wandb"
NEW_SUFFIX = ".new"
INIT_TIMEOUT_S = 30.0


def _start(settings: WandbConfig, facts: Facts, key: str, folder: Path) -> Any:
    """`wandb.init` for the run, without what it collects of the process, which is not the one that trains."""
    import wandb

    own = wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        save_code=False,
        init_timeout=INIT_TIMEOUT_S,
        x_disable_stats=True,
        x_disable_meta=True,
        x_save_requirements=False,
    )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    wandb.teardown()  # what is left of a failed start would make the id one that is in use
    return wandb.init(
        project=settings.project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
        entity=settings.entity,
        id=key,
        name=facts.name,
        dir=str(folder),
        mode=settings.mode,
        resume="allow" if settings.mode == "online" else None,
        config=_config(facts),
        allow_val_change=True,
        settings=own,
    )


def _config(facts: Facts) -> dict[str, object]:
    return {
        **facts.config,
        "trainkit": {"attempt": facts.attempt, "code": facts.code, "layout": facts.layout},
    }


def _log(run: Any, batch: Sequence[Sample]) -> None:
    for sample in batch:
        run.log({**sample.values, "_timestamp": sample.time_ms / 1000}, step=sample.step)


def _save_manifest(run: Any, label: str, file: Path) -> None:
    copy = Path(run.dir) / "checkpoints" / label / file.name
    ensure_folder(copy.parent, parents=True)
    shutil.copyfile(file, copy)
    run.save(str(copy), base_path=run.dir, policy="now")
    run.summary[f"checkpoint/{label}"] = file.parent.name


class OnlineRun:
    """A run on the server, which knows the steps that it has: what was not uploaded is sent again."""

    def __init__(self, settings: WandbConfig, facts: Facts, key: str) -> None:
        # Whatever it keeps there is in metrics.jsonl too.
        self._folder = facts.folder / FOLDER / "online"
        self._run = _start(settings, facts, key, self._folder)
        self.place = str(self._run.url or self._run.path)

    def newest_step(self, position: Position) -> int:
        # The step that would be next: 0 for a new run.
        return max(0, int(self._run.step) - 1)

    def send(self, batch: Sequence[Sample]) -> None:
        _log(self._run, batch)

    def send_manifest(self, label: str, file: Path) -> None:
        _save_manifest(self._run, label, file)

    def close(self, state: str) -> None:
        self._run.finish(exit_code=1 if state == "failed" else 0)
        shutil.rmtree(self._folder)


class OfflineRun:
    """A run in ``wandb/offline-run-KEY`` of the run folder, each time written as a whole.

    One file thus has all steps, whatever the number of attempts.
    """

    def __init__(self, settings: WandbConfig, facts: Facts, key: str) -> None:
        self._folder = facts.folder / FOLDER / f"offline-run-{key}"
        self._new = self._folder.with_name(f"{self._folder.name}{NEW_SUFFIX}")
        self._run = _start(settings, facts, key, self._new)
        self.place = f"wandb sync {self._folder}"

    def newest_step(self, position: Position) -> int:
        return 0

    def send(self, batch: Sequence[Sample]) -> None:
        _log(self._run, batch)

    def send_manifest(self, label: str, file: Path) -> None:
        _save_manifest(self._run, label, file)

    def close(self, state: str) -> None:
        written = Path(self._run.dir).parent
        self._run.finish(exit_code=1 if state == "failed" else 0)
        shutil.rmtree(self._folder, ignore_errors=True)
        written.rename(self._folder)
        shutil.rmtree(self._new)
