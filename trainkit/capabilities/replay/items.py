"""Prints items of the training data of a user-defined task.

``python -m trainkit.capabilities.replay.items`` reads a JSON object with the run, the attempt and the item
positions from standard input.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from trainkit.config import read_effective
from trainkit.data.order import sample_index
from trainkit.errors import TrainkitError
from trainkit.formats import JsonObject
from trainkit.run.rundir import RunDir
from trainkit.trainer.stateless_random import stable_key
from trainkit.trainer.stream import StreamData
from trainkit.trainer.task_batches import read_in_worker, seed_generators
from trainkit.trainer.user_task import UserTask

MAX_CHARS = 2000


def items_of(request: JsonObject) -> JsonObject:
    """Return a fingerprint of the run's data, and for each requested item its index and shortened repr."""
    run = RunDir(request["run"])
    config = read_effective(run.attempt(request["attempt"]).config_file)
    data = UserTask(config, run).train_data
    assert not isinstance(data, StreamData)
    positions = request["positions"]
    found = sample_index(np.asarray(positions), data.num_samples, config.seed, config.data.shuffle).tolist()
    indices = dict(zip(positions, found, strict=True))

    def text(position: int) -> str:
        """Return the shortened repr of an item, reading it with the same random seeds as in training."""
        seed_generators(stable_key(config.seed, "train", "item", position))
        return repr(data.samples[indices[position]])[:MAX_CHARS]

    texts = read_in_worker(text, positions, config)
    return {"data": data.fingerprint, "items": list(zip(found, texts, strict=True))}


def main() -> None:
    """Read a request from standard input and print the requested items."""
    try:
        print(json.dumps(items_of(json.load(sys.stdin))))
    except TrainkitError as error:
        sys.exit(error.message)


if __name__ == "__main__":
    main()
