"""Load seeded hostile configs; each must be accepted, or rejected with the file, the line and a hint.

    python -m benchmarks.hostile_configs [--configs 2100] [--seed 0]

The hostile contents are:

- YAML features besides plain values: tags, anchors, aliases of aliases, merge keys, documents, numbers and
  booleans of other YAML versions;
- invalid YAML at every key, in a file or after `--set`;
- misspelt keys, files with arbitrary bytes, and unusual values of `extends`.

An accepted config must be the same after it has been written and read again, and `trainkit check` must exit
with a documented exit code for this config.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from shlex import join

from benchmarks.mutated_runs import TooLong, typed, within
from benchmarks.run_mutations import BYTES
from trainkit.config import dump_effective, load_config, read_effective
from trainkit.config.schema import all_keys, default_values
from trainkit.config.yamlfile import dump
from trainkit.errors import ConfigError

LIMIT_S = 10
LAUGHS = "l0: &l0 x\n" + "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]\n" for i in range(1, 12))


def _words(text: str) -> list[str]:
    return text.split()


SCALARS = (
    *_words("no yes on off True ~ null nan inf None auto true false 1e3 1E+3 0x10 0o17 010 0b11 1_000 12:30"),
    *_words("12:30:45 .nan .inf -.inf 1. .5 +1 -0 -1 0 1 1.5 1e400 1e-400 99999999999999999999 1,000 1,5"),
    *_words("2026-01-01 1GB 10k 5m 1e3s 50% = << ? # - : %x @x ! é ٣ 𝟙 ½ ∞ “5” [ ] { } [] {} [[1]]"),
    *_words("*a !x ../../x /dev/zero ~/x ~nobody/x s3://a/b ${oc.env:HOME} $HOME ${HOME} `id` $(id) 'a"),
    *("''", '""', "' '", '"\\0"', '"\\ud800"', '"\\x1b[31m"', '"a', "- 1", "? a", "a: b", "a #b", "a\tb"),
    *("2026-01-01 12:00:00", "[1, 2]", "{a: 1}", "{a: {b: {c: 1}}}", "{a: 1, a: 2}", "{<<: {a: 1}}"),
    *("{1: 2}", "{null: 1}", "{[1]: 2}", "{? {a: 1}}", "&a [*a]", "&a {b: *a}", "&a 1", "!!str 1"),
    *("!!int x", "!!float 1", "!!bool no", "!!null x", "!!binary aGk=", "!!set {a}", "!!omap [a: 1]"),
    *("!!timestamp 2026-01-01", "!!python/name:os.system x", "!!python/object/apply:os.system [echo]"),
    *("|\n  a\n  b", ">\n  a", "x" * 100_000, "9" * 5000, "[" * 5000, "[" * 900 + "]" * 900, "{a: " * 2000),
)
"""YAML values as a user might type them."""
FILES = (
    *("", " ", "\n\n", "---\n", "---\n...\n", "a", "- a", "1", "null", "# nothing\n", "{seed: 1}", "seed"),
    *("%YAML 1.1\n---\nseed: 1\n", "seed: 1\n---\nseed: 2\n", "%TAG ! tag:x,2000:\n---\nseed: !y 1\n"),
    *("seed: 1\n...\nx\n", LAUGHS, "task_args: {a: &a {b: *a}}\n", "? seed\n: 1\n", "? [a]\n: 1\n"),
    *("x: &x {steps: 3}\ntrain: *x\n", "train: {<<: {steps: 3}}\n", "<<: {seed: 1}\n", "<<: 1\n"),
    *("train: {<<: [{steps: 3}, {steps: 4}]}\n", "train: &a\n  steps: 3\nmodel:\n  <<: *a\n"),
    *("seed: 1\nseed: 1\n", "train.steps: 3\n", "train:\n  steps: 3\n steps: 4\n", "train:\n\tsteps: 3\n"),
    *("train: steps: 3\n", "TRAIN: {}\n", "train:\n", "train: []\n", "train: 1\n", "train: 'x'\n"),
    *("train: null\n", "task_args: " + "{a: " * 400 + "1\n", "task_args: " + "{a: " * 900 + "1" + "}" * 900),
    *("task_args: {1: 2}\n", "config_version: 99\n", "config_version: x\n", "a.b.c: 1\n", '"": 1\n'),
    *("defaults: [a, {b: c}]\n", "extends: quickstart\nextends: quickstart\n"),
    *(f"extends: {text}\n" for text in ("nowhere.yaml", "1", "[]", "['']", "[1]", "/", ".", "../../../x")),
    *(f"extends: {text}\n" for text in ("config.yaml", "[quickstart, quickstart]", "{a: 1}", "~nobody/x")),
    *(f"extends: {text}\n" for text in ("s3://a/b.yaml", '"\\0"', "/dev/zero", "null")),
)
"""The complete content of hostile files."""


def _misspelt(draw: random.Random, key: str) -> str:
    at = draw.randrange(len(key))
    start, rest = key[:at], key[at:]
    others = (start + rest[1:], start + rest[0] + rest, start + draw.choice("aeéx_ .:") + rest, key.upper())
    names = (key.replace("_", "-"), key.replace(".", "__"), key.rpartition(".")[2], f"{key}.x", f"{key} ")
    return draw.choice((*others, *names))


def _in_file(key: str, value: str) -> str:
    section, _, name = key.rpartition(".")
    return f"{section}:\n  {name}: {value}\n" if section else f"{name}: {value}\n"


def hostile(draw: random.Random) -> tuple[bytes, tuple[str, ...], str]:
    """Return the content of a config file, the argument of ``--set``, and the hostile part of both."""
    key, value = draw.choice(all_keys()), draw.choice(SCALARS)
    kind = draw.choice(("value", "value", "set", "key", "file", "bytes", "several"))
    if kind == "value":
        return _in_file(key, value).encode(), (), f"{key}: {value[:60]}"
    if kind == "set":
        text = draw.choice(
            (f"{key}={value}", f"{key}+={value}", f"{key}.0={value}", f"{key}.x={value}", key, value)
        )
        return b"seed: 1\n", (text,), f"--set {text[:60]}"
    if kind == "key":
        other = _misspelt(draw, key)
        return _in_file(other, dump(default_values().get(key)).strip()).encode(), (), f"the key {other!r}"
    if kind == "file":
        text = draw.choice(FILES)
        return text.encode(), (), f"the file {text[:60]!r}"
    if kind == "several":
        text = "".join(_in_file(draw.choice(all_keys()), draw.choice(SCALARS)) for _ in range(3))
        return text.encode(), (), f"the file {text[:90]!r}"
    how = draw.choice(list(BYTES))
    text = "".join(
        _in_file(key, dump(default_values()[key]).strip()) for key in ("seed", "train.steps", "name")
    )
    return BYTES[how](draw, text.encode()), (), f"a file that is {how}"


def wrong(content: bytes, sets: tuple[str, ...]) -> tuple[str, bool]:
    """Check config.yaml in this folder; return the problems found, and whether the config was accepted."""
    file = Path("config.yaml")
    file.write_bytes(content)
    try:
        with within(LIMIT_S):
            config = load_config("config.yaml", overrides=sets, environ={}, cwd=Path.cwd()).config
    except ConfigError as error:
        for problem in error.problems:
            if not problem.hint:
                return f"no hint: {problem.statement}", False
            if not problem.origin or (problem.origin == "config.yaml" and problem.key):
                return f"no line: {problem.statement}", False
            if str(Path.cwd()) in problem.statement + problem.hint:
                return f"a path that could be shorter: {problem.statement}", False
        return "", False
    except TooLong:
        return f"longer than {LIMIT_S} s", False
    except BaseException as error:  # the benchmark must detect exceptions of any type
        return f"{type(error).__name__}: {str(error)[:200]}", False
    try:
        Path("effective.yaml").write_text(dump_effective(config), encoding="utf-8", newline="")
        if read_effective(Path("effective.yaml")) != config:
            return "it is another config after it was written and read", True
    except BaseException as error:
        return f"it cannot be written and read: {type(error).__name__}: {str(error)[:200]}", True
    with within(3 * LIMIT_S):
        return typed(join(["check", "config.yaml", *(f"--set={text}" for text in sets)])).wrong, True


def tried(count: int, seed: int) -> Iterator[tuple[str, str, bool]]:
    """Yield the hostile part of each config, the problems found, and whether the config was accepted."""
    for number in range(count):
        content, sets, text = hostile(random.Random(f"{seed} {number}"))
        yield (text, *wrong(content, sets))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configs", type=int, default=2100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started, counts = time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update({f"XDG_{kind}_HOME": folder for kind in ("STATE", "CONFIG", "CACHE")}, PATH=folder)
        os.chdir(folder)
        for number, (text, fault, is_accepted) in enumerate(tried(options.configs, options.seed)):
            counts["faults" if fault else "accepted" if is_accepted else "refused"] += 1
            if fault:
                print(f"{number} {text}: {fault}", flush=True)
    found = ", ".join(f"{counts[name]:,} {name}" for name in ("accepted", "refused", "faults"))
    print(f"{options.configs:,} configs: {found}, {(time.monotonic() - started) / 60:.1f} min")
    return 1 if counts["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
