"""Reads the items of a user's task at some positions of the training, for `trainkit data show`.

``python -m trainkit.trainer.items`` reads a request as JSON from stdin, and writes
``{"data": fingerprint, "items": [[index, text], …]}``.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from trainkit.config import read_effective
from trainkit.data.order import sample_index
from trainkit.errors import EXIT_NO_RESTART, EXIT_OK, TrainkitError
from trainkit.run.rundir import RunDir
from trainkit.trainer.stateless_random import stable_key
from trainkit.trainer.stream import StreamData
from trainkit.trainer.task_batches import read_in_worker, seed_generators
from trainkit.trainer.user_task import UserTask

MAX_CHARS = 2000


def main() -> int:
    """Print the items of the request on stdin."""
    request = json.load(sys.stdin)
    run = RunDir(request["run"])
    config = read_effective(run.attempt(request["attempt"]).config_file)
    try:
        data = UserTask(config, run).train_data
    except TrainkitError as error:
        print(error.message, file=sys.stderr)
        return EXIT_NO_RESTART
    assert not isinstance(data, StreamData)
    positions = range(request["start"], request["stop"])
    found = sample_index(np.asarray(positions), data.num_samples, config.seed, config.data.shuffle).tolist()
    indices = dict(zip(positions, found, strict=True))

    def text(position: int) -> str:
        """The shortened repr of an item, with the random numbers that it had in the training."""
        seed_generators(stable_key(config.seed, "train", "item", position))
        return repr(data.samples[indices[position]])[:MAX_CHARS]

    texts = read_in_worker(text, positions, config)
    print(json.dumps({"data": data.fingerprint, "items": list(zip(found, texts, strict=True))}))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
