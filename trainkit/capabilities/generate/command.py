"""Implements the command `trainkit generate`, which starts another process to continue a prompt."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Literal, TypedDict

import click

from trainkit.capabilities.export.command import checkpoint_option, chosen_checkpoint, ema_option, places_of
from trainkit.cli.help import as_command, option
from trainkit.cli.options import json_option, refuse_untrusted, run_argument, trust_option
from trainkit.errors import EXIT_FAILED


class GeneratedJson(TypedDict):
    """A continuation of a prompt."""

    prompt: str
    text: str
    """The generated text, without the prompt."""
    num_tokens: int
    """The number of generated tokens."""
    stopped_by: Literal["eos", "max_tokens", "seq_len"]
    """Why the generation stopped: the model generated the end-of-text token (`eos`), or the text reached
    `--max-tokens` or the length of the training samples (`seq_len`)."""
    checkpoint: str


@as_command(
    'trainkit generate last "import "',
    'trainkit generate last "import " --temperature 0 --max-tokens 50',
    'trainkit generate last "import " --step 100 --json',
    context_settings={"show_default": True},
)
@run_argument
@click.argument("prompt")
@option("--step N", "Use the checkpoint of this step.", type=click.IntRange(min=0))
@checkpoint_option
@ema_option
@option("--max-tokens N", "Maximum number of new tokens.", type=click.IntRange(1), default=200)
@option(
    "--temperature T",
    "Sampling temperature; with 0, the most likely token is always chosen.",
    type=click.FloatRange(min=0.0),
    default=0.8,
)
@option("--top-k K", "Choose only among the K most likely tokens.", type=click.IntRange(min=1))
@option(
    "--top-p P",
    "Choose only among the most likely tokens whose total probability reaches P.",
    type=click.FloatRange(min=0.0, max=1.0, min_open=True),
)
@option("--seed", "Random seed; the same seed gives the same text.", type=int, default=0)
@option("--tokenizer FILE", "Path of the tokenizer.json with which the data was prepared.")
@option(
    "--device", "Device on which the model runs.", type=click.Choice(["auto", "cpu", "cuda"]), default="auto"
)
@option("--dtype", "Data type of the weights.", type=click.Choice(["fp32", "bf16", "fp16"]))
@trust_option
@json_option("trainkit.capabilities.generate.command:GeneratedJson")
def command(
    run_name: str,
    prompt: str,
    step: int | None,
    folder: Path | None,
    tokenizer: str | None,
    as_json: bool,
    **options: object,
) -> int:
    """Continue PROMPT with the model from the best checkpoint of RUN, or else the newest, in one process.

    The text is printed while it is generated. If PROMPT is -, the prompt is read from stdin. PROMPT is
    encoded like the training data, without special tokens. On a CPU, weights are fp32; on a GPU, they have
    the data type of precision.dtype.
    """
    from trainkit.job.processes import module_argv
    from trainkit.run.own_folders import own_environ
    from trainkit.run.registry import find_run

    run = find_run(run_name)
    refuse_untrusted(run.path)
    checkpoint = chosen_checkpoint(run, step, folder)
    request = {
        **places_of(run, checkpoint),
        "prompt": sys.stdin.read() if prompt == "-" else prompt,
        "tokenizer": None if tokenizer is None else str(Path(tokenizer).absolute()),
        "as_json": as_json,
        **options,
    }
    # Run the model in another process, because trainkit commands must not import torch.
    argv = module_argv("trainkit.capabilities.generate.worker")
    code = subprocess.run(argv, input=json.dumps(request), text=True, env=own_environ()).returncode
    return code if code >= 0 else EXIT_FAILED
