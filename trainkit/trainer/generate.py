"""Continues a prompt with the model of a checkpoint, on one process: `trainkit generate`.

``python -m trainkit.trainer.generate`` reads a `GenerateRequest` as JSON from stdin, and writes the text to
stdout as it is generated.
"""

from __future__ import annotations

import codecs
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.config import read_effective
from trainkit.config.hf_model import CONFIG_NAME
from trainkit.config.schema import RunConfig
from trainkit.data.dataset_file import read_dataset_file
from trainkit.data.sources import prepared_folder
from trainkit.data.tokenize import Tokenizer
from trainkit.data.tokenizer_identity import BYTES, identify
from trainkit.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, TrainkitError, UsageError
from trainkit.plan.model_shape import resolve_model_shape
from trainkit.run.rundir import RunDir
from trainkit.trainer.checkpoint.storage import SafeReader
from trainkit.trainer.export import GENERATION_NAME, is_prepared, load_task_model, load_tensors, saved_tensors
from trainkit.trainer.models import load_architecture
from trainkit.trainer.models.decoder import Attention, Decoder
from trainkit.trainer.models.model import Model
from trainkit.trainer.precision import DTYPES

NextLogits = Callable[[Tensor], Tensor]
"""Takes the tokens [1, T] that follow those of earlier calls; returns the logits of the next one, [vocab]."""
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
    device = _device(request.device)
    dtype = DTYPES[request.dtype or _default_dtype(config, device)]
    next_logits = _load(config, request, device, dtype, tokenizer.identity.vocab_size)
    stream = _TextStream(tokenizer, is_shown=not request.as_json)
    stream.show(request.prompt)
    stopped_by: Literal["eos", "max_tokens", "seq_len"] = "max_tokens"
    number = min(request.max_tokens, limit - len(prompt))
    if number < request.max_tokens:
        stopped_by = "seq_len"
    ends = _end_tokens(config) | {tokenizer.identity.eos_id}
    tokens = _sample(next_logits, torch.tensor([prompt], device=device), request)
    generated = 0
    for generated, token in enumerate(tokens, 1):
        if token in ends:
            stopped_by = "eos"
            break
        stream.add(token)
        if generated == number:
            break
    stream.finish()
    if request.as_json:
        value = {
            "prompt": request.prompt,
            "text": stream.text,
            "num_tokens": generated,
            "stopped_by": stopped_by,
            "checkpoint": request.checkpoint,
        }
        print(json.dumps(value, ensure_ascii=False))
    elif stopped_by == "seq_len":
        print(f"stopped after {limit:,} tokens, the length of the training samples", file=sys.stderr)


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
    if name == BYTES:
        raise UsageError(
            f"{folder} was prepared with the tokenizer {used.name}", hint="name that file with --tokenizer"
        )
    if identify(name).sha256 != used.sha256:
        raise UsageError(f"{name} is not the tokenizer {used.name} with which {folder} was prepared")
    return name


def _device(name: str) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise UsageError("--device is cuda, but this machine has no GPU that torch can use")
    return torch.device(("cuda" if has_gpu else "cpu") if name == "auto" else name)


def _default_dtype(config: RunConfig, device: torch.device) -> str:
    return config.precision.dtype if device.type == "cuda" else "fp32"


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
    if config.uses_transformers:
        _, model = load_task_model(config, run, reader)
        return _TransformersSession(model.to(device=device, dtype=dtype))
    decoder = _load_model(config, run, reader, device, dtype, vocab_size)
    return _DecoderSession(decoder) if type(decoder) is Decoder else _WholeSession(decoder)


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


class _DecoderSession:
    """The built-in decoder, which keeps the keys and values of earlier tokens."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._rope = model.rope
        self._position = 0
        for attention in model.attentions:
            cast(Attention, attention).attend = _CachedAttention(self._rope.shape[1])

    def __call__(self, tokens: Tensor) -> Tensor:
        end = self._position + tokens.shape[1]
        self._model.rope = self._rope[:, self._position : end]
        self._position = end
        # In place of a loss, the head computes the logits of the last position alone.
        logits: Tensor = self._model(tokens, _no_keys(tokens), lambda x, weight: F.linear(x[:, -1], weight))
        return logits[0]


class _CachedAttention:
    """Attention of new tokens to themselves and to all earlier ones."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._keys is None or self._values is None:
            size = (*k.shape[:2], self._limit, k.shape[3])
            self._keys, self._values = k.new_empty(size), v.new_empty(size)
        start, self._used = self._used, self._used + k.shape[2]
        self._keys[:, :, start : self._used] = k
        self._values[:, :, start : self._used] = v
        keys, values = self._keys[:, :, : self._used], self._values[:, :, : self._used]
        assert start == 0 or q.shape[2] == 1  # the only cases for which `is_causal` is right
        enable_gqa = k.shape[1] != q.shape[1]
        return F.scaled_dot_product_attention(q, keys, values, is_causal=start == 0, enable_gqa=enable_gqa)


class _WholeSession:
    """An architecture of the user's own, which computes all tokens again for each new one."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._tokens: list[Tensor] = []

    def __call__(self, tokens: Tensor) -> Tensor:
        self._tokens.append(tokens)
        whole = torch.cat(self._tokens, dim=1)
        logits: Tensor = self._model(whole, _no_keys(whole))
        return logits[0, -1]


class _TransformersSession:
    """A model of transformers, with its own cache."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._cache: Any = None

    def __call__(self, tokens: Tensor) -> Tensor:
        out = self._model(input_ids=tokens, past_key_values=self._cache, use_cache=True)
        self._cache = out.past_key_values
        logits: Tensor = out.logits[0, -1]
        return logits


def _no_keys(tokens: Tensor) -> Tensor:
    """Keys of samples, which nothing but dropout uses."""
    return torch.zeros(len(tokens), dtype=torch.int32, device=tokens.device)


def _sample(next_logits: NextLogits, tokens: Tensor, request: GenerateRequest) -> Iterator[int]:
    # On the CPU, so that a seed means the same on every device.
    generator = torch.Generator().manual_seed(request.seed)
    while True:
        token = choose_token(
            next_logits(tokens).float().cpu(),
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            generator=generator,
        )
        yield token
        tokens = torch.tensor([[token]], device=tokens.device)


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


class _TextStream:
    """Shows the text of tokens as they come, a character only once it is complete."""

    def __init__(self, tokenizer: Tokenizer, *, is_shown: bool) -> None:
        self._tokenizer = tokenizer
        self._is_shown = is_shown
        self._is_terminal = sys.stdout.isatty()
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._tokens: list[int] = []
        self.text = ""
        """The text so far, without the prompt."""

    def add(self, token: int) -> None:
        if self._tokenizer.identity.kind == BYTES:
            # Rows of the embedding for tokens that the data does not have were never trained.
            piece = self._bytes.decode(bytes([token])) if token < 256 else UNFINISHED
        else:
            self._tokens.append(token)
            whole = self._tokenizer.decode(self._tokens)
            piece = "" if whole.endswith(UNFINISHED) else whole[len(self.text) :]
        self.text += piece
        self.show(piece)

    def finish(self) -> None:
        """Show what is left of an incomplete character, and end the line."""
        piece = self._bytes.decode(b"", final=True)
        if self._tokens:
            piece = self._tokenizer.decode(self._tokens)[len(self.text) :]
        self.text += piece
        self.show(f"{piece}\n")

    def show(self, piece: str) -> None:
        if self._is_shown and piece:
            sys.stdout.write(_printable(piece) if self._is_terminal else piece)
            sys.stdout.flush()


def _printable(text: str) -> str:
    """A text without the characters that control a terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else UNFINISHED for char in text)


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
