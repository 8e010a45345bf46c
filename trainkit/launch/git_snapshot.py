"""Create a Git repository for a code copy. The repository behaves like the original but has no credentials.

Git only reads the original repository, using commands that start no hooks, filters or other programs. The
complete history is not copied. The copied repository has a pack with the objects of recent commits and of
uncommitted changes. All other objects are read from the original repository, as long as it exists.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from trainkit.errors import UsageError
from trainkit.folders import ensure_folder
from trainkit.formats import mask_secrets
from trainkit.launch.source_tree import SourceTree, run_git
from trainkit.run.git_copy import GIT, OF_SHA256, index_entries, write_index, write_private

MAX_COMMITS = 2_000
"""Maximum number of commits in the pack, counted backwards from HEAD."""
LIMIT_S = 20.0
_CONFIG = re.compile(
    r"core\.(?:autocrlf|eol|safecrlf|filemode|ignorecase|precomposeunicode|symlinks|quotepath|excludesfile)"
    r"|user\.(?:name|email)|status\.(?:showuntrackedfiles|submodulesummary)"
    r"|diff\.(?:noprefix|mnemonicprefix|renames|algorithm|context|ignoresubmodules)"
    r"|remote\..+\.(?:url|pushurl|fetch)|branch\..+\.(?:remote|merge)|submodule\..+\.(?:url|active|ignore)",
    re.DOTALL,
)
"""Matches the Git config keys that are copied from the original repository. These keys affect Git's output
but never make Git start a program."""
_URL = re.compile(r"(?P<scheme>[a-zA-Z][\w+.-]*)://(?:(?P<user>[^/]*)@)?(?P<rest>.*)", re.DOTALL)
_PATHS = ("index", "objects", "shallow", "info/attributes", "info/exclude")


class NoRepository(Exception):
    """Raised with a reason if a code copy cannot have a Git repository."""


def make_repository(tree: SourceTree, prefix: str, stage: str) -> tuple[Path, int]:
    """Create a copy of the Git repository at `prefix` in the folder `stage`, without its index.

    Returns the path of the original index, and the hash size of the repository in bytes. Raises NoRepository
    if the repository cannot be copied, and OSError.
    """
    root = f"{tree.root}/{prefix}"
    places = [Path(root, line) for line in _ask(root, *_git_paths()).split("\n")[:-1]]
    if len(places) != len(_PATHS):
        raise NoRepository("the path of its repository contains a line break")
    index, objects, shallow, attributes, exclude = places
    config = dict(_config(_ask(root, "config", "--local", "--includes", "-z", "--list")))
    branch, head = _try(root, "symbolic-ref", "-q", "HEAD"), _try(root, "rev-parse", "-q", "--verify", "HEAD")
    refs = _ask(root, "for-each-ref", "--format=%(objectname) %(refname) %(*objectname) %(symref)")
    hash_size = 32 if config.get("extensions.objectformat") == ["sha256"] else 20
    new = Path(stage, prefix, GIT)
    ensure_folder(new, 0o700, parents=True)
    for folder in ("refs", "objects", "objects/info", "objects/pack"):
        (new / folder).mkdir(mode=0o700)
    write_private(new / "HEAD", f"ref: {branch}\n".encode() if branch else f"{head}\n".encode())
    _write_refs(new, refs)
    write_private(new / "config", "".join(_config_lines(config, hash_size)).encode(errors="surrogateescape"))
    own = (path.removeprefix(prefix) for path in tree.links if path.startswith(prefix))
    patterns = b"".join(b"/" + os.fsencode(re.sub(r"([*?\[\]\\ ])", r"\\\1", path)) + b"\n" for path in own)
    write_private(new / "info/exclude", _bytes(exclude) + b"\n/.git.before-*\n" + patterns)
    for file, name in ((attributes, "info/attributes"), (shallow, "shallow")):
        if file.exists():
            write_private(new / name, _bytes(file))
    for shared in index.parent.glob("sharedindex.*"):
        write_private(new / shared.name, _bytes(shared))
    write_private(new / "objects/info/alternates", os.fsencode(os.path.realpath(objects)) + b"\n")
    is_partial = "extensions.partialclone" in config or any(key.endswith(".promisor") for key in config)
    if head and not is_partial:
        tags = [line.split()[0] for line in refs.split("\n") if re.search(r" [0-9a-f]{40,} $", line)]
        _pack(tree, prefix, new, index, hash_size, tags)
    return index, hash_size


def finish_repository(tree: SourceTree, prefix: str, stage: str, index: Path, hash_size: int) -> None:
    """Write the copied repository's index after the files are copied. Raises OSError and ValueError."""
    if index.exists():
        write_index(Path(tree.root, prefix), Path(stage, prefix), index, hash_size)


def _git_paths() -> Iterator[str]:
    yield "rev-parse"
    for name in _PATHS:
        yield from ("--git-path", name)


def _bytes(file: Path) -> bytes:
    return file.read_bytes() if file.is_file() else b""


def _ask(folder: str, *args: str, content: bytes | None = None) -> str:
    """Return the output of a Git command; raise NoRepository if the command fails."""
    try:
        done = run_git(folder, *args, timeout_s=LIMIT_S, content=content)
    except UsageError as error:
        raise NoRepository(str(error)) from error
    if done.returncode:
        lines = os.fsdecode(done.stderr).strip().splitlines() or [f"exit code {done.returncode}"]
        raise NoRepository(f"git {args[0]} failed: {lines[-1]}")
    return os.fsdecode(done.stdout)


def _try(folder: str, *args: str) -> str:
    """Return the output of a Git command; an empty string if the command fails."""
    try:
        return _ask(folder, *args).strip()
    except NoRepository:
        return ""


def _write_refs(new: Path, listed: str) -> None:
    """Write the refs in the output of `for-each-ref`: symbolic refs to files, others to packed-refs."""
    packed = ["# pack-refs with: peeled fully-peeled sorted \n"]
    for line in filter(None, listed.split("\n")):
        oid, name, peeled, target = line.split(" ")
        if target:
            write_private(new / name, f"ref: {target}\n".encode(errors="surrogateescape"))
            continue
        packed.append(f"{oid} {name}\n" + (f"^{peeled}\n" if peeled else ""))
    write_private(new / "packed-refs", "".join(packed).encode(errors="surrogateescape"))


def _config(listed: str) -> Iterator[tuple[str, list[str]]]:
    found: dict[str, list[str]] = {}
    for item in filter(None, listed.split("\0")):
        key, has_value, value = item.partition("\n")
        found.setdefault(key, []).append(value if has_value else "true")
    yield from found.items()


def _config_lines(config: dict[str, list[str]], hash_size: int) -> Iterator[str]:
    yield f"[core]\n\trepositoryformatversion = {int(hash_size == 32)}\n\tbare = false\n\tfsmonitor = false\n"
    if hash_size == 32:
        yield f"[extensions]{OF_SHA256.decode()}"
    for key, values in config.items():
        section, *middle = key.rpartition(".")[0].split(".", 1)
        name = f' "{_escaped(middle[0])}"' if middle else ""
        if _CONFIG.fullmatch(key) and "\n" not in name:
            for value in filter(None, map(without_credentials, values)):
                yield f'[{section}{name}]\n\t{key.rpartition(".")[2]} = "{_escaped(value)}"\n'


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def without_credentials(value: str) -> str:
    """Return a Git config value without the password, token and query of a URL.

    Returns "" for a URL for which Git would start a transport program.
    """
    if re.match(r"[\w+.-]+::", value):
        return ""
    url = _URL.fullmatch(value)
    if url is None:
        return mask_secrets(re.sub(r"^[^/@:]*:[^/@]*@", "", value))
    user = (url["user"] or "").partition(":")[0] if "ssh" in url["scheme"].lower() else ""
    rest = url["rest"].partition("?")[0]
    return mask_secrets(f"{url['scheme']}://{user}{'@' if user else ''}{rest}")


def _pack(tree: SourceTree, prefix: str, new: Path, index: Path, hash_size: int, tags: Iterable[str]) -> None:
    """Pack the objects of HEAD and of uncommitted changes: commits, tags, trees and changed files."""
    here = str(new.parent)
    commits = _ask(here, "rev-list", f"--max-count={MAX_COMMITS}", "HEAD").split()
    objects = [*commits, *tags, *_ask(here, "rev-parse", "HEAD^{tree}").split()]
    committed: dict[bytes, str] = {}
    for line in filter(None, _ask(here, "ls-tree", "-r", "-t", "-z", "HEAD").split("\0")):
        (_, kind, oid), name = line.partition("\t")[0].split(), line.partition("\t")[2]
        if kind == "tree":
            objects.append(oid)
        elif kind == "blob":
            committed[os.fsencode(name)] = oid
    unchanged = set[bytes]()
    if index.exists():
        written_s = int(index.stat().st_mtime)
        for entry in index_entries(index.read_bytes(), hash_size):
            oid, found = entry.oid.hex(), tree.files.get(prefix + os.fsdecode(entry.name))
            if committed.get(entry.name) == oid and found and entry.is_unchanged(found, written_s):
                unchanged.add(entry.name)
            elif entry.stat[6] >> 12 in (0o10, 0o12):
                objects.append(oid)
    objects += [oid for name, oid in committed.items() if name not in unchanged]
    listed = "".join(f"{oid}\n" for oid in dict.fromkeys(objects)).encode()
    options = ("-q", "--window=0", "--threads=1")
    _ask(here, "pack-objects", *options, str(new / "objects/pack/pack"), content=listed)
