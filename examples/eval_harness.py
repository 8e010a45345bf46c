"""Evaluate an exported checkpoint with lm-evaluation-harness; see docs/evaluations.md.

    on_checkpoint: {command: python examples/eval_harness.py tasks questions, export: hf}

The folder `tasks` contains the YAML files of your own tasks, and `questions` is the name of a task.
"""

import json
import os
import sys
from pathlib import Path

import lm_eval
import torch
from lm_eval.tasks import TaskManager

folder, *names = sys.argv[1:]
device = "cuda" if torch.cuda.is_available() else "cpu"
model = {"pretrained": os.environ["TRAINKIT_EXPORT"]}
tasks = TaskManager(include_path=folder)
found = lm_eval.simple_evaluate("hf", model, names, device=device, task_manager=tasks)
metrics = {
    f"{task}/{name.partition(',')[0]}": value
    for task, values in found["results"].items()
    for name, value in values.items()
    if isinstance(value, float)
}
Path(os.environ["TRAINKIT_EVAL_OUT"]).write_text(json.dumps(metrics))
