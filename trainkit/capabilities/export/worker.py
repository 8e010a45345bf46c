"""Exports the model in a checkpoint for use in other programs, for `trainkit ckpt export`.

``python -m trainkit.capabilities.export.worker`` reads an `ExportRequest` as JSON from stdin.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from trainkit.adapters import merge_adapters
from trainkit.capabilities.ema.ema_plan import EmaPlan
from trainkit.capabilities.transformers.task import HFCausalLM, save_pretrained
from trainkit.config import read_effective
from trainkit.config.hf_families import closest_family
from trainkit.config.hf_model import CONFIG_NAME, TOKENIZER_NAME
from trainkit.config.schema import RunConfig
from trainkit.config.training import DECODER
from trainkit.data.dataset_file import BYTES, BYTES_IDENTITY, identify, read_dataset_file
from trainkit.data.sources import prepared_folder
from trainkit.errors import TrainkitError, UsageError
from trainkit.folders import shown_path
from trainkit.plan.model_shape import ModelShape, model_values, resolve_model_shape
from trainkit.run.manifest import BASE_FINGERPRINT, Checkpoint
from trainkit.run.rundir import RunDir
from trainkit.safetensors import FILE_NAME, INDEX_NAME, write_safetensors
from trainkit.trainer.checkpoint.loader import other_weights
from trainkit.trainer.checkpoint.state import StateBuffers
from trainkit.trainer.checkpoint.storage import SafeReader
from trainkit.trainer.models.hf_names import hf_family, hf_names, hf_values
from trainkit.trainer.precision import DTYPES
from trainkit.trainer.user_task import UserTask

MAX_FILE_BYTES = 5_000_000_000
"""Maximum size of a weight file in bytes. Published models usually use the same limit, because a model hub
may reject larger files."""
BUFFER = "buffer."
"""Prefix of the names of buffers in a checkpoint."""
GENERATION_NAME = "generation_config.json"
TOKENIZER_FILES = (
    TOKENIZER_NAME,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


@dataclass(frozen=True)
class ExportRequest:
    """The checkpoint to export, and the output format and folder."""

    run: str
    config_file: str
    checkpoint: str
    out: str
    dtype: str
    merge: bool
    ema: bool = False
    """True to export the average of the weights."""


def export(request: ExportRequest) -> list[str]:
    """Write a model's files into the empty folder `out`, and return remarks for the user."""
    config, out = read_effective(request.config_file), Path(request.out)
    reader = SafeReader(request.checkpoint)
    replaced = averages_in(reader) if request.ema else {}
    if not config.has_decoder:
        return _export_task(config, RunDir(Path(request.run)), reader, out, request, replaced)
    if config.model.architecture != DECODER:
        raise UsageError(
            f"model.architecture is {config.model.architecture}, which cannot be exported to the "
            f"Hugging Face format",
            hint="read the checkpoint with torch.distributed.checkpoint",
        )
    if (reason := _unlike_transformers(config, reader)) is not None:
        hint = "read the checkpoint with torch.distributed.checkpoint"
        if config.model.moe is not None:
            hint += "; `docs/experts.md` lists which models with experts can be exported"
        raise UsageError(f"no model in transformers has {reason}", hint)
    if request.merge:
        raise UsageError("--merge applies only to runs with model.lora", hint="remove --merge")
    _export_decoder(config, reader, out, DTYPES[request.dtype], replaced)
    return _export_tokenizer(config, out)


def _unlike_transformers(config: RunConfig, reader: SafeReader) -> str | None:
    """Return a property of the decoder that no supported model in transformers has, or None."""
    family, differences = closest_family(model_values(resolve_model_shape(config.model, 1)))
    if differences:
        return f"{' and '.join(differences)}; otherwise, the model is like {family.model_type}"
    if config.model.moe is None or family.has_router_biases:
        return None
    shapes = {name: item.size for name, item in saved_tensors(reader, BUFFER).items()}
    biases = {f"{BUFFER}{name}": torch.empty(size) for name, size in shapes.items()}
    load_tensors(reader, biases)
    if any(bias.any() for bias in biases.values()):
        return "model.moe with score softmax and biases of the routers, which model.moe.bias_rate changes"
    return None


def saved_tensors(reader: SafeReader, prefix: str) -> dict[str, TensorStorageMetadata]:
    """Return the checkpoint tensors whose names start with `prefix`, keyed by name without this prefix."""
    items = reader.read_metadata().state_dict_metadata.items()
    found = {name.removeprefix(prefix): item for name, item in items if name.startswith(prefix)}
    return {name: item for name, item in found.items() if isinstance(item, TensorStorageMetadata)}


def averages_in(reader: SafeReader) -> dict[str, str]:
    """Map the names of weights to the names of their averages in a checkpoint."""
    found = other_weights(reader.read_metadata().state_dict_metadata, EmaPlan.CAPABILITY)
    if not found:
        message = f"{shown_path(Path(reader.path))} contains no average of the weights"
        hint = "remove --ema; runs with ema.decay save an average in each checkpoint"
        raise UsageError(message, hint=hint)
    return found


def load_tensors(
    reader: SafeReader, tensors: Mapping[str, Tensor], replaced: Mapping[str, str] | None = None
) -> None:
    """Read checkpoint values into the tensors with the same names, converting them to the tensors' dtypes.

    `replaced` maps the names of tensors to the names in the checkpoint, where they differ.
    """
    names = replaced or {}
    found = {names.get(name, name): tensor for name, tensor in tensors.items()}
    state_dict_loader.load(found, storage_reader=reader, no_dist=True)


def _export_decoder(
    config: RunConfig, reader: SafeReader, out: Path, dtype: torch.dtype, replaced: Mapping[str, str]
) -> None:
    """Write trainkit's decoder as a model of transformers (see `hf_names`), a few tensors at a time."""
    saved = saved_tensors(reader, "model.")
    rows = saved["embedding.weight"].size[0]
    shape = resolve_model_shape(config.model.model_copy(update={"vocab_size": rows}), 1)
    saved = {f"model.{name}": item for name, item in saved.items()}
    if hf_family(shape).has_router_biases:
        saved |= {f"{BUFFER}{name}": item for name, item in saved_tensors(reader, BUFFER).items()}
    settings = decoder_settings(shape, config, dtype)
    (out / CONFIG_NAME).write_text(json.dumps(settings, indent=2) + "\n")
    files: list[dict[str, torch.Size]] = [{}]
    for name, item in saved.items():
        if _num_bytes([*files[-1].values(), item.size], dtype) > MAX_FILE_BYTES and files[-1]:
            files.append({})
        files[-1][name] = item.size
    index: dict[str, str] = {}
    total_size = 0
    for number, sizes in enumerate(files, 1):
        file = FILE_NAME if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        theirs: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name, size in sizes.items():
            names, is_bias = _names(name, shape), name.startswith(BUFFER)
            # Rounded biases would choose other experts, so transformers keeps biases in float32 too.
            stored_dtype = torch.float32 if is_bias else dtype
            theirs |= dict.fromkeys(names, (stored_dtype, tuple(size[1:] if len(names) > 1 else size)))
        write_safetensors(out / file, theirs, _values(sizes, shape, reader, replaced))
        index |= dict.fromkeys(theirs, file)
        total_size += sum(math.prod(size) * own.itemsize for own, size in theirs.values())
    if len(files) > 1:
        record = {"metadata": {"total_size": total_size}, "weight_map": index}
        (out / INDEX_NAME).write_text(json.dumps(record, indent=2) + "\n")


def _names(name: str, shape: ModelShape) -> list[str]:
    """Return the names in transformers of a tensor in a checkpoint."""
    return hf_names(name.partition(".")[2], shape)


def _num_bytes(sizes: Iterable[torch.Size], dtype: torch.dtype) -> int:
    return sum(size.numel() for size in sizes) * dtype.itemsize


def _values(
    sizes: Mapping[str, torch.Size], shape: ModelShape, reader: SafeReader, replaced: Mapping[str, str]
) -> Iterator[Tensor]:
    """Yield the values of `hf_names`; read about 1 GiB at a time to limit the number of load plans."""
    group: dict[str, Tensor] = {}
    for index, (name, size) in enumerate(sizes.items(), 1):
        group[name] = torch.empty(size)
        if index == len(sizes) or sum(value.nbytes for value in group.values()) >= 1 << 30:
            load_tensors(reader, group, replaced)
            for ours, value in group.items():
                yield from hf_values(_names(ours, shape), value)
            group = {}


def decoder_settings(shape: ModelShape, config: RunConfig, dtype: torch.dtype) -> dict[str, object]:
    """Return the config.json content that describes trainkit's decoder as a transformers model."""
    settings: dict[str, object] = {
        **hf_family(shape).content(model_values(shape)),
        "max_position_embeddings": config.data.seq_len,
        "vocab_size": shape.vocab_size,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": None,
    }
    if config.model.hf is not None:
        # Keep all other settings of the original model, such as the ids of special tokens, because they
        # remain valid.
        original = json.loads((Path(config.model.hf) / CONFIG_NAME).read_text(encoding="utf-8"))
        original.pop("dtype", None)
        return {**original, "torch_dtype": settings["torch_dtype"]}
    if (folder := prepared_folder(config.data)) is not None:
        settings["eos_token_id"] = read_dataset_file(folder).tokenizer.eos_id
        return settings
    try:
        settings["eos_token_id"] = identify(config.data.tokenizer).eos_id
    except UsageError:
        settings["eos_token_id"] = None  # the training tokenizer no longer exists; see `_export_tokenizer`
    return settings


def _export_tokenizer(config: RunConfig, out: Path) -> list[str]:
    """Write the tokenizer files, if they exist, and the original model's generation settings.

    Returns a remark if there is no tokenizer.
    """
    generation = (
        Path(config.model.hf or "") / GENERATION_NAME
    )  # generation_config.json lists all tokens that stop generation
    if config.model.hf is not None and generation.is_file():
        shutil.copyfile(generation, out / GENERATION_NAME)
    name = config.data.tokenizer
    if name == BYTES:
        if config.model.hf is not None or prepared_folder(config.data) is not None:
            return [f"{out} contains no tokenizer: add the tokenizer that was used to prepare the data"]
        _write_byte_tokenizer(out)
        return []
    source = Path(name)
    if not source.is_file():
        return [f"{out} contains no tokenizer, because {source} no longer exists"]
    for item in TOKENIZER_FILES:
        file = source.with_name(item)
        if file.is_file():
            shutil.copyfile(file, out / item)
    if source.name != TOKENIZER_NAME:
        shutil.copyfile(source, out / TOKENIZER_NAME)
    if not source.with_name("tokenizer_config.json").is_file():
        _write_tokenizer_config(out, identify(name).eos_token)
    return []


def _write_tokenizer_config(out: Path, eos_token: str) -> None:
    record = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos_token}
    (out / "tokenizer_config.json").write_text(json.dumps(record, indent=2) + "\n")


def _write_byte_tokenizer(out: Path) -> None:
    """Write the built-in tokenizer `bytes` as a tokenizer.json: byte-level BPE without merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # Byte-level BPE represents bytes other than printable Latin-1 characters by code points from 256 upwards.
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    characters = {byte: chr(byte) for byte in shown} | {
        byte: chr(256 + position) for position, byte in enumerate(hidden)
    }
    vocab = {characters[byte]: byte for byte in range(256)}
    eos = BYTES_IDENTITY.eos_token
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(eos, special=True)])
    tokenizer.save(str(out / TOKENIZER_NAME))
    _write_tokenizer_config(out, eos)


def _export_task(
    config: RunConfig,
    run: RunDir,
    reader: SafeReader,
    out: Path,
    request: ExportRequest,
    replaced: Mapping[str, str],
) -> list[str]:
    """Load a checkpoint's weights on the CPU, and let the task write its model."""
    adapters_only = config.uses_transformers and config.model.lora is not None and not request.merge
    task, model = load_task_model(config, run, reader, replaced, adapters_only=adapters_only)
    if config.uses_transformers:
        save_pretrained(model, out, DTYPES[request.dtype], merge=request.merge)
        return _export_tokenizer(config, out)
    if request.merge:
        if config.model.lora is None:
            raise UsageError("--merge applies only to runs with model.lora", hint="remove --merge")
        merge_adapters(model)
    task.export(model.to(DTYPES[request.dtype]), out)
    return []


def load_task_model(
    config: RunConfig,
    run: RunDir,
    reader: SafeReader,
    replaced: Mapping[str, str] | None = None,
    *,
    adapters_only: bool = False,
) -> tuple[UserTask, nn.Module]:
    """Return a task and its model, with the weights of a checkpoint loaded on the CPU.

    For `replaced`, see `load_tensors`. With `adapters_only`, memory is allocated only for the tensors that
    peft saves. Raises UsageError if the checkpoint belongs to a different model, or if the files of the base
    model have changed.
    """
    task = UserTask(config, run, opens_data=False)
    before = Checkpoint(Path(reader.path), 0).manifest().data.get(BASE_FINGERPRINT)
    if before is not None and before != task.task.base_fingerprint:
        raise UsageError(
            f"{config.model.hf or 'the source of read_weight()'} has changed since the checkpoint was saved",
            hint="restore its files",
        )
    saved = saved_tensors(reader, "model.")
    if adapters_only:
        model = cast(HFCausalLM, task.task).build_adapters()
        saved = {name: item for name, item in saved.items() if not model.get_parameter(name).is_meta}
    else:
        model = task.build_whole_model(without=saved)
    absent = [name for name, param in model.named_parameters() if param.requires_grad and name not in saved]
    if absent:
        hint = "use the version of the code that trained the run"
        raise UsageError(f"{reader.path} contains no {absent[0]}", hint=hint)
    tensors = {f"model.{name}": param.detach() for name, param in model.named_parameters() if name in saved}
    tensors |= {f"buffer.{name}": buffer for name, buffer in StateBuffers(model).tensors.items()}
    load_tensors(reader, tensors, replaced)
    model.eval()
    return task, model


def show_error(error: OSError | TrainkitError, *, as_json: bool = False) -> int:
    """Print an error, and return the exit code of the process."""
    if isinstance(error, OSError):
        error = TrainkitError(f"{error.filename or 'a file'}: {error.strerror or error}")
    if as_json:
        value = {"error": error.message, "hint": error.hint, "exit_code": error.exit_code}
        print(json.dumps(value))
    else:
        print(error.render(), file=sys.stderr)
    return error.exit_code


def main() -> int:
    """Export the model described by the JSON request on stdin, and return the exit code."""
    try:
        remarks = export(ExportRequest(**json.load(sys.stdin)))
    except (OSError, TrainkitError) as error:
        return show_error(error)
    for remark in remarks:
        print(remark, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
