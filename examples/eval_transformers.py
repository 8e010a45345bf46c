"""Evaluate an exported checkpoint with transformers; see docs/evaluations.md.

    on_checkpoint: {command: python examples/eval_transformers.py questions.txt, export: hf}

The metric `text_loss` is the mean loss per token of the text file.
"""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = os.environ["TRAINKIT_EXPORT"]
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
text = Path(sys.argv[1]).read_text()
tokens = tokenizer(text, return_tensors="pt", truncation=True, max_length=512).input_ids
with torch.no_grad():
    loss = model(tokens, labels=tokens).loss.item()
Path(os.environ["TRAINKIT_EVAL_OUT"]).write_text(json.dumps({"text_loss": loss}))
