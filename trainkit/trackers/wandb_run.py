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
INIT_TIMEOUT_S = 30.0


class WandbRun:
    """A run on the server, or offline in ``wandb/offline-run-KEY`` of the run folder.

    The server knows the steps that it has: what was not uploaded is sent again. The offline run is each time
    written as a whole, so that one file has all steps, whatever the number of attempts.
    """

    def __init__(self, settings: WandbConfig, facts: Facts, key: str) -> None:
        import wandb

        folder = facts.folder / FOLDER
        self._whole = folder / f"offline-run-{key}" if settings.mode == "offline" else None
        # Whatever it keeps there is in metrics.jsonl too.
        self._folder = folder / ("online" if self._whole is None else f"{self._whole.name}.new")
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        wandb.teardown()  # what is left of a failed start would make the id one that is in use
        self._run: Any = wandb.init(
            project=settings.project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
            entity=settings.entity,
            id=key,
            name=facts.name,
            dir=str(self._folder),
            mode=settings.mode,
            resume="allow" if self._whole is None else None,
            config={
                **facts.config,
                "trainkit": {"attempt": facts.attempt, "code": facts.code, "layout": facts.layout},
            },
            allow_val_change=True,
            # Without what it collects of the process, which is not the one that trains.
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                save_code=False,
                init_timeout=INIT_TIMEOUT_S,
                x_disable_stats=True,
                x_disable_meta=True,
                x_save_requirements=False,
            ),
        )
        url = str(self._run.url or self._run.path)
        self.place = url if self._whole is None else f"wandb sync {self._whole}"

    def newest_step(self, position: Position) -> int:
        # The step that would be next: 0 for a new run, and so for one that is written as a whole.
        return max(0, int(self._run.step) - 1)

    def send(self, batch: Sequence[Sample]) -> None:
        for sample in batch:
            self._run.log({**sample.values, "_timestamp": sample.time_ms / 1000}, step=sample.step)

    def send_manifest(self, label: str, file: Path) -> None:
        copy = Path(self._run.dir) / "checkpoints" / label / file.name
        ensure_folder(copy.parent, parents=True)
        shutil.copyfile(file, copy)
        self._run.save(str(copy), base_path=self._run.dir, policy="now")
        self._run.summary[f"checkpoint/{label}"] = file.parent.name

    def close(self, state: str) -> None:
        self._run.finish(exit_code=1 if state == "failed" else 0)
        if self._whole is not None:
            shutil.rmtree(self._whole, ignore_errors=True)
            Path(self._run.dir).parent.rename(self._whole)
        shutil.rmtree(self._folder)
