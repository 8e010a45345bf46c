"""Continues a prompt with the model of a checkpoint, on one process: `trainkit generate`.

``python -m trainkit.contrib.generate.worker`` reads a `GenerateRequest` as JSON from stdin, and writes the
text to stdout as it is generated.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trainkit.config import read_effective
from trainkit.config.hf_model import CONFIG_NAME
from trainkit.config.schema import RunConfig
from trainkit.data.dataset_file import BYTES, identify, read_dataset_file
from trainkit.data.sources import prepared_folder
from trainkit.data.tokenize import Tokenizer
from trainkit.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, TrainkitError, UsageError
from trainkit.plan.model_shape import resolve_model_shape
from trainkit.run.rundir import RunDir
from trainkit.trainer.checkpoint.storage import SafeReader
from trainkit.trainer.export import GENERATION_NAME, is_prepared, load_task_model, load_tensors, saved_tensors
from trainkit.trainer.models import load_architecture
from trainkit.trainer.models.decoder import Decoder
from trainkit.trainer.models.model import Model
from trainkit.trainer.precision import DTYPES

NextLogits = Callable[[Tensor], Tensor]
"""Takes all tokens [1, T], one more in each call; returns the logits of the next one, [vocab]."""
UNFINISHED = "\ufffd"
"""What a tokenizer decodes the first bytes of a character to."""


@dataclass(frozen=True)
class GenerateRequest:
    """What to continue, with which checkpoint and how."""

    run: str
    config_file: str
    checkpoint: str
    prompt: str
    max_tokens: int
    temperature: float
    """0: always the most likely token."""
    top_k: int | None
    top_p: float | None
    seed: int
    device: str
    dtype: str | None
    tokenizer: str | None
    as_json: bool


@torch.inference_mode()
def generate(request: GenerateRequest) -> None:
    """Print the prompt and its continuation, or one JSON object.

    Raises UsageError if the run has no language model, its tokenizer is not known, or the prompt is too long.
    """
    config = read_effective(request.config_file)
    if config.has_user_task:
        raise UsageError(
            f"task is {config.task}: only language models of the task causal_lm continue a prompt",
            hint="`trainkit ckpt export` writes the model for your own code",
        )
    tokenizer = Tokenizer(_tokenizer_name(config, request.tokenizer))
    prompt = [int(token) for token in tokenizer.encode([request.prompt.encode()])[0]]
    prompt = prompt or [tokenizer.identity.eos_id]  # in training, a document begins after the end of another
    limit = config.data.seq_len
    if len(prompt) >= limit:
        raise UsageError(
            f"the prompt has {len(prompt):,} tokens, but the model was trained with {limit:,} (data.seq_len)",
            hint=f"shorten it to at most {limit - 1:,} tokens",
        )
    has_gpu = torch.cuda.is_available()
    if request.device == "cuda" and not has_gpu:
        raise UsageError("--device is cuda, but this machine has no GPU that torch can use")
    device = torch.device("cuda" if has_gpu and request.device != "cpu" else "cpu")
    dtype = DTYPES[request.dtype or (config.precision.dtype if device.type == "cuda" else "fp32")]
    next_logits = _load(config, request, device, dtype, tokenizer.identity.vocab_size)
    ends = _end_tokens(config) | {tokenizer.identity.eos_id}
    # On the CPU, so that a seed means the same on every device.
    generator = torch.Generator().manual_seed(request.seed)
    show = (lambda piece: None) if request.as_json else _show
    show(request.prompt)
    number = min(request.max_tokens, limit - len(prompt))
    stopped_by = "max_tokens" if number == request.max_tokens else "seq_len"
    tokens, generated, text = torch.tensor([prompt], device=device), 0, ""
    written: list[int] = []
    while generated < number:
        token = choose_token(
            next_logits(tokens).float().cpu(),
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            generator=generator,
        )
        generated += 1
        if token in ends:
            stopped_by = "eos"
            break
        tokens = torch.cat((tokens, torch.tensor([[token]], device=device)), dim=1)
        written.append(token)
        whole = tokenizer.decode(written)
        if not whole.endswith(UNFINISHED):
            show(whole[len(text) :])
            text = whole
    whole = tokenizer.decode(written)
    show(f"{whole[len(text) :]}\n")
    if request.as_json:
        value = {
            "prompt": request.prompt,
            "text": whole,
            "num_tokens": generated,
            "stopped_by": stopped_by,
            "checkpoint": request.checkpoint,
        }
        print(json.dumps(value, ensure_ascii=False))
    elif stopped_by == "seq_len":
        print(f"stopped after {limit:,} tokens, the length of the training samples", file=sys.stderr)


def _show(piece: str) -> None:
    """Write a piece of text; to a terminal without the characters that control it."""
    if sys.stdout.isatty():
        piece = "".join(char if char.isprintable() or char in "\n\t" else UNFINISHED for char in piece)
    sys.stdout.write(piece)
    sys.stdout.flush()


def _tokenizer_name(config: RunConfig, given: str | None) -> str:
    """`bytes` or the path of the tokenizer.json that the run was trained with."""
    name = given or config.data.tokenizer
    if not is_prepared(config):
        return name
    folder = prepared_folder(config.data)
    assert folder is not None
    used = read_dataset_file(folder).tokenizer
    if used.kind == BYTES:
        return BYTES
    if name == BYTES or identify(name).sha256 != used.sha256:
        raise UsageError(
            f"{folder} was prepared with the tokenizer {used.name}, not with {name}",
            hint="name that file with --tokenizer",
        )
    return name


def _end_tokens(config: RunConfig) -> set[int]:
    """The tokens that end a text, according to the files of `model.hf`."""
    found: set[int] = set()
    for name in (CONFIG_NAME, GENERATION_NAME):
        file = Path(config.model.hf or "") / name
        if config.model.hf is not None and file.is_file():
            ends = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
            found.update(ends if isinstance(ends, list) else [] if ends is None else [ends])
    return found


def _load(
    config: RunConfig, request: GenerateRequest, device: torch.device, dtype: torch.dtype, vocab_size: int
) -> NextLogits:
    run, reader = RunDir(Path(request.run)), SafeReader(request.checkpoint)
    if not config.uses_transformers:
        decoder = _load_model(config, run, reader, device, dtype, vocab_size)
        # Nothing but dropout uses the keys of samples.
        keys = torch.zeros(1, dtype=torch.int32, device=device)
        if type(decoder) is Decoder:  # whose head can leave out all positions but the last
            return lambda tokens: decoder(tokens, keys, lambda x, weight: F.linear(x[0, -1], weight))
        return lambda tokens: decoder(tokens, keys)[0, -1]
    model: Any = load_task_model(config, run, reader)[1].to(device=device, dtype=dtype)
    cache: Any = None

    def next_logits(tokens: Tensor) -> Tensor:
        nonlocal cache
        new = tokens if cache is None else tokens[:, -1:]
        out = model(input_ids=new, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits: Tensor = out.logits[0, -1]
        return logits

    return next_logits


def _load_model(
    config: RunConfig,
    run: RunDir,
    reader: SafeReader,
    device: torch.device,
    dtype: torch.dtype,
    vocab_size: int,
) -> Model:
    """The built-in decoder, or an architecture of the user's own, with the weights of a checkpoint."""
    saved = saved_tensors(reader, "model.")
    model_class = load_architecture(config.model.architecture, run)
    if "embedding.weight" in saved:
        vocab_size = saved["embedding.weight"].size[0]
    settings = config.model.model_copy(update={"vocab_size": vocab_size})
    with torch.device("meta"):
        model = model_class(resolve_model_shape(settings, 1), config.data.seq_len)
    for param in model.parameters():
        param.data = param.data.to(dtype)  # not the buffers: angles need float32
    model.to_empty(device=device)
    model.rebuild_buffers()
    load_tensors(reader, {f"model.{name}": param.detach() for name, param in model.named_parameters()})
    return model.eval()


def choose_token(
    logits: Tensor,
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> int:
    """A token by its logits, float32 [vocab]: the most likely one for temperature 0, else a sample.

    Samples are among the `top_k` most likely tokens, and among the fewest of them whose probabilities add up
    to at least `top_p` (nucleus sampling, arXiv 1904.09751).
    """
    if temperature == 0.0:
        return int(logits.argmax())
    ordered, tokens = torch.sort(logits / temperature, descending=True, stable=True)
    if top_k is not None:
        ordered = ordered[:top_k]
    probabilities = ordered.softmax(0)
    if top_p is not None:
        before = probabilities.cumsum(0) - probabilities
        probabilities = probabilities[before < top_p]
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])


def main() -> int:
    """Continue the prompt that the request on stdin names; returns the exit code."""
    request = GenerateRequest(**json.load(sys.stdin))
    try:
        generate(request)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader, as in `| head`, has what it wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except OSError as error:
        print(f"error: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return EXIT_FAILED
    except TrainkitError as error:
        if request.as_json:
            value = {"error": error.message, "hint": error.hint, "exit_code": error.exit_code}
            print(json.dumps(value, ensure_ascii=False))
        else:
            print(error.render(), file=sys.stderr)
        return error.exit_code
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
