"""Provides other versions of Slurm than the installed one, from packages of other Debian releases.

The packages are unpacked into a folder, and are not installed. The programs use the dynamic linker and the
libraries of their own release, so that the programs and their jobs run in the file system of this machine.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.slurm_cluster import packages
from tools.slurm_cluster.daemons import path_with_sbin
from tools.slurm_cluster.packages import NotPossible

CACHE = Path("/var/cache/trainkit-cluster")
RELEASES = {"22.05": "bookworm", "24.11": "trixie", "26.05": "forky"}
"""Maps a Slurm version to the Debian release that contains this version."""
PACKAGES = ("slurmctld", "slurmd", "slurmdbd", "slurm-client")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
MIRROR = "this needs apt-get with a Debian mirror in its package sources; run `apt-get update`"
TIMEOUT_S = 300.0
"""Time limit in seconds for each of two downloads: the package lists, and the packages, about 40 MB in
total."""


def require(version: str | None) -> None:
    """Raise NotPossible if a cluster with this version cannot start now; None means the installed version."""
    own = is_installed(version)
    packages.require(with_slurm=own)
    if not own:
        find(version)


def install(version: str | None) -> None:
    """Install or unpack the packages of a cluster with this version; raise NotPossible if that fails."""
    own = is_installed(version)
    packages.install_missing(with_slurm=own)
    if not own:
        find(version)


def is_installed(version: str | None) -> bool:
    """Return whether a version is installed on the machine; None means the installed version."""
    program = shutil.which("slurmctld", path=path_with_sbin())
    if version is None or program is None:
        return version is None
    found = re.search(r" (\d+\.\d+)\.", _run([program, "-V"]))
    return found is not None and found[1] == version


def find(version: str | None) -> Path | None:
    """Return the folder of a version, downloading the version if necessary; None for the installed version.

    The subfolder `programs` contains the commands and daemons, and the subfolder `plugins` is Slurm's
    PluginDir. Raises NotPossible if the version cannot be downloaded or run.
    """
    if version is None or is_installed(version):
        return None
    if version not in RELEASES:
        raise NotPossible(
            f"no Debian release with Slurm {version} is known", f"choose one of {', '.join(RELEASES)}"
        )
    path = CACHE / f"slurm-{version}"
    if path.exists():
        return path
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            release = RELEASES[version]
            print(f"unpacking Slurm {version} of Debian {release} into {path}, once", file=sys.stderr)
            with tempfile.TemporaryDirectory(prefix="new-", dir=CACHE) as new:
                made = Path(new) / "made"
                _unpack(release, Path(new), made)
                _make_runnable(made, path)
                os.replace(made, path)
    return path


def _unpack(release: str, work: Path, to: Path) -> None:
    """Unpack Slurm's packages with all their dependencies, including libc."""
    work.chmod(0o755)
    for name in ("state/lists/partial", "cache/archives/partial"):
        (work / name).mkdir(parents=True)
    (work / "status").touch()
    sources = work / "sources.list"
    sources.write_text(f"deb [signed-by={KEYRING}] {_mirror()} {release} main\n")
    apt = ["apt-get", "--yes", "--no-install-recommends"]
    for option, value in {
        # apt downloads every dependency because the list of installed packages is empty.
        "Dir::State::status": work / "status",
        "Dir::State": work / "state",
        "Dir::Cache": work / "cache",
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferences": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
    }.items():
        apt.append(f"-o={option}={value}")
    _run([*apt, "update"])
    _run([*apt, "install", "--download-only", *PACKAGES, "patchelf"])
    for package in sorted((work / "cache/archives").glob("*.deb")):
        _run(["dpkg-deb", "--extract", str(package), str(to)])
    if (to / "lib").exists():  # before Debian 13, some libraries were outside of /usr
        shutil.copytree(to / "lib", to / "usr/lib", symlinks=True, dirs_exist_ok=True)


def _make_runnable(made: Path, path: Path) -> None:
    """Make programs and plugins use the linker and the libraries below `path`, their final location."""
    [libraries] = (linker.parent for linker in made.glob("usr/lib/*/ld-linux-*"))
    linker = next(libraries.glob("ld-linux-*"))
    plugins = libraries / "slurm-wlm"
    inside = [str(path / folder.relative_to(made)) for folder in (plugins, libraries)]
    patchelf = [str(linker), "--library-path", str(libraries), str(made / "usr/bin/patchelf")]
    # Set an rpath, because it also applies to the libraries that a program loads; a runpath does not.
    set_path = [*patchelf, "--force-rpath", "--set-rpath", ":".join(inside)]
    (made / "plugins").symlink_to(plugins.relative_to(made))
    (made / "programs").mkdir()
    for program in _programs(made):
        _run([*set_path, "--set-interpreter", f"{inside[1]}/{linker.name}", str(program)])
        name = program.name.removesuffix("-wlm")
        (made / "programs" / name).symlink_to(Path("..") / program.relative_to(made))
    _run([*set_path, *map(str, sorted(plugins.glob("*.so")))])


def _programs(made: Path) -> list[Path]:
    """Return the programs in Slurm's packages."""
    files = sorted([*made.glob("usr/bin/s*"), *made.glob("usr/sbin/s*")])
    return [file for file in files if not file.is_symlink() and b"\0libslurmfull.so\0" in file.read_bytes()]


def _mirror() -> str:
    """Return the Debian mirror that this machine is configured to use."""
    targets = ["apt-get", "indextargets", "--format=$(ORIGIN) $(REPO_URI)", "Created-By: Packages"]
    for line in _run(targets).splitlines():
        origin, _, uri = line.partition(" ")
        if origin == "Debian":
            return uri
    raise NotPossible("the package sources of this machine have no Debian mirror", MIRROR)


def _run(argv: list[str]) -> str:
    """Run a command and return its output; raise NotPossible if it fails."""
    if shutil.which(argv[0]) is None:
        raise NotPossible(f"{argv[0]} is not installed", MIRROR)
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        problem = f"`{argv[0]} … {argv[-1]}` did not finish within {TIMEOUT_S:.0f} s"
        raise NotPossible(problem, MIRROR) from None
    if done.returncode:
        output = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
        raise NotPossible(f"`{argv[0]} … {argv[-1]}` failed: {output[-1]}", MIRROR)
    return done.stdout
