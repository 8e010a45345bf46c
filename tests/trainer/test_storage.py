"""Tests that checkpoint files are hashed, read without running code, and can start another run."""

import os
import pickle
import platform
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

import trainkit
from tests.support import tasks
from tests.support.disks import flip
from tests.support.models import ALONE
from tests.support.parity import Case, run_cases
from tests.support.programs import run_program
from tests.support.runs import events, log_text, train
from trainkit.cluster.target import LOCAL
from trainkit.config import LoadedConfig, load_config
from trainkit.config.training import ModelConfig
from trainkit.errors import ConfigError, FatalError
from trainkit.launch.plan_run import gather
from trainkit.plan.make_plan import make_plan
from trainkit.run.manifest import FileSum, file_hash, published
from trainkit.run.rundir import RunDir
from trainkit.trainer.checkpoint.loader import load_initial_weights
from trainkit.trainer.checkpoint.storage import METADATA_NAME, HashingWriter, SafeReader


def save(folder: Path) -> HashingWriter:
    writer = HashingWriter(folder)
    tensors = {
        "a": torch.arange(100_000, dtype=torch.float32),
        "b": torch.ones(3, 5, dtype=torch.bfloat16),
        "step": torch.tensor(7.0),
        "empty": torch.zeros(0, 4),
    }
    state_dict_saver.save(tensors, storage_writer=writer, no_dist=True)
    return writer


def test_what_was_saved_is_loaded_and_its_sums_are_those_of_the_files(tmp_path):
    writer = save(tmp_path / "saved")
    on_disk = {path.name for path in (tmp_path / "saved").iterdir()}
    assert METADATA_NAME in on_disk
    assert set(writer.files) == on_disk
    for name, expected in writer.files.items():
        path = tmp_path / "saved" / name
        assert expected == FileSum(path.stat().st_size, file_hash(path))
    found = {
        "a": torch.zeros(100_000),
        "b": torch.zeros(3, 5, dtype=torch.bfloat16),
        "step": torch.zeros(()),
        "empty": torch.zeros(0, 4),
    }
    state_dict_loader.load(found, storage_reader=SafeReader(tmp_path / "saved"), no_dist=True)
    assert torch.equal(found["a"], torch.arange(100_000, dtype=torch.float32))
    assert torch.equal(found["b"], torch.ones(3, 5, dtype=torch.bfloat16))
    assert found["step"].item() == 7


def test_paths_of_another_python_are_read(tmp_path):
    """Python 3.13 has moved the class to another module."""
    for module in (b"pathlib", b"pathlib._local"):
        (tmp_path / METADATA_NAME).write_bytes(b"c" + module + b"\nPosixPath\n(V/a\ntR.")
        assert SafeReader(tmp_path).read_metadata() == Path("/a")  # type: ignore[comparison-overlap]


def test_enumerations_of_another_python_are_read(tmp_path, monkeypatch):
    """Python 3.11.0 to 3.11.3 pickle a member as a call of `getattr`."""

    def by_name(member: _MEM_FORMAT_ENCODING, protocol: int) -> tuple[object, ...]:
        return getattr, (type(member), member.name)

    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    save(tmp_path / "saved")
    assert b"getattr" in (tmp_path / "saved" / METADATA_NAME).read_bytes()
    found = {"a": torch.zeros(100_000)}
    state_dict_loader.load(found, storage_reader=SafeReader(tmp_path / "saved"), no_dist=True)
    assert found["a"][-1] == 99_999


def other_patch_release() -> str | None:
    """Return the interpreter in /usr/bin if it is another patch release of the Python that runs the tests."""
    python = "/usr/bin/python{}.{}".format(*sys.version_info)
    if not Path(python).exists():
        return None
    version = run_program(
        python, "-c", "import platform; print(platform.python_version())", check=True
    ).stdout
    return python if version.strip() != platform.python_version() else None


SAVE_AND_READ = """
import sys
from pathlib import Path
import torch
from torch.distributed.checkpoint import state_dict_saver
from trainkit.trainer.checkpoint.storage import HashingWriter, SafeReader
own, other = map(Path, sys.argv[1:])
state_dict_saver.save({"a": torch.ones(3)}, storage_writer=HashingWriter(own), no_dist=True)
print([name for folder in (own, other) for name in SafeReader(folder).read_metadata().state_dict_metadata])
"""


@pytest.mark.slow(seconds=10)
def test_a_checkpoint_of_another_patch_release_is_read(tmp_path):
    """Python may be updated between two attempts, and two patch releases can pickle differently."""
    python = other_patch_release()
    if python is None:
        pytest.skip("needs another patch release of this Python in /usr/bin")
    save(tmp_path / "own")
    packages = [str(Path(torch.__file__).parents[1]), str(Path(trainkit.__file__).parents[1])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(packages)}
    folders = tmp_path / "other", tmp_path / "own"
    done = run_program(python, "-c", SAVE_AND_READ, *folders, env=environ, check=True)
    assert done.stdout.strip() == "['a', 'a', 'b', 'step', 'empty']"
    assert list(SafeReader(tmp_path / "other").read_metadata().state_dict_metadata) == ["a"]


@pytest.mark.parametrize("name", ["unlink", "__class__", "CONTIGUOUS_FORMAT"])
def test_only_members_of_enumerations_are_looked_up(tmp_path, name):
    lookup = f"cbuiltins\ngetattr\n(cpathlib\nPosixPath\nV{name}\ntR."
    (tmp_path / METADATA_NAME).write_bytes(lookup.encode())
    with pytest.raises(pickle.UnpicklingError, match="is not allowed in checkpoint metadata"):
        SafeReader(tmp_path).read_metadata()


def test_an_existing_checkpoint_is_not_written_over(tmp_path: Path) -> None:
    before = save(tmp_path / "saved").files
    with pytest.raises(CheckpointException, match="already exists"):
        save(tmp_path / "saved")
    for name, expected in before.items():
        assert file_hash(tmp_path / "saved" / name) == expected.sha256


def opcodes(module: str, name: str, argument: str, protocol: int) -> bytes:
    """Return a pickle that calls `module.name(argument)`. From protocol 4 on, a name may be a dotted path."""
    if protocol == 2:
        call = f"c{module}\n{name}\n".encode()
    else:
        call = b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name)) + b"\x93"
    text = b"\x8c" + bytes([len(argument)]) + argument.encode()
    return b"\x80\x04" + call + text + b"\x85R."


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("posix", "system"),
        ("builtins", "exec"),
        ("builtins", "eval"),
        ("torch", "os.system"),
        ("torch", "load"),
        ("torch.serialization", "os.system"),
        ("torch.serialization", "_get_layout.__globals__"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo.__init__"),
        ("pathlib", "os.system"),
        ("pathlib", "PosixPath.unlink"),
    ],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_metadata_that_would_run_code_is_refused(tmp_path, module, name, protocol):
    save(tmp_path / "saved")
    trace = tmp_path / "ran"
    (tmp_path / "saved" / METADATA_NAME).write_bytes(opcodes(module, name, f"touch {trace}"[:250], protocol))
    with pytest.raises(pickle.UnpicklingError, match="is not allowed in checkpoint metadata"):
        SafeReader(tmp_path / "saved").read_metadata()
    # torch 2.11 drops the reason. Above, `load_tensors` reads the metadata itself first.
    shown = "metadata is None" if torch.__version__ < "2.12" else "is not allowed in checkpoint metadata"
    with pytest.raises(CheckpointException, match=shown):
        state_dict_loader.load(
            {"a": torch.zeros(100_000)}, storage_reader=SafeReader(tmp_path / "saved"), no_dist=True
        )
    assert not trace.exists()


def test_the_pickles_here_do_run_code_when_read_carelessly(tmp_path):
    trace = tmp_path / "ran"
    pickle.loads(opcodes("os", "system", f"touch {trace}", 2))
    assert trace.exists()
    trace.unlink()
    pickle.loads(opcodes("torch.distributed.checkpoint.filesystem", "os.system", f"touch {trace}", 4))
    assert trace.exists()


def test_tensor_files_are_read_without_pickled_code(tmp_path):
    """The file of a tensor is replaced by one that torch.load would execute."""
    save(tmp_path / "saved")
    metadata = SafeReader(tmp_path / "saved").read_metadata()
    trace = tmp_path / "ran"
    payload = opcodes("os", "system", f"touch {trace}", 2)
    for info in metadata.storage_data.values():
        path = tmp_path / "saved" / info.relative_path
        path.write_bytes(payload.ljust(path.stat().st_size, b"\0"))
    with pytest.raises(CheckpointException, match="Weights only"):
        state_dict_loader.load(
            {"a": torch.zeros(100_000)}, storage_reader=SafeReader(tmp_path / "saved"), no_dist=True
        )
    assert not trace.exists()


PHASE_2 = ["train.steps=1", "train.eval_every=1", "train.eval_at_start=true"]
PHASE_1 = [*PHASE_2, "train.steps=4", "train.eval_every=4", "optimizer.lr=0.01"]
SHARD = Case("phase-1", 2, {"dp_shard": 2})


def val_losses(folder: Path) -> list[float]:
    return [event["val_loss"] for event in events(folder, "evaluated")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "layouts"),
    [
        ("causal_lm", [Case("alone", 1, {}), Case("tp", 2, {"tp": 2}), Case("pp", 2, {"pp": 2})]),
        (f"{tasks.__file__}:Classify", [Case("fsdp", 2, {"dp_shard": 2})]),
    ],
    ids=["built-in", "own"],
)
def test_phase_2_begins_where_phase_1_ended(tmp_path, task, layouts):
    own = f"task={task}"
    run_cases(tmp_path, [SHARD], [*PHASE_1, own])
    run_cases(tmp_path, layouts, [*PHASE_2, own, f"model.init_from={tmp_path / 'phase-1'}"])
    first, *_, last = val_losses(tmp_path / "phase-1")
    assert abs(first - last) > 1e-3
    for case in layouts:
        assert val_losses(tmp_path / case.name)[0] == pytest.approx(last, rel=1e-5), case.name


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that no test changes."""
    run = tmp_path_factory.mktemp("saved") / "first"
    train(run, ["train.steps=2", "checkpoint.every_steps=1"])
    return run


def test_what_fits_and_what_does_not(saved):
    newest = published(RunDir(saved).checkpoints_dir)[-1]
    norm = {"model.norm.weight": torch.zeros(64)}
    for source in (saved, newest.path):
        for include in (("norm.*",), ("n?rm.weight", "nothing.*")):
            config = ModelConfig(init_from=str(source), init_include=include)
            norm["model.norm.weight"].zero_()
            load_initial_weights({**norm, "optimizer.norm.weight.exp_avg": torch.zeros(64)}, config, ALONE)
            assert norm["model.norm.weight"].mean() == pytest.approx(1.0, abs=0.1)
    refused = {
        "only in the checkpoint: model.blocks.0": (norm, ()),
        "not in the checkpoint: model.norm.bias": ({**norm, "model.norm.bias": torch.zeros(64)}, ("norm.*",)),
        "different shape: model.norm.weight": ({"model.norm.weight": torch.zeros(3)}, ("norm.*",)),
        "no parameter matches": (norm, ("head.*",)),
    }
    for message, (tensors, include) in refused.items():
        with pytest.raises(FatalError, match=message) as error:
            load_initial_weights(tensors, ModelConfig(init_from=str(saved), init_include=include), ALONE)
        assert error.value.exit_code == 78


def loaded_with(*overrides: str) -> LoadedConfig:
    return load_config("quickstart", overrides=overrides, environ={})


def test_a_damaged_or_missing_checkpoint_is_refused(saved, tmp_path):
    newest = shutil.copytree(published(RunDir(saved).checkpoints_dir)[-1].path, tmp_path / "step-00000002")
    flip(max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size))
    with pytest.raises(FatalError, match="is damaged: "):
        load_initial_weights({}, ModelConfig(init_from=str(newest)), ALONE)
    with pytest.raises(FatalError, match="has no intact checkpoint"):
        load_initial_weights({}, ModelConfig(init_from=str(tmp_path)), ALONE)
    absent = loaded_with(f"model.init_from={tmp_path / 'nowhere'}")
    with pytest.raises(ConfigError, match="neither a run folder nor a checkpoint"):
        make_plan(absent, gather(absent, target=LOCAL))
    with pytest.raises(ConfigError, match=r"model.init_include: is set, but model.init_from is null"):
        loaded_with("model.init_include=['norm.*']")


def test_a_resume_does_not_start_again(saved, tmp_path):
    """The run then has checkpoints itself, and uses them."""
    options = ["train.steps=4", "checkpoint.every_steps=1", f"model.init_from={saved}"]
    attempt = train(tmp_path / "second", [*options, "train.stop_at_step=2"], expect=75)
    assert "initialized from" in log_text(attempt)
    again = train(tmp_path / "second", options)
    assert "resumed from step-00000002" in log_text(again)
    assert "initialized from" not in log_text(again)
