"""Sends a run to MLflow or Weights & Biases, importing a client library only when it is used."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainkit.config import read_effective
from trainkit.config.running import MlflowConfig, WandbConfig
from trainkit.errors import UsageError
from trainkit.folders import ensure_folder
from trainkit.run.files import Record, read_json, read_object
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir

MAX_METRICS = 1000
MAX_PARAMS = 100
MAX_VALUE_CHARS = 500
"""MLflow limits: metrics and params per request, and characters per param in early releases of MLflow 2."""
KEY_TAG = "trainkit.key"
STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
STORE_FILE = "mlflow.db"
DEFAULT_PROJECT = "trainkit"
FOLDER = "wandb"
INIT_TIMEOUT_S = 30.0
_NOT_IN_A_PATH = re.compile(r"[^\w./ -]|\.\.")
"""Matches characters that are not allowed in the folder name of an MLflow artifact."""


@dataclass(frozen=True)
class Sample:
    """The metrics and media logged at one step."""

    step: int
    time_ms: int
    values: dict[str, float]
    media: Sequence[Media] = ()


@dataclass(frozen=True)
class Media:
    """An image, histogram or text logged at a step."""

    name: str
    kind: str
    file: Path | None = None
    """The image file; None for a histogram or text."""
    text: str = ""
    """The content of a text, or an image's caption."""
    counts: Sequence[float] = ()
    """The number of values in each bin of a histogram; all bins have the same width."""
    ends: tuple[float, float] = (0.0, 1.0)
    """The lowest and the highest value in a histogram."""


@dataclass(frozen=True)
class Facts:
    """The description of a run for trackers, taken from its newest attempt."""

    run: RunDir
    name: str
    attempt: int
    config: Mapping[str, object]
    """The effective config, as a mapping from dotted keys to values."""
    code: dict[str, str]
    """Package versions and the git commit; the git diff and the command line are not sent."""
    layout: dict[str, int]


def read_facts(run: RunDir) -> Facts:
    """Read the description of a run; raise OSError, ValueError or TrainkitError if that is impossible."""
    config = read_effective(run.config_file).model_dump(mode="json", by_alias=True)
    plan, provenance = read_json(run.plan_file), read_object(run.provenance_file)
    git = Record(provenance).record("git").values
    code = {name: provenance.get(name) for name in ("trainkit", "python", "torch")}
    code |= {"commit": git.get("sha"), "branch": git.get("branch"), "dirty": git.get("dirty")}
    layout = {name: int(size) for name, size in plan["layout"].items() if isinstance(size, int)}
    return Facts(
        run,
        read_job(run).name or run.name,
        run.latest_number() or 1,
        dict(_flat(config)),
        {name: str(value) for name, value in code.items() if value is not None},
        {**layout, "world_size": int(plan["world_size"])},
    )


def _flat(mapping: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in mapping.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def store_uri(tracking_uri: str | None, run: RunDir) -> str:
    """Return the MLflow tracking URI for a run.

    If `tracking_uri` is a path, relative to the command's working directory, the store is a SQLite database
    in that folder.
    """
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or str(run.path.parent / "mlflow")
    if urlsplit(uri).scheme or uri == "databricks":
        return uri
    cwd = Path(read_job(run).cwd or run.path.parent)  # the run may have no job.json
    return f"sqlite:///{cwd / Path(uri).expanduser() / STORE_FILE}"


def local_store(run: RunDir) -> str:
    """Return the URI of a run's local database; raise UsageError if it is on a server or not in MLflow."""
    settings = read_effective(run.config_file).logging.trackers.get("mlflow")
    if not isinstance(settings, MlflowConfig):
        raise UsageError(
            f"{run.shown} is not in MLflow: logging.mlflow is null", hint="use TensorBoard to see the curves"
        )
    uri = store_uri(settings.tracking_uri, run)
    if urlsplit(uri).scheme in ("http", "https", "databricks"):
        raise UsageError(f"the run is on the server {uri}", hint="open the server's URL in a browser")
    return uri


class MlflowRun:
    """A run in MLflow, found by its tag `KEY_TAG`, or created if there is none.

    MLflow cannot delete a metric. MLflow ignores metrics that are already stored, so sending a batch again
    after a crash has no effect.
    """

    def __init__(self, settings: MlflowConfig, facts: Facts, key: str) -> None:
        # Fail early if the server does not respond, because the sender retries later.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
        # Keep MLflow from writing to stdout, which contains only JSON with `trainkit sync --json`.
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag

        self._metric, self._tag = Metric, RunTag
        self._facts = facts
        uri = store_uri(settings.tracking_uri, facts.run)
        if uri.startswith("sqlite:///"):
            self._folder = Path(uri.removeprefix("sqlite:///")).parent
            ensure_folder(self._folder, parents=True)
        self._client = MlflowClient(tracking_uri=uri)
        experiment = settings.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or facts.name
        self.place = f"{uri}, experiment {experiment}"
        experiment_id = self._experiment_id(experiment, uri)
        found = self._client.search_runs([experiment_id], f"tags.`{KEY_TAG}` = '{key}'", max_results=1)
        self._is_new = not found
        if self._is_new:
            tags = {KEY_TAG: key, "trainkit.folder": str(facts.run.path)}
            found = [self._client.create_run(experiment_id, run_name=facts.name, tags=tags)]
        self._run_id = str(found[0].info.run_id)
        if self._is_new:
            # Params in MLflow cannot be changed, so the configs of later attempts are logged only as
            # artifacts.
            values = {name: _text(value) for name, value in facts.config.items() if value is not None}
            params = [Param(name, text[:MAX_VALUE_CHARS]) for name, text in values.items()]
            for start in range(0, len(params), MAX_PARAMS):
                self._client.log_batch(self._run_id, params=params[start : start + MAX_PARAMS])
        self._describe_attempt()

    def _experiment_id(self, name: str, uri: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        # With a SQLite store, MLflow would write artifacts to the working directory by default.
        folder = (self._folder / "artifacts").as_uri() if uri.startswith("sqlite:///") else None
        return str(self._client.create_experiment(name, artifact_location=folder))

    def _describe_attempt(self) -> None:
        facts = self._facts
        tags = {f"trainkit.code.{name}": text for name, text in facts.code.items()}
        tags |= {f"trainkit.layout.{name}": str(size) for name, size in facts.layout.items()}
        tags["trainkit.attempt"] = str(facts.attempt)
        tags["mlflow.source.type"] = "JOB"
        tags["mlflow.source.name"] = "trainkit"
        if "commit" in facts.code:
            tags["mlflow.source.git.commit"] = facts.code["commit"]
        self._client.log_batch(self._run_id, tags=[self._tag(name, text) for name, text in tags.items()])
        self._client.update_run(self._run_id, status="RUNNING")
        config = facts.run.config_file.read_text(encoding="utf-8")
        self._client.log_text(self._run_id, config, f"config/attempt-{facts.attempt:03d}.yaml")

    def newest_step(self, place: str, step: int) -> int:
        """Return the newest step in the tracker; `place` and `step` are from the recorded `Position`."""
        # If the run was deleted in MLflow, it has been recreated without steps, so send all steps again.
        return -1 if self._is_new or place != self.place else step

    def send(self, batch: Sequence[Sample]) -> None:
        metrics = [
            self._metric(name, value, sample.time_ms, sample.step)
            for sample in batch
            for name, value in sample.values.items()
        ]
        for start in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + MAX_METRICS])
        for sample in batch:
            for item in sample.media:
                self._send_media(item, sample.step)

    def send_later(self, batch: Sequence[Sample], *, is_last: bool, has_steps: bool) -> int:
        """Send metrics that were measured after their steps, and return how many of the samples were sent."""
        self.send(batch)
        return len(batch)

    def _send_media(self, item: Media, step: int) -> None:
        """Send an image, histogram or text as an artifact, replacing an existing artifact."""
        folder = f"media/{_NOT_IN_A_PATH.sub('_', item.name)}"
        if item.file is not None:
            self._client.log_artifact(self._run_id, str(item.file), folder)
        elif item.kind == "text":
            self._client.log_text(self._run_id, item.text, f"{folder}/step-{step:08d}.txt")
        else:
            values = {"low": item.ends[0], "high": item.ends[1], "counts": list(item.counts)}
            self._client.log_dict(self._run_id, values, f"{folder}/step-{step:08d}.json")

    def close(self, state: str) -> None:
        if state != "running":
            self._client.set_terminated(self._run_id, status=STATUS[state])


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class WandbRun:
    """A run on the W&B server, or an offline run in ``wandb/offline-run-KEY`` inside the run folder.

    The server reports the newest step that it has stored, so steps that were not uploaded are sent again. An
    offline run is always rewritten completely, so that a single file contains the steps of all attempts.
    """

    def __init__(self, settings: WandbConfig, facts: Facts, key: str) -> None:
        import wandb

        folder = facts.run.path / FOLDER
        self._whole = folder / f"offline-run-{key}" if settings.mode == "offline" else None
        # This folder can be deleted without losing data, because metrics.jsonl contains the same values.
        self._folder = folder / ("online" if self._whole is None else f"{self._whole.name}.new")
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        wandb.teardown()  # After a failed start, wandb would otherwise consider the run id in use.
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
            # Do not collect system statistics, because this process does not train.
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

    def newest_step(self, place: str, step: int) -> int:
        # In wandb, `step` is the number of the next step, so subtract 1. For new runs and offline runs,
        # `step` is 0.
        return int(self._run.step) - 1

    def send(self, batch: Sequence[Sample]) -> None:
        for sample in batch:
            media = {item.name: self._of(item) for item in sample.media}
            self._run.log({**sample.values, **media, "_timestamp": sample.time_ms / 1000}, step=sample.step)

    def send_later(self, batch: Sequence[Sample], *, is_last: bool, has_steps: bool) -> int:
        """Send metrics that were measured after their steps, and return how many of the samples were sent.

        Before the last call (`is_last`), at most one sample is sent after new steps (`has_steps`).
        """
        # W&B accepts no value for an earlier step, so these metrics have a step of their own as their axis.
        # Each sample uses up one step of W&B, and two samples after a step would make W&B drop the next step.
        sent = batch if is_last else batch[:1] if has_steps else ()
        for sample in sent:
            own = {}
            for prefix in {name.partition("/")[0] for name in sample.values}:
                self._run.define_metric(f"{prefix}/*", step_metric=f"{prefix}/step")
                own[f"{prefix}/step"] = sample.step
            self._run.log({**sample.values, **own, "_timestamp": sample.time_ms / 1000})
        return len(sent)

    def _of(self, item: Media) -> object:
        """Return the W&B object for an image, histogram or text."""
        import wandb

        if item.file is not None:
            return wandb.Image(str(item.file), caption=item.text or None)
        if item.kind == "text":
            return wandb.Html(f"<pre>{escape(item.text)}</pre>", inject=False)
        low, high = item.ends
        num_bins = len(item.counts)
        edges = [low + (high - low) * index / num_bins for index in range(num_bins + 1)]
        return wandb.Histogram(np_histogram=(list(item.counts), edges))

    def close(self, state: str) -> None:
        self._run.finish(exit_code=1 if state == "failed" else 0)
        if self._whole is not None:
            shutil.rmtree(self._whole, ignore_errors=True)
            Path(self._run.dir).parent.rename(self._whole)
        shutil.rmtree(self._folder)
