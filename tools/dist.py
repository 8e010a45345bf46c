"""`make dist`: build the source distribution, the wheel and the SBOM of a release into dist/, and check them.

Builds are reproducible: the same commit yields identical files on every machine with the same Python version.
Run this script with the Python interpreter of .venv-dist. The environment variable TRAINKIT_REPOSITORY_URL
sets the base URL of the links in the metadata.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from configparser import ConfigParser
from functools import partial
from pathlib import Path

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NAME = "trainkit-hpc"
ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
REPOSITORY_URL = os.environ.get("TRAINKIT_REPOSITORY_URL") or "https://example.org/trainkit"
PROJECT_URLS = {
    "Documentation": "tree/{tag}/docs",
    "Changelog": "blob/{tag}/CHANGELOG.md",
    "Issues": "issues",
    "Source": "tree/{tag}",
}
_IMAGE = re.compile(r"(?<=!)(\[[^\]]*\]\()([^)\s]+)(?=\))")
_LINK = re.compile(r"(\]\()([^)\s]+)(?=\))")


def main() -> None:
    """Build into a temporary folder, check the files, and move them to the folder given by `--out`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the three files")
    out = parser.parse_args().out.resolve()
    os.umask(0o022)
    epoch = int(output("git", "log", "-1", "--format=%ct"))
    # Wheels and SBOMs contain this timestamp.
    os.environ["SOURCE_DATE_EPOCH"] = str(epoch)
    with tempfile.TemporaryDirectory() as temporary:
        source, built = Path(temporary, "source"), Path(temporary, "built")
        version = copy_source(source)
        run("python", "-m", "build", "--no-isolation", "--outdir", built, source, cwd=source, quiet=True)
        [sdist], [wheel] = built.glob("*.tar.gz"), built.glob("*.whl")
        normalize(sdist, epoch)
        sbom = built / f"trainkit_hpc-{version}.cdx.json"
        write_sbom(sbom, version)
        run("twine", "check", "--strict", sdist.name, wheel.name, cwd=built)
        run("check-wheel-contents", "--config", ROOT / "pyproject.toml", wheel.name, cwd=built)
        out.mkdir(parents=True, exist_ok=True)
        for old in out.glob("trainkit_hpc-*"):
            old.unlink()
        for path in (sdist, wheel, sbom):
            shutil.copyfile(path, out / path.name)
            print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}")


def copy_source(folder: Path) -> str:
    """Copy the tracked files with uniform modes, and make their links absolute; return the version."""
    for name in output("git", "ls-files", "-z").split("\0"):
        # git lists a deleted file until the deletion is committed.
        if name and (ROOT / name).is_file():
            copy = folder / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy)
            copy.chmod(0o755 if os.access(ROOT / name, os.X_OK) else 0o644)
    text = (folder / "trainkit/__init__.py").read_text()
    [version] = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    heading = rf"\A{re.escape(version)} - \d{{4}}-\d{{2}}-\d{{2}}$"
    sections = (folder / "CHANGELOG.md").read_text().split("\n## ")[1:]
    if not sections or re.search(heading, sections[0], re.MULTILINE) is None:
        sys.exit(f"error: the first section of CHANGELOG.md is not `## {version} - YYYY-MM-DD`")
    readme, config = folder / "README.md", folder / "setup.cfg"
    readme.write_text(with_absolute_links(readme.read_text(), f"v{version}"))
    urls = (f"    {name} = {url(path.format(tag=f'v{version}'))}\n" for name, path in PROJECT_URLS.items())
    head = f"[metadata]\nproject_urls =\n{''.join(urls)}"
    config.write_text(config.read_text().replace("[metadata]\n", head, 1))
    return version


def url(path: str) -> str:
    """Return the URL of a path in the repository."""
    return f"{REPOSITORY_URL.rstrip('/')}/{path}"


def with_absolute_links(markdown: str, tag: str) -> str:
    """Make relative links and images point to the files of a tag in the repository."""

    def absolute(kind: str, match: re.Match[str]) -> str:
        before, target = match.groups()
        if target.startswith("#") or "://" in target:
            return match[0]
        if not (ROOT / target.partition("#")[0]).exists():
            sys.exit(f"error: README.md links to {target}, which does not exist")
        return before + url(f"{kind}/{tag}/{target}")

    # A `raw` URL returns the image itself; a `blob` URL returns a page that shows the image.
    with_images = _IMAGE.sub(partial(absolute, "raw"), markdown)
    return _LINK.sub(partial(absolute, "blob"), with_images)


def normalize(sdist: Path, epoch: int) -> None:
    """Rewrite a source distribution so that times, owners, modes and order are the same on any machine."""
    with tarfile.open(sdist) as archive:
        members = sorted(archive.getmembers(), key=lambda member: member.name)
        contents = [archive.extractfile(member) if member.isfile() else None for member in members]
        packed = sdist.with_suffix(".new")
        with (
            packed.open("wb") as raw,
            # Leave the file name empty, because gzip would otherwise store the name of the temporary file.
            gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=epoch) as compressed,
            tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as new,
        ):
            for member, content in zip(members, contents, strict=True):
                clean = tarfile.TarInfo(member.name)
                clean.type, clean.size, clean.mtime = member.type, member.size, epoch
                clean.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                new.addfile(clean, content)
    packed.replace(sdist)


def write_sbom(path: Path, version: str) -> None:
    """Write the SBOM of the packages in requirements-lock.txt, and validate it."""
    # cyclonedx-py reads the name and the version only from a pyproject.toml.
    project = path.with_name("pyproject.toml")
    project.write_text(f'[project]\nname = "{NAME}"\nversion = "{version}"\nlicense = "Apache-2.0"\n')
    # Validate the SBOM below, after its dependencies have been added.
    options = ("--no-validate", "--output-reproducible", "--spec-version", "1.6", "--mc-type", "library")
    files = ("--output-file", path, "--pyproject", project, ROOT / "requirements-lock.txt")
    run("cyclonedx-py", "requirements", *options, *files, cwd=path.parent, quiet=True)
    sbom = json.loads(path.read_text())
    root = sbom["metadata"]["component"]
    root["purl"] = f"pkg:pypi/{NAME}@{version}"
    refs = {canonicalize_name(part["name"]): part["bom-ref"] for part in sbom["components"]}
    # The lock file does not list the dependencies of its packages, so only trainkit's own dependencies are
    # known.
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    required = [Requirement(line) for line in config["options"]["install_requires"].split("\n") if line]
    edges = sorted(refs[canonicalize_name(item.name)] for item in required)
    known = [item for item in sbom["dependencies"] if item["ref"] != root["bom-ref"]]
    sbom["dependencies"] = [*known, {"ref": root["bom-ref"], "dependsOn": edges}]
    text = json.dumps(sbom, indent=2) + "\n"
    if problem := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        sys.exit(f"error: {path.name} is not a valid SBOM: {problem}")
    path.write_text(text)


def output(*argv: str) -> str:
    """Run a command in the checkout, and return its output."""
    return subprocess.run(argv, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def run(program: str, *args: str | Path, cwd: Path, quiet: bool = False) -> None:
    """Run a program of .venv-dist and print its output; exit if it fails."""
    argv = (BIN / program, *args)
    done = subprocess.run(argv, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode or not quiet:
        print(done.stdout.rstrip())
    if done.returncode:
        sys.exit(f"error: {program} failed")


if __name__ == "__main__":
    main()
