"""The fixture of an attempt whose first rank has printed nothing."""

import pytest

from tests.support.runs import make_attempt


@pytest.fixture
def attempt(tmp_path):
    found = make_attempt(tmp_path / "run")
    found.run.events_file.unlink(missing_ok=True)
    found.run.metrics_file.unlink(missing_ok=True)
    found.rank_log(0).parent.mkdir(parents=True, exist_ok=True)
    return found
