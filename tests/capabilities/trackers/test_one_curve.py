"""Tests a run in MLflow and Weights & Biases, read with their libraries."""

import json
import os
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.json_outputs import checked
from tests.support.programs import run_program, wait_for
from tests.support.runs import free_port, runs_from
from trainkit.capabilities.trackers import trackers_dir
from trainkit.capabilities.trackers.sender import sender_log
from trainkit.capabilities.trackers.sync import RunTracker
from trainkit.cli.main import main
from trainkit.config.running import MlflowConfig
from trainkit.run.events import read_metrics
from trainkit.run.files import write_json
from trainkit.run.rundir import RunDir

pytestmark = [pytest.mark.slow(seconds=25), pytest.mark.xdist_group("trackers")]

CONFIG = """
name: curve
model: {preset: nano}
data: {seq_len: 64}
device: cpu
train: {steps: 8, log_every: 1, eval_every: 4, device_batch_size: 4, global_batch_size: 16}
checkpoint: {every_steps: 4}
"""
TRAINKIT = (sys.executable, "-m", "trainkit")
TIMEOUT_S = 400
SECRET = f"{'a' * 20}secret{'b' * 14}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the URL of an MLflow server."""
    # The import is not at module level, because every process that collects the tests would spend seconds on
    # it.
    for name in ("mlflow", "wandb"):
        pytest.importorskip(name)
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    store = [
        "--backend-store-uri",
        "sqlite:///store.db",
        "--artifacts-destination",
        str(folder / "artifacts"),
    ]
    argv = ["server", *store, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    with (folder / "log").open("wb") as log:
        # This setting would start processes for evaluations, and each process would import mlflow.
        environ = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        words = [sys.executable, "-m", "mlflow", *argv]
        proc = subprocess.Popen(words, cwd=folder, env=environ, stdout=log, stderr=log, process_group=0)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: proc.poll() is not None or answers(f"{url}/health"), TIMEOUT_S)
        assert proc.poll() is None, (folder / "log").read_text()
        yield url
    finally:
        os.killpg(proc.pid, 15)
        proc.wait(TIMEOUT_S)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="module")
def run(server: str, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Return a finished run."""
    folder = tmp_path_factory.mktemp("curve")
    text = f"{CONFIG}logging: {{mlflow: {{tracking_uri: {server}}}, wandb: {{mode: offline}}}}\n"
    (folder / "curve.yaml").write_text(text)
    found = RunDir(folder / "runs" / "curve")
    with runs_from(folder) as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        patch.setenv("WANDB_API_KEY", SECRET)
        done = run_program(*TRAINKIT, "submit", "curve.yaml", "--follow", timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "mlflow: " in sender_log(found.attempt(1)).read_text()
        # On a busy machine, the job may not have had the time to send all steps.
        assert main(["sync", str(found.path)]) == 0
    return found


def curve(run: RunDir, name: str) -> list[tuple[int, float]]:
    return [(item["step"], item[name]) for item in read_metrics(run) if item.get(name) is not None]


def mlflow_curve(client: Any, run_id: str, name: str) -> list[tuple[int, float]]:
    return [(item.step, item.value) for item in client.get_metric_history(run_id, name)]


def client_of(uri: str) -> Any:
    return pytest.importorskip("mlflow").MlflowClient(tracking_uri=uri)


def the_run(client: Any) -> Any:
    """Return the only run of the only experiment."""
    experiment = client.get_experiment_by_name("curve")
    [found] = client.search_runs([experiment.experiment_id])
    return found


def test_mlflow_server(run: RunDir, server: str) -> None:
    client = client_of(server)
    found = the_run(client)
    for name in ("loss", "val_loss", "lr", "tokens", "attempt", "step_s"):
        assert mlflow_curve(client, found.info.run_id, name) == curve(run, name), name
    assert found.info.status == "FINISHED"
    assert found.data.params["train.steps"] == "8"
    assert found.data.tags["trainkit.attempt"] == "1"
    assert found.data.tags["trainkit.layout.world_size"] == "1"
    assert "trainkit.code.torch" in found.data.tags
    assert client.list_artifacts(found.info.run_id, "config")


@pytest.fixture
def position(run: RunDir) -> Iterator[Path]:
    """Return the record of the steps that MLflow has, and restore it after the test."""
    file = trackers_dir(run) / "mlflow.json"
    before = file.read_text()
    yield file
    file.write_text(before)


def test_mlflow_store(run: RunDir, position: Path, tmp_path: Path) -> None:
    settings = MlflowConfig(tracking_uri=str(tmp_path / "store"))
    sender = RunTracker(run, "mlflow", settings)
    assert sender.update("finished").num_sent == 8
    sender.release()
    write_json(position, {**json.loads(position.read_text()), "step": 3})
    assert RunTracker(run, "mlflow", settings).update("finished", closes=True).num_sent == 5
    assert (tmp_path / "store" / "mlflow.db").is_file()
    client = client_of(f"sqlite:///{tmp_path}/store/mlflow.db")
    found = the_run(client)
    for name in ("loss", "val_loss", "tokens_per_s"):
        assert mlflow_curve(client, found.info.run_id, name) == curve(run, name), name
    assert list((tmp_path / "store" / "artifacts").rglob("attempt-*.yaml"))
    client.delete_run(found.info.run_id)  # the deleted run is sent again
    assert RunTracker(run, "mlflow", settings).update("finished", closes=True).num_sent == 8
    assert the_run(client).info.run_id != found.info.run_id


def test_wandb_offline(run: RunDir) -> None:
    [folder] = (run.path / "wandb").iterdir()
    [file] = folder.glob("run-*.wandb")
    records = list(wandb_records(file))
    history = [item for item in records if item.WhichOneof("record_type") == "history"]
    rows = [
        {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
        for record in history
    ]
    assert [record.history.step.num for record in history] == list(range(1, 9))
    for name in ("loss", "val_loss", "tokens", "attempt", "step_s"):
        assert [(row["_step"], row[name]) for row in rows if name in row] == curve(run, name), name
    [start] = [item.run for item in records if item.WhichOneof("record_type") == "run"][:1]
    config = {item.key: json.loads(item.value_json) for item in start.config.update}
    assert (config["train.steps"], config["trainkit"]["attempt"]) == (8, 1)


def wandb_records(file: Path) -> Iterator[Any]:
    """Return the records of an offline run, which is a LevelDB log with a header of W&B."""
    from wandb.proto import wandb_internal_pb2

    data, position, record = file.read_bytes(), 7, b""
    while position < len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # the whole record, or its last chunk
            message = wandb_internal_pb2.Record()
            message.ParseFromString(record)
            yield message
            record = b""


def test_sync_finds_nothing_left(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sync", str(run.path), "--json"]) == 0
    found = {item["name"]: item for item in checked("sync", capsys.readouterr().out)}
    assert found["mlflow"]["num_sent"] == 0
    assert found["wandb"]["num_sent"] == 8  # a single file, which was rewritten
    assert [item["num_pending"] for item in found.values()] == [0, 0]
    test_wandb_offline(run)


def test_nothing_secret_is_written(run: RunDir) -> None:
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
