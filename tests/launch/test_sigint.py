"""Tests Ctrl-C while a run is being started."""

import os
import signal

import pytest

from trainkit.launch.create import defer_sigint


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_it_comes_when_the_block_is_over():
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with defer_sigint():
            interrupt()
            done.append("all of it")
        done.append("what comes after")
    assert done == ["all of it"]
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_a_second_one_comes_at_once():
    done = []
    with pytest.raises(KeyboardInterrupt), defer_sigint():  # noqa: PT012
        interrupt()
        done.append("so far")
        interrupt()
        done.append("not here")
    assert done == ["so far"]


def test_without_one_nothing_is_different():
    before = signal.getsignal(signal.SIGINT)
    with defer_sigint():
        pass
    with pytest.raises(ValueError, match="no"), defer_sigint():
        raise ValueError("no")
    assert signal.getsignal(signal.SIGINT) is before


def test_where_it_is_ignored_it_stays_so():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    done = []
    with defer_sigint():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        interrupt()
        interrupt()
        done.append("all of it")
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
