"""Tests the wheel, built from the source distribution and installed without a checkout."""

import json
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.support.programs import run_program
from tests.test_packaging import copied_by_dockerfile

ROOT = Path(__file__).resolve().parents[1]
CONFIG = """
extends: models/tiny.yaml
name: outside
train: {steps: 2, device_batch_size: 1, global_batch_size: 2}
"""

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel")]


def command(*argv: object, cwd: Path, **env: str) -> str:
    """Return the output of a command, which must succeed."""
    done = run_program(*[str(arg) for arg in argv], cwd=cwd, env={**os.environ, **env}, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel of the source distribution of the files that the images copy."""
    folder = tmp_path_factory.mktemp("wheel")
    others = {name: name for name in ("MANIFEST.in", "CHANGELOG.md")}
    for source, target in {**copied_by_dockerfile(), **others}.items():
        copy = folder / "checkout" / target
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / source, copy)
    build = "from setuptools import build_meta; import sys; build_meta.build_sdist(sys.argv[1])"
    command(sys.executable, "-c", build, folder, cwd=folder / "checkout")
    [archive] = folder.glob("trainkit_hpc-*.tar.gz")
    (folder / "sdist").mkdir()
    command("tar", "-xzf", archive, cwd=folder / "sdist")
    [unpacked] = (folder / "sdist").iterdir()
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    command(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", folder, unpacked, cwd=folder)
    [built] = folder.glob("trainkit_hpc-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bin/ of a new environment with the wheel, and with this environment's other packages."""
    folder = tmp_path_factory.mktemp("installed")
    command(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    site = command(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    options = ("--no-deps", "--no-index", "--disable-pip-version-check")
    command(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, cwd=folder)
    # These packages come after the wheel's. Their .pth files are not processed, because one may name the
    # checkout.
    (Path(site) / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder far from the checkout, with a config."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "outside.yaml").write_text(CONFIG)
    return tmp_path


def test_wheel_contains_all_modules_configs_and_templates(wheel: Path) -> None:
    with ZipFile(wheel) as packed:
        packed_files = {name for name in packed.namelist() if ".dist-info/" not in name}
        licences = [name for name in packed.namelist() if name.endswith("/LICENSE")]
    packages = [*(ROOT / "trainkit").rglob("*.py*"), *(ROOT / "hydra_plugins").rglob("*.py")]
    modules = {path.relative_to(ROOT) for path in packages if path.suffix in (".py", ".pyi")}
    shipped = [*(ROOT / "configs").rglob("*.yaml"), *(ROOT / "templates").rglob("*.j[2s]")]
    shipped += [path for path in (ROOT / "templates" / "task").iterdir() if path.is_file()]
    expected = {str(path) for path in modules}
    expected |= {f"trainkit/_shipped/{path.relative_to(ROOT)}" for path in shipped}
    data = {"trainkit_hpc.py", "trainkit/py.typed", "trainkit/config/other_names.yaml"}
    assert packed_files == expected | data | {"trainkit/capabilities/diagnose/signatures.yaml"}
    assert len(licences) == 1


def test_commands(installed: Path, outside: Path) -> None:
    def typed(*words: str) -> str:
        return command(installed / "trainkit", *words, cwd=outside)

    assert "_shipped/configs/models/tiny.yaml" in typed("check", "outside.yaml", "--show-origin")
    typed("check", "outside.yaml", "--profile", "smoke")
    plan = typed("submit", "outside.yaml", "--nodes", "2", "--dry-run", "--json")
    assert json.loads(plan)["num_nodes"] == 2
    assert not (outside / "runs").exists()
    assert typed("init", "--task", "ring").split() == ["ring.py", "ring.yaml", "test_ring.py"]
    assert "class Ring(Task)" in (outside / "ring.py").read_text()
    assert "task: ring.py:Ring" in (outside / "ring.yaml").read_text()
