"""Provides helpers for the content of a folder, and for git in a folder."""

import subprocess
from pathlib import Path


def git(folder: Path, *args: str) -> None:
    settings = ["-c", "user.name=u", "-c", "user.email=u@x", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", "-C", str(folder), *settings, *args], check=True, capture_output=True, timeout=20)


def commit(root: Path) -> None:
    """Commit every file of a repository."""
    git(root, "add", "-A")
    git(root, "commit", "-qm", "m")


def write(root: Path, *names: str) -> None:
    """Write files that contain their names."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def content(folder: Path) -> dict[str, str]:
    """Return every file and link below a folder with its content, without Git's files."""
    return {
        str(path.relative_to(folder)): str(path.readlink()) if path.is_symlink() else path.read_text()
        for path in folder.rglob("*")
        if (path.is_symlink() or path.is_file()) and ".git" not in path.relative_to(folder).parts
    }
