"""Implements the task ``multimodal_lm``: a language model answers questions about an image or a curve.

An encoder maps the image or curve to vectors. An aligner maps these vectors to a few embeddings, which are
placed before the embeddings of the question. Only the answer's tokens contribute to the loss. The module uses
only the API of `trainkit.task`, so it also serves as an example for user-defined tasks.

Dimensions in tensor shapes: B samples, N patches, M embeddings per image or curve, T text tokens, D width of
the language model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import filter as matching
from fnmatch import fnmatchcase
from logging import getLogger
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.adapters import is_independent, require
from trainkit.capabilities.multimodal import DEMO, Medium, Split, demo_rows, read_row, row_texts
from trainkit.capabilities.texts.tokenize import Tokenizer
from trainkit.capabilities.transformers.task import create_model, find_stored, read_whole
from trainkit.config.schema import RunConfig
from trainkit.errors import FatalError, UsageError
from trainkit.plan.model_shape import resolve_model_shape
from trainkit.safetensors import StoredWeights
from trainkit.task import Loss, Task, add_adapters, parameters_on_meta
from trainkit.trainer.models.decoder import Decoder
from trainkit.trainer.models.model import StageSpec

log = getLogger(__name__)
FREQUENCIES = 4
"""Number of Fourier frequencies per time value of a curve; each frequency is twice the previous one."""
MAX_LISTED = 20
IGNORE = -100
"""Label for tokens outside the answer, equal to the default `ignore_index` of `cross_entropy`."""


@dataclass(frozen=True)
class MediumFormat:
    """Describes how images or curves are cut into patches."""

    kind: Medium
    size: int
    """Width and height in pixels that images are scaled to, or number of points that curves are interpolated
    to."""
    patch: int
    """Width and height of a patch in pixels, or number of points in a patch."""

    @property
    def num_patches(self) -> int:
        sides = self.size // self.patch
        return sides * sides if self.kind == "image" else sides

    @property
    def num_features(self) -> int:
        """Return the number of features per patch."""
        if self.kind == "image":
            return 3 * self.patch * self.patch
        return (1 + 2 * FREQUENCIES) * self.patch

    def read_image(self, file: Path) -> Tensor:
        """Read an image file as patches, float32 [N, features], with values from -1 to 1.

        Raises ValueError if the file is damaged.
        """
        from PIL import Image

        try:
            with Image.open(file) as image:
                pixels = np.asarray(image.convert("RGB").resize((self.size, self.size)), dtype=np.uint8)
        except (
            Exception
        ) as error:  # image decoders raise many types of exceptions, and some messages lack the file name
            raise ValueError(f"the image {file} cannot be opened: {type(error).__name__}: {error}") from error
        return self.cut(pixels)

    def cut(self, pixels: npt.NDArray[np.uint8]) -> Tensor:
        """Resize an image (uint8 [height, width, 3]) to `size`, and cut it into patches."""
        values = torch.from_numpy(pixels.astype(np.float32) / 127.5 - 1.0)
        if len(values) != self.size:
            scaled = F.interpolate(values.permute(2, 0, 1)[None], (self.size, self.size), mode="bilinear")
            values = scaled[0].permute(1, 2, 0)
        sides = self.size // self.patch
        blocks = values.reshape(sides, self.patch, sides, self.patch, 3)
        return blocks.transpose(1, 2).reshape(self.num_patches, self.num_features)

    def read_curve(self, points: Sequence[Any]) -> Tensor:
        """Cut a curve into patches, float32 [N, features].

        The features are the values of the curve and the Fourier features of their times.

            `points` are numbers at equal time intervals, or (time, number) pairs. The curve is
            interpolated to `size` points.
        """
        values = np.asarray(points, dtype=np.float64)
        times = np.linspace(0.0, 1.0, len(values)) if values.ndim == 1 else values[:, 0]
        values = values if values.ndim == 1 else values[:, 1]
        span = (times[-1] - times[0]) or 1.0
        grid = np.linspace(times[0], times[-1], self.size)
        sampled = torch.from_numpy(np.interp(grid, times, values)).float()
        phase = torch.from_numpy((grid - times[0]) / span).float()[:, None]
        angles = 2 * math.pi * phase * 2.0 ** torch.arange(FREQUENCIES)
        features = torch.cat((sampled[:, None], angles.sin(), angles.cos()), dim=1)
        return features.view(self.num_patches, self.num_features)


class MediumSamples:
    """Rows from a JSON Lines file or built-in rows, each with an image or curve, a question and an answer."""

    def __init__(
        self, file: Path, medium: MediumFormat, tokenizer: str, max_tokens: int, split: Split = "train"
    ) -> None:
        self._folder = file.parent
        self._medium = medium
        content, lines = _read(file, medium.kind, split)
        self.fingerprint = hashlib.sha256(
            content + repr((medium, tokenizer, max_tokens)).encode()
        ).hexdigest()
        texts = Tokenizer(tokenizer)
        self._rows: list[tuple[Any, Tensor, Tensor]] = []
        problems = []
        for number, line in enumerate(lines, 1):
            if isinstance(line, bytes) and not line.strip():
                continue
            try:
                row = line if isinstance(line, dict) else read_row(line, medium.kind, self._folder)
            except ValueError as error:
                problems.append(f"{file}:{number}: {error}")
                continue
            question, answer = texts.encode(row_texts(row))
            tokens = [*question.tolist(), *answer.tolist(), texts.identity.eos_id]
            if len(tokens) > max_tokens:
                problems.append(f"{file}:{number}: the row has {len(tokens)} tokens, more than {max_tokens}")
                continue
            labels = torch.tensor(tokens)
            labels[: len(question)] = IGNORE
            self._rows.append((row[medium.kind], torch.tensor(tokens), labels))
        if problems:
            more = f"\nand {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
            raise UsageError(
                "\n".join(problems[:MAX_LISTED]) + more,
                hint=f'{{"{medium.kind}": …, "question": "…", "answer": "…"}}, at most data.seq_len tokens; '
                "`trainkit data validate CONFIG` also opens the images",
            )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        medium, tokens, labels = self._rows[index]
        if self._medium.kind == "curve":
            return self._medium.read_curve(medium), tokens, labels
        if isinstance(medium, np.ndarray):
            return self._medium.cut(medium), tokens, labels
        return self._medium.read_image(self._folder / str(medium)), tokens, labels


def _read(file: Path, kind: Medium, split: Split) -> tuple[bytes, Sequence[bytes | dict[str, object]]]:
    """Return bytes that identify the data, and the rows: lines of a file, or parsed built-in rows."""
    if str(file) == DEMO:
        return f"{DEMO} {split}".encode(), demo_rows(kind, split)
    try:
        content = file.read_bytes()
    except OSError as error:
        hint = f"set task_args.{split} to a JSON Lines file, or to `{DEMO}` for built-in rows"
        raise UsageError(f"{file} cannot be read: {error.strerror}", hint=hint) from None
    return content, content.splitlines()


class Layer(nn.Module):
    """A pre-norm transformer layer without an attention mask."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.ffn_norm = nn.LayerNorm(width)
        self.ffn = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Encoder(nn.Module):
    """Encodes patches [B, N, features] as vectors [B, N, width]."""

    def __init__(self, medium: MediumFormat, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Linear(medium.num_features, width)
        self.positions = nn.Parameter(0.02 * torch.randn(medium.num_patches, width))
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, patches: Tensor) -> Tensor:
        x = self.patches(patches) + self.positions
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.norm(x)
        return out


class Aligner(nn.Module):
    """Maps vectors [B, N, width] to embeddings [B, M, D] for the language model.

    If `queries` is set, M is the number of learned queries, each of which attends to all vectors. Without
    queries, M equals N.
    """

    def __init__(self, width: int, dim: int, queries: int, heads: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(0.02 * torch.randn(queries, width)) if queries else None
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True) if queries else None
        self.projection = nn.Sequential(nn.Linear(width, dim), nn.GELU(), nn.Linear(dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        if self.attention is not None and self.queries is not None:
            queries = self.queries.expand(len(x), -1, -1)
            x = self.attention(queries, x, x, need_weights=False)[0]
        out: Tensor = self.projection(x)
        return out


class OwnLM(nn.Module):
    """trainkit's decoder model, which maps embeddings [B, T, D] to logits [B, T, vocab]."""

    def __init__(self, config: RunConfig, vocab_size: int, seq_len: int) -> None:
        super().__init__()
        shape = resolve_model_shape(config.model, vocab_size)
        if shape.tie_embeddings or shape.dropout:
            key = "tie_embeddings" if shape.tie_embeddings else "dropout"
            raise FatalError(
                f"model.{key} is set, but multimodal_lm does not support it",
                hint=f"remove model.{key}",
            )
        self.dim = shape.dim
        self.embedding = nn.Embedding(shape.vocab_size, shape.dim)
        self.decoder = Decoder(shape, seq_len, StageSpec(range(shape.num_layers), has_embedding=False))
        with torch.no_grad():
            self.embedding.weight.normal_(std=self.decoder.init_std("embedding.weight") or 0.0)
            for name, param in self.decoder.named_parameters():
                std = self.decoder.init_std(name)
                param.fill_(1.0) if std is None else param.normal_(std=std)

    def forward(self, x: Tensor) -> Tensor:
        keys = torch.zeros(len(x), dtype=torch.int32, device=x.device)
        out: Tensor = self.decoder(x, keys)
        return out


class HFLM(nn.Module):
    """A Hugging Face transformers model, which maps embeddings [B, T, D] to logits [B, T, vocab].

    `stored` maps each parameter on the meta device to its tensor name in the weight files. Each rank reads
    only the values for its own shard.
    """

    def __init__(self, config: RunConfig, weights: StoredWeights | None) -> None:
        super().__init__()
        self.stored: dict[nn.Parameter, str] = {}
        folder = Path(cast(str, config.model.hf))
        if weights is None:
            self.model: Any = create_model(folder)
        else:
            with parameters_on_meta():
                self.model = create_model(folder)
            self.stored, why = find_stored(self.model, weights)
            names = [f"lm.model.{name}" for name, _ in self.model.named_parameters()]
            patterns = config.model.init_include or ("*",)
            if not why and not is_independent(config.model.lora or {}):
                why = "the initial values of model.lora depend on the weights"
            elif not why and config.model.init_from and any(matching(names, item) for item in patterns):
                why = "model.init_from replaces the weights"
            if why:
                log.warning(f"each process reads all weights in {folder}, because {why}")
                self.model, self.stored = read_whole(folder), {}
        self.dim: int = self.model.get_input_embeddings().weight.shape[1]

    @property
    def embedding(self) -> nn.Module:
        return cast(nn.Module, self.model.get_input_embeddings())

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(inputs_embeds=x, use_cache=False).logits
        return logits


class MultimodalModel(nn.Module):
    """Maps patches [B, N, features] and tokens [B, T] to logits [B, T, vocab]."""

    def __init__(self, encoder: Encoder, aligner: Aligner, lm: OwnLM | HFLM) -> None:
        super().__init__()
        self.encoder = encoder
        self.aligner = aligner
        self.lm = lm

    def forward(self, patches: Tensor, tokens: Tensor) -> Tensor:
        medium = self.aligner(self.encoder(patches))
        embeddings = torch.cat((medium, self.lm.embedding(tokens).to(medium.dtype)), dim=1)
        # The logits at each position predict the next token, so start at the position before the first text
        # token.
        logits: Tensor = self.lm(embeddings[:, :-1])[:, medium.shape[1] - 1 :]
        return logits


class MultimodalLM(Task):
    """Trains a language model to answer questions about images or curves."""

    def __init__(
        self,
        config: RunConfig,
        *,
        train: str,
        val: str | None = None,
        medium: Medium = "image",
        size: int = 32,
        patch: int = 8,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        queries: int = 0,
        frozen: Sequence[str] = (),
    ) -> None:
        super().__init__(config)
        if medium not in ("image", "curve"):
            raise UsageError(f"task_args.medium is {medium}", hint="set task_args.medium to image or curve")
        numbers = {"size": size, "patch": patch, "width": width, "layers": layers, "heads": heads}
        for name, value in {**numbers, "queries": queries}.items():
            least = 0 if name == "queries" else 1
            if not isinstance(value, int) or value < least:
                hint = f"use an integer that is at least {least}"
                raise UsageError(f"task_args.{name} is {value}", hint=hint)
        for name, whole in (("patch", "size"), ("heads", "width")):
            if numbers[whole] % numbers[name]:
                divides = f"which is not a divisor of task_args.{whole} ({numbers[whole]})"
                raise UsageError(
                    f"task_args.{name} is {numbers[name]}, {divides}", hint="change one of the two values"
                )
        if medium == "image" and {train, val} - {DEMO, None}:
            require("PIL", "task_args.medium: image", "vision")
        self._files = {"train": train, "val": val}
        self._medium = MediumFormat(medium, size, patch)
        self._sizes = {"width": width, "layers": layers, "heads": heads}
        self._queries = queries
        self._frozen = tuple(frozen)
        self._weights: StoredWeights | None = None
        if config.model.hf is not None:
            require("transformers", "model.hf", "hf")
            if not config.model.from_scratch:
                self._weights = StoredWeights(Path(config.model.hf))
        self._names: dict[str, str] = {}
        """Maps the name of each parameter to its tensor name in the weight files."""
        taken = queries or self._medium.num_patches
        self._max_tokens = config.data.seq_len - taken
        if self._max_tokens < 2:
            message = f"data.seq_len is {config.data.seq_len}, but the {medium} alone takes {taken} tokens"
            raise UsageError(message, hint=f"set data.seq_len to at least {taken + 2}")

    def build_model(self) -> nn.Module:
        model = self.config.model
        lm: OwnLM | HFLM
        if model.hf is not None:
            lm = HFLM(self.config, self._weights)
        else:
            vocab_size = Tokenizer(self.config.data.tokenizer).identity.vocab_size
            lm = OwnLM(self.config, vocab_size, self.config.data.seq_len)
        encoder = Encoder(self._medium, **self._sizes)
        aligner = Aligner(self._sizes["width"], lm.dim, self._queries, self._sizes["heads"])
        add_adapters(lm.model if isinstance(lm, HFLM) else lm, self.config)
        whole = MultimodalModel(encoder, aligner, lm)
        if isinstance(lm, HFLM):
            self._names = {
                name: lm.stored[param] for name, param in whole.named_parameters() if param in lm.stored
            }
        for pattern in self._frozen:
            found = [param for name, param in whole.named_parameters() if fnmatchcase(name, pattern)]
            if not found:
                raise UsageError(
                    f"task_args.frozen contains {pattern!r}, which matches no parameter",
                    hint="use patterns such as encoder.*, aligner.* and lm.*",
                )
            for param in found:
                param.requires_grad_(False)
        return whole

    def read_weight(self, name: str, rows: slice) -> Tensor:
        assert self._weights is not None
        return self._weights.read(self._names[name], (rows,))

    @property
    def base_fingerprint(self) -> str | None:
        return None if self._weights is None else self._weights.fingerprint

    def train_dataset(self) -> MediumSamples:
        return self._samples(cast(str, self._files["train"]), "train")

    def val_dataset(self) -> MediumSamples | None:
        file = self._files["val"]
        return None if file is None else self._samples(file, "val")

    def _samples(self, file: str, split: Split) -> MediumSamples:
        tokenizer = self.config.data.tokenizer
        return MediumSamples(Path(file), self._medium, tokenizer, self._max_tokens, split)

    def collate(self, items: list[tuple[Tensor, Tensor, Tensor]]) -> dict[str, Tensor]:
        patches, tokens, labels = zip(*items, strict=True)
        pad = nn.utils.rnn.pad_sequence
        return {
            "patches": torch.stack(patches),
            # Sequences are padded after the answer, so causal attention never attends to the padding.
            "tokens": pad(list(tokens), batch_first=True),
            "labels": pad(list(labels), batch_first=True, padding_value=IGNORE),
        }

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        labels = batch["labels"]
        logits = model(batch["patches"], batch["tokens"]).float()
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
        is_answer = labels != IGNORE
        is_right = (logits.argmax(-1) == labels) | ~is_answer
        metrics = {
            "token_accuracy": (is_right & is_answer).sum(),
            "answer_accuracy": (is_right.all(1).sum(), len(labels)),
        }
        return Loss(total, is_answer.sum(), metrics)
