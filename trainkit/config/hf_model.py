"""Finds the folder of a Hugging Face model, and reads config values from the model's config.json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from trainkit.config.hf_families import FAMILIES
from trainkit.config.training import DECODER, TRANSFORMERS
from trainkit.errors import UsageError
from trainkit.folders import shown_path, typed_path
from trainkit.formats import JsonObject

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
CONFIG_NAME = "config.json"
TOKENIZER_NAME = "tokenizer.json"


class HFModel(NamedTuple):
    """A Hugging Face model on disk."""

    folder: Path
    architecture: str
    """``llama`` if trainkit's decoder supports the model, else ``transformers``."""
    values: JsonObject
    """Maps keys of the `model` section to values from config.json; only `vocab_size` for ``transformers``."""
    reason: str
    """Why trainkit's decoder does not support the model; empty if it does."""

    @property
    def tokenizer(self) -> Path | None:
        """Return the path of the model's tokenizer.json, or None if the file does not exist."""
        file = self.folder / TOKENIZER_NAME
        return file if file.is_file() else None


def find_hf_model(name: str, cwd: Path) -> HFModel:
    """Find a model by its folder, or by its Hub name in the local cache; nothing is downloaded.

    Raises UsageError if the model is not found, its config.json cannot be read, or its weights are quantized.
    """
    folder = _find_folder(name, cwd)
    file = folder / CONFIG_NAME
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"is {name}, but {shown_path(folder)} has no {CONFIG_NAME}",
            hint="specify a folder written by `save_pretrained` or `hf download`",
        ) from None
    except (OSError, ValueError) as error:
        message = f"is {name}, but {shown_path(file)} cannot be read: {error}"
        raise UsageError(message, hint="download it again") from None
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        message = f"is {name}, but {shown_path(file)} does not specify a model_type"
        raise UsageError(message, hint="specify a folder written by `save_pretrained`")
    if content.get("quantization_config"):
        hint = "use the original, unquantized model"
        raise UsageError(f"is {name}, which has quantized weights according to {shown_path(file)}", hint=hint)
    try:
        family = FAMILIES.get(content["model_type"])
        reason = family.unlike(content) if family else f"model_type is {content['model_type']}"
        values = family.values(content) if family and not reason else {}
    except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError) as error:
        message = f"is {name}, but {shown_path(file)} is damaged: {error}"
        raise UsageError(message, hint="download it again") from None
    if isinstance(content.get("vocab_size"), int):
        values["vocab_size"] = content["vocab_size"]
    return HFModel(folder, TRANSFORMERS if reason else DECODER, values, reason)


def _find_folder(name: str, cwd: Path) -> Path:
    folder = typed_path(name, cwd)
    try:
        if folder.is_dir():
            return folder
    except OSError as error:
        raise UsageError(
            f"is {name}, which cannot be read: {error.strerror}", hint="check the path"
        ) from None
    if not HUB_NAME.fullmatch(name):
        hint = (
            "specify a folder, or a model that `hf download` has downloaded from the Hub, such as org/model"
        )
        raise UsageError(f"is {name}, but there is no such folder", hint=hint)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        raise UsageError(
            f"is {name}, which is neither a folder nor a downloaded model",
            hint=f"run `hf download {name}` on a host with internet access; compute nodes read the "
            f"same HF_HOME",
        ) from None
