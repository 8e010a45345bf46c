"""Tests the files of a release, which `make dist` builds, CITATION.cff, and the files in .github."""

import json
import os
import re
import shutil
import tarfile
from email import message_from_bytes
from pathlib import Path
from subprocess import CompletedProcess
from zipfile import ZipFile

import pytest
import yaml

import trainkit
from tests.support.programs import run_program

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-dist/bin/python"
REPOSITORY = "https://git.example/group/trainkit"
COMMITTED = "2030-01-02T03:04:05+00:00"
VALIDATE = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
print(JsonStrictValidator(SchemaVersion.V1_6).validate_str(open(sys.argv[1]).read()))
"""


def checkout(folder: Path, umask: int) -> None:
    """Copy the files of this checkout, also those that are not committed yet, and commit them."""
    options = ("--cached", "--others", "--exclude-standard")
    for name in run_program("git", "ls-files", "-z", *options, cwd=ROOT, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            copy = folder / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy)
            copy.chmod((0o777 if os.access(copy, os.X_OK) else 0o666) & ~umask)
    author = ("-c", "user.name=Ada", "-c", "user.email=ada@git.example")
    env = {**os.environ, "GIT_COMMITTER_DATE": COMMITTED}
    for argv in (("init", "--quiet"), ("add", "--all"), (*author, "commit", "--quiet", "--message", "All")):
        run_program("git", *argv, cwd=folder, env=env, check=True)


def build(folder: Path, umask: int, **variables: str) -> CompletedProcess[str]:
    env = {**os.environ, "TRAINKIT_REPOSITORY_URL": f"{REPOSITORY}/", **variables}
    return run_program(PYTHON, folder / "tools/dist.py", cwd="/", umask=umask, env=env)


@pytest.mark.slow(seconds=30)
@pytest.mark.skipif(not PYTHON.exists(), reason="needs the environment of `make .venv-dist`")
def test_two_builds_are_equal_and_pass_all_checks(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second folder"
    for folder, umask, zone in ((first, 0o022, "UTC"), (second, 0o077, "Asia/Tokyo")):
        checkout(folder, umask)
        done = build(folder, umask, TZ=zone)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("PASSED") == 2  # twine's word, once for each distribution
    names = [
        f"trainkit_hpc-{trainkit.__version__}{end}" for end in ("-py3-none-any.whl", ".cdx.json", ".tar.gz")
    ]
    wheel, sbom, sdist = (first / "dist" / name for name in names)
    for folder in (first, second):
        assert sorted(path.name for path in (folder / "dist").iterdir()) == names
    for name in names:
        assert (first / "dist" / name).read_bytes() == (second / "dist" / name).read_bytes(), name
    check_metadata(wheel)
    check_sdist(sdist)
    check_sbom(sbom)

    with (first / "README.md").open("a") as stream:
        stream.write("[A page](docs/missing.md)\n")
    done = build(first, 0o022)
    assert (done.returncode, "docs/missing.md" in done.stderr) == (1, True)
    (first / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n## 0.1.0 - 2026-12-01\n")
    done = build(first, 0o022)
    assert (done.returncode, "CHANGELOG.md" in done.stderr) == (1, True)


def check_metadata(wheel: Path) -> None:
    """Check that all links are absolute, and that pictures are linked as files."""
    with ZipFile(wheel) as packed:
        [name] = [name for name in packed.namelist() if name.endswith("/METADATA")]
        metadata = message_from_bytes(packed.read(name))
    tag = f"v{trainkit.__version__}"
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL", []))
    assert urls["Changelog"] == f"{REPOSITORY}/blob/{tag}/CHANGELOG.md"
    assert all(url.startswith(f"{REPOSITORY}/") for url in urls.values())
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", str(metadata.get_payload()))
    assert len(links) > 30
    for image, url in links:
        assert url.startswith(f"{REPOSITORY}/{'raw' if image else 'blob'}/{tag}/")
    assert "](docs/" in (ROOT / "README.md").read_text()


def check_sdist(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    folder = sdist.name.removesuffix(".tar.gz")
    assert {f"{folder}/setup.cfg", f"{folder}/LICENSE"} <= {member.name for member in members}
    assert not [member.name for member in members if member.name.startswith(f"{folder}/tests")]
    assert {(member.uid, member.gid, member.uname, member.gname) for member in members} == {(0, 0, "", "")}


def check_sbom(sbom: Path) -> None:
    done = run_program(PYTHON, "-c", VALIDATE, sbom, check=True)
    assert done.stdout.strip() == "None"
    record = json.loads(sbom.read_text())
    assert "serialNumber" not in record
    assert record["metadata"]["timestamp"] == COMMITTED
    assert record["metadata"]["component"]["version"] == trainkit.__version__
    names = {part["bom-ref"]: part["name"] for part in record["components"]}
    [required] = [item["dependsOn"] for item in record["dependencies"] if item["ref"] == "root-component"]
    assert {"torch", "submitit", "pyyaml"} <= {names[ref] for ref in required}


@pytest.mark.skipif(not PYTHON.exists(), reason="needs the environment of `make .venv-dist`")
@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        ("github-workflows", ".github/workflows/*.yml"),
        ("dependabot", ".github/dependabot.yml"),
        ("citation-file-format", "CITATION.cff"),
    ],
)
def test_files_for_github_follow_their_schemas(schema: str, pattern: str) -> None:
    files = sorted(ROOT.glob(pattern))
    check = PYTHON.with_name("check-jsonschema")
    done = run_program(check, "--no-cache", "--builtin-schema", f"vendor.{schema}", *files)
    assert (bool(files), done.returncode) == (True, 0), done.stdout


@pytest.mark.skipif(not PYTHON.exists(), reason="needs the environment of `make .venv-dist`")
def test_workflows_are_safe() -> None:
    """zizmor finds unpinned actions, too many permissions and shell lines with text of other users."""
    done = run_program(PYTHON.with_name("zizmor"), "--offline", ROOT / ".github")
    assert done.returncode == 0, done.stdout


def test_citation_and_changelog_name_the_current_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (trainkit.__version__, "Apache-2.0")
    heading = f"\n## {citation['version']} - {citation['date-released']}\n"
    assert heading in (ROOT / "CHANGELOG.md").read_text()
