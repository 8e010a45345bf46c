"""Imports the modules for ranks with a model of transformers, once for all. See `tests.support.ranks`."""

import contextlib

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401
from transformers.models.llama import modeling_llama  # noqa: F401
from transformers.models.qwen2 import modeling_qwen2  # noqa: F401

with contextlib.suppress(ImportError):
    import peft  # noqa: F401
