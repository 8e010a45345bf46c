"""Continues a prompt with the model in a checkpoint, in a single process, for `trainkit generate`.

``python -m trainkit.capabilities.generate.worker`` reads the command's options as JSON from stdin, and writes
text to stdout while it is generated.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from trainkit.capabilities.export.worker import (
    GENERATION_NAME,
    averages_in,
    load_task_model,
    load_tensors,
    saved_tensors,
    show_error,
)
from trainkit.capabilities.texts.tokenize import Tokenizer
from trainkit.config import read_effective
from trainkit.config.hf_model import CONFIG_NAME
from trainkit.config.schema import RunConfig
from trainkit.data.dataset_file import BYTES, identify, read_dataset_file
from trainkit.data.sources import prepared_folder
from trainkit.errors import EXIT_INTERRUPTED, EXIT_OK, TrainkitError, UsageError, replace_unencodable
from trainkit.formats import JsonObject
from trainkit.plan.model_shape import resolve_model_shape
from trainkit.run.rundir import RunDir
from trainkit.trainer.checkpoint.state import StateBuffers
from trainkit.trainer.checkpoint.storage import SafeReader
from trainkit.trainer.models import load_architecture
from trainkit.trainer.models.decoder import soft_cap
from trainkit.trainer.models.model import Model
from trainkit.trainer.precision import DTYPES

UNFINISHED = "\ufffd"
"""Character that a tokenizer returns for an incomplete UTF-8 sequence."""


@torch.inference_mode()
def generate(request: JsonObject) -> None:
    """Print the prompt and its continuation, as text or as a JSON object.

    Raises UsageError if the run does not train a language model, if its tokenizer is unknown, or if the
    prompt is too long.
    """
    config = read_effective(request["config_file"])
    if config.has_user_task:
        raise UsageError(
            f"task is {config.task}, but only language models of the task causal_lm can continue a prompt",
            hint="use `trainkit ckpt export` to export the model, then generate with your own code",
        )
    tokenizer = Tokenizer(_tokenizer_name(config, request["tokenizer"]))
    tokens = [int(token) for token in tokenizer.encode([request["prompt"].encode()])[0]]
    # in the training data, each document follows the end token of the previous one
    tokens = tokens or [tokenizer.identity.eos_id]
    start, limit = len(tokens), config.data.seq_len
    if start >= limit:
        raise UsageError(
            f"the prompt has {start:,} tokens, but the model was trained on sequences of {limit:,} tokens "
            f"(data.seq_len)",
            hint=f"shorten the prompt to at most {limit - 1:,} tokens",
        )
    wanted, has_gpu = request["device"], torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        raise UsageError(
            "--device cuda: this machine has no GPU that torch can use",
            hint="use --device cpu",
        )
    device = torch.device("cuda" if has_gpu and wanted != "cpu" else "cpu")
    model = _load(config, request, device, tokenizer.identity.vocab_size)
    next_logits = logits_of(model, device)
    ends = {tokenizer.identity.eos_id, *_end_tokens(config)}
    # Use a CPU generator, so that a seed selects the same random numbers on every device.
    generator = torch.Generator().manual_seed(request["seed"])
    sampling = {name: request[name] for name in ("temperature", "top_k", "top_p")}
    show = (lambda piece: None) if request["as_json"] else _show
    show(request["prompt"])
    number = min(request["max_tokens"], limit - start)
    stopped_by = "max_tokens" if number == request["max_tokens"] else "seq_len"
    text = ""
    for _ in range(number):
        tokens.append(choose_token(next_logits(tokens), generator=generator, **sampling))
        if tokens[-1] in ends:
            stopped_by = "eos"
            break
        whole = tokenizer.decode(tokens[start:])
        if not whole.endswith(UNFINISHED):
            show(whole[len(text) :])
            text = whole
    num_tokens = len(tokens) - start
    whole = tokenizer.decode(tokens[start : len(tokens) - (stopped_by == "eos")])
    show(f"{whole[len(text) :]}\n")
    if request["as_json"]:
        value = {"prompt": request["prompt"], "text": whole, "num_tokens": num_tokens}
        value |= {"stopped_by": stopped_by, "checkpoint": request["checkpoint"]}
        print(json.dumps(value))
    elif stopped_by == "seq_len":
        print(f"stopped after {limit:,} tokens, the length of the training samples", file=sys.stderr)


def _show(piece: str) -> None:
    """Print a piece of the generated text. On a terminal, control characters in the text are replaced."""
    if sys.stdout.isatty():
        piece = "".join(char if char.isprintable() or char in "\n\t" else UNFINISHED for char in piece)
    sys.stdout.write(piece)
    sys.stdout.flush()


def _tokenizer_name(config: RunConfig, given: str | None) -> str:
    """Return the tokenizer that was used to train the run: `bytes`, or the path of a tokenizer.json."""
    name = given or config.data.tokenizer
    folder = prepared_folder(config.data)
    if folder is None:
        return name
    used = read_dataset_file(folder).tokenizer
    if used.kind != BYTES and (name == BYTES or identify(name).sha256 != used.sha256):
        raise UsageError(
            f"{folder} was prepared with the tokenizer {used.name}, not with {name}",
            hint="use --tokenizer to specify the file that was used to prepare the data",
        )
    return BYTES if used.kind == BYTES else name


def _end_tokens(config: RunConfig) -> list[int]:
    """Return the tokens that end a text, as listed in the model files of `model.hf`."""
    if config.model.hf is None:
        return []
    files = [Path(config.model.hf, name) for name in (CONFIG_NAME, GENERATION_NAME)]
    found = [json.loads(file.read_text("utf-8")).get("eos_token_id") for file in files if file.is_file()]
    return [end for ends in found for end in (ends if isinstance(ends, list) else [ends])]


def _load(config: RunConfig, request: JsonObject, device: torch.device, vocab_size: int) -> nn.Module:
    """Return the model with the weights of a checkpoint loaded."""
    run, reader = RunDir(Path(request["run"])), SafeReader(request["checkpoint"])
    dtype = DTYPES[request["dtype"] or (config.precision.dtype if device.type == "cuda" else "fp32")]
    replaced = averages_in(reader) if request["ema"] else {}
    if config.uses_transformers:
        return load_task_model(config, run, reader, replaced)[1].to(device=device, dtype=dtype)
    saved = saved_tensors(reader, "model.")
    if "embedding.weight" in saved:
        vocab_size = saved["embedding.weight"].size[0]
    settings = config.model.model_copy(update={"vocab_size": vocab_size})
    with torch.device("meta"):
        kind = load_architecture(config.model.architecture, run)
        model = kind(resolve_model_shape(settings, 1), config.data.seq_len)
    for param in model.parameters():
        # buffers keep their dtype, because rotary embedding angles need float32
        param.data = param.data.to(dtype)
    model.to_empty(device=device)
    model.rebuild_buffers()
    tensors = {f"model.{name}": param.detach() for name, param in model.named_parameters()}
    tensors |= {f"buffer.{name}": buffer for name, buffer in StateBuffers(model).tensors.items()}
    load_tensors(reader, tensors, replaced)
    return model.eval()


def logits_of(model: nn.Module, device: torch.device) -> Callable[[list[int]], Tensor]:
    """Return a function that maps all tokens so far to the logits for the next token.

    Call the returned function once per token, because it caches keys and values. The logits are a float32
    tensor of shape [vocab] on the CPU.
    """
    cache: object = None

    def next_logits(tokens: list[int]) -> Tensor:
        nonlocal cache
        new = torch.tensor([tokens if cache is None else tokens[-1:]], device=device)
        if isinstance(model, Model):  # the sample keys are needed only for dropout, which is disabled
            found = model(new, torch.zeros(1, dtype=torch.int32, device=device))
            found = soft_cap(found.float(), model.shape.logit_soft_cap)
        else:
            out = model(input_ids=new, past_key_values=cache, use_cache=True)
            cache, found = out.past_key_values, out.logits
        logits: Tensor = found[0, -1].float().cpu()
        return logits

    return next_logits


def choose_token(
    logits: Tensor,
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> int:
    """Return the most likely token at temperature 0, else a sample; `logits` is float32 [vocab].

    Samples are drawn from the `top_k` most likely tokens and, among those, from the smallest set whose
    probabilities add up to at least `top_p` (nucleus sampling, arXiv 1904.09751).
    """
    if temperature == 0.0:
        return int(logits.argmax())
    ordered, tokens = torch.sort(logits / temperature, descending=True, stable=True)
    probabilities = ordered[:top_k].softmax(0)
    if top_p is not None:
        before = probabilities.cumsum(0) - probabilities
        probabilities = probabilities[before < top_p]
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])


def main() -> int:
    """Continue the prompt given in the JSON request on stdin, and return the exit code."""
    replace_unencodable()
    request = json.load(sys.stdin)
    try:
        generate(request)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of the pipe, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, TrainkitError) as error:
        return show_error(error, as_json=request["as_json"])
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
