"""Tests that the signatures are sound and fast, and which of their sentences are shown."""

import re
import time
from dataclasses import fields
from typing import get_args

import pytest
import yaml

from trainkit.capabilities.diagnose.signatures import (
    FILE,
    Confidence,
    Role,
    Signature,
    Where,
    load_signatures,
    placeholders,
)
from trainkit.capabilities.diagnose.texts import Text


def test_the_signatures_are_sound():
    signatures, keys = load_signatures(), {"pattern", "cause", *(key.name for key in fields(Signature))}
    assert all(entry.keys() <= keys for entry in yaml.safe_load(FILE.read_text()).values())
    known = {"subject", "rank", "host", "message", "run", "attempt_dir", "command", "waiting"}
    for signature in signatures:
        groups = {name for pattern in signature.patterns for name in pattern.groupindex}
        assert set(placeholders(signature.causes[-1])) <= known | groups, signature.name
        assert all(sentence and sentence.keys() <= {"trainer", "command"} for sentence in signature.advice)
        sentences = [text for sentence in signature.advice for text in sentence.values()]
        assert not any(text.endswith(".") for text in (*signature.causes, *sentences)), signature.name
        assert not any(pattern.search("") for pattern in signature.patterns), signature.name
        assert signature.role in get_args(Role)
        assert set(signature.where) <= set(get_args(Where))
        assert signature.confidence in get_args(Confidence)


def test_no_sentence_for_a_command_names_what_has_no_effect_on_it():
    sections = "task|model|data|tokenizer|optimizer|schedule|precision|parallel|train|checkpoint"
    wrong = re.compile(
        rf"\b(?:{sections})\.[a-z]\w*|trainkit (?:plan|check)\b|the (?:model|data) section|--set device="
    )
    only_trainer = {"num_workers", "device_batch_size", "smallest_batch", "lr", "precision", "trainer_config"}
    for signature in load_signatures():
        for text in (*signature.causes, *signature.advice_for(is_command=True)):
            assert not wrong.search(text), (signature.name, text)
            assert not only_trainer & set(placeholders(text)), (signature.name, text)
        for text in signature.advice_for(is_command=False):
            assert "command" not in placeholders(text), (signature.name, text)


def test_no_line_of_a_log_takes_a_signature_long():
    starts = ["a", " ", "(", '"', ".", "a.", "1", "0x", "rank 1 ", "Error: ", "node1: ", "a=b ", "Traceback "]
    slow = []
    for signature in load_signatures():
        for pattern in signature.patterns:
            own = re.sub(r"\\[a-zA-Z]|[\^$()?*+|\[\]{}]", "", pattern.pattern)[:20] or "a"
            began_s = time.process_time()
            for start in (*starts, own, f"{own}a", own[:6]):
                list(pattern.finditer((start * 20_000)[:20_000]))
            if time.process_time() - began_s > 1.0:
                slow.append(f"{signature.name}: {pattern.pattern}")
    assert not slow


@pytest.mark.parametrize("text", ["CUDA out of memory ", "No space left on device "])
def test_an_error_that_a_log_repeats_is_judged_once(text):
    """The log has 400 lines of 1,000 characters. A program survived 50 errors in each line."""
    log, began_s = Text("log", "log", [(text * 1000)[:1000]] * 400), time.process_time()
    found = [match.evidence.line for signature in load_signatures() if (match := log.find(signature))]
    assert set(found) == {400}
    assert time.process_time() - began_s < 5
