"""Tests which exception ends a program's output: a chained one, a group, or one rank of several."""

import pytest

from trainkit.run.tracebacks import Raised, exception_of, last_exception

START = "Traceback (most recent call last):\n"
LOAD = START + '  File "/me/load.py", line 3, in read\n    open(x)\nFileNotFoundError: x\n'
MAIN = START + '  File "/me/train.py", line 9, in main\n    read()\nRuntimeError: no data\n'
TORCH = START + '  File "/usr/lib/python3.11/site-packages/torch/nn.py", line 1, in f\n    g()\nKeyError: 1\n'
COMPILED = TORCH.replace(
    "/usr/lib/python3.11/site-packages/torch/nn", f"/tmp/trainkit-0/inductor/au/c{'au2z' * 12}tz7"
)
HANDLING = "\nDuring handling of the above exception, another exception occurred:\n\n"
CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "/me/train.py", line 9, in main
  |     raise ExceptionGroup("tasks", errors)
  | ExceptionGroup: tasks (2 sub-exceptions)
  +-+---------------- 1 ----------------
"""
OF_LOAD = "".join(f"    | {line}\n" for line in LOAD.splitlines())
PLAIN = "    | ValueError: bad\n"
SECOND = "    +---------------- 2 ----------------\n    | KeyError: 'x'\n"
END = "    +------------------------------------\n"
INNER = """\
    | Exception Group Traceback (most recent call last):
    |   File "/me/pool.py", line 4, in run
    |     raise ExceptionGroup("inner", errors)
    | ExceptionGroup: inner (1 sub-exception)
    +-+---------------- 1 ----------------
      | ValueError: deep
      +------------------------------------
"""


@pytest.mark.parametrize(
    ("text", "kind", "message", "place"),
    [
        (LOAD + HANDLING + MAIN, "RuntimeError", "no data", "/me/train.py:9"),
        (LOAD + CAUSE + MAIN, "RuntimeError", "no data", "/me/train.py:9"),
        (LOAD + CAUSE + TORCH, "KeyError", "1", "/me/load.py:3"),
        (LOAD + CAUSE + COMPILED, "KeyError", "1", "/me/load.py:3"),
        # The last exception of a group with a traceback counts.
        (GROUP + OF_LOAD + SECOND + END, "FileNotFoundError", "x", "/me/load.py:3"),
        (GROUP + PLAIN + SECOND + END, "ExceptionGroup", "tasks (2 sub-exceptions)", "/me/train.py:9"),
        (GROUP + INNER + SECOND + END, "ExceptionGroup", "inner (1 sub-exception)", "/me/pool.py:4"),
        (GROUP + PLAIN + END + CAUSE + MAIN, "RuntimeError", "no data", "/me/train.py:9"),
        (GROUP + "step 1\n" * 30, None, None, None),
        # The class is defined in a function.
        (
            MAIN.replace("RuntimeError", "train.main.<locals>.Fehlerß"),
            *("train.main.<locals>.Fehlerß", "no data", "/me/train.py:9"),
        ),
    ],
)
def test_the_exception_that_ends_a_program(text, kind, message, place):
    own = text.splitlines()
    assert _found(last_exception(own)) == (kind, message, place)
    mixed = [line for one in own for line in (f"[rank2]: {one}", "[rank1]: x")]
    assert kind is None or _found(exception_of([*mixed, "ends"], 2)) == (kind, message, place)


def _found(raised: Raised | None) -> tuple[str | None, str | None, str | None]:
    if raised is None:
        return None, None, None
    return raised.type, raised.message, raised.code and raised.code.place
