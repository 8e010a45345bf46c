"""Tests a process in the place of a rank, whose messages are refused before they are unpickled."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.support.runs import run_ranks
from trainkit.errors import TrainkitError
from trainkit.trainer.distributed import World, broadcast_from_main, gather_from_all, seal, unseal
from trainkit.trainer.torch_private import authenticate_objects

NONCE, OTHER = "0123456789abcdef", "fedcba9876543210"
VALUE = {"step": 3, "loss": float("inf"), "names": ["ä", "b"]}


class Planted:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.file), "w")


@pytest.mark.parametrize(
    "sealed", [b"", b"x" * 31, json.dumps(VALUE).encode(), seal(OTHER, b"1"), seal("", b"1")]
)
def test_what_no_rank_has_sealed(sealed):
    with pytest.raises(TrainkitError, match="not a rank of this attempt has sent a value to this rank"):
        unseal(NONCE, sealed)


def test_what_a_rank_has_sealed():
    assert unseal(NONCE, seal(NONCE, b"x" * 1000)) == b"x" * 1000
    changed = bytearray(seal(NONCE, b'{"step": 3}'))
    changed[-2] ^= 1
    with pytest.raises(TrainkitError):
        unseal(NONCE, bytes(changed))


def refuses(function: Callable[[], object]) -> None:
    with pytest.raises(TrainkitError, match="not a rank of this attempt"):
        function()


def exchange(world: World, folder: Path) -> None:
    """Run an exchange where rank 1 of two is first a rank of the attempt, and then a stranger."""
    own = replace(world, nonce=NONCE)
    stranger = replace(world, nonce=OTHER)
    assert broadcast_from_main(VALUE if own.is_main else None, own) == VALUE
    assert gather_from_all([own.rank], own) == [[0], [1]]
    if world.is_main:
        refuses(lambda: gather_from_all(1, own))
        broadcast_from_main(VALUE, own)
    else:
        refuses(lambda: gather_from_all(1, stranger))
        refuses(lambda: broadcast_from_main(None, stranger))
    # The exchange uses torch's pickles.
    plain = distributed_c10d._pickler
    authenticate_objects(partial(seal, NONCE), partial(unseal, NONCE))
    found: list[Any] = [None, None]
    dist.all_gather_object(found, {"rank": world.rank})
    assert found == [{"rank": 0}, {"rank": 1}]
    if not world.is_main:
        distributed_c10d._pickler = plain
    sent = Planted(folder / "executed")
    if world.is_main:
        refuses(lambda: dist.recv_object_list([None], src=1))
        refuses(lambda: dist.gather_object(1, found, dst=0))
        refuses(lambda: dist.broadcast_object_list([None], src=1))
    else:
        dist.send_object_list([sent], dst=0)
        dist.gather_object(sent, None, dst=0)
        dist.broadcast_object_list([sent], src=1)


@pytest.mark.slow(seconds=5)
def test_nothing_of_a_stranger_is_read(tmp_path):
    run_ranks(exchange, 2, tmp_path)
    assert not (tmp_path / "executed").exists()
    pickle.loads(pickle.dumps(Planted(tmp_path / "executed"))).close()
    assert (tmp_path / "executed").exists()  # the pickle is executed by a normal load
