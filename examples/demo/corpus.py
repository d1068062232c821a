"""English text that comes with Python, and how well byte counts predict it.

The text is the documentation that ``help()`` shows for keywords and topics, and the docstrings of the standard
library. Both grow with every Python version, so nothing here depends on their length.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = 0.05  # fraction of the text, at its end
SHORTEST = 200  # characters of a docstring that is prose and not just a phrase
SKIP = {"dist-packages", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests"}


def topics() -> list[str]:
    try:
        from pydoc_data.topics import topics as texts
    except ImportError:  # some distributions ship it in another package
        return []
    return [texts[name] for name in sorted(texts)]


def docstrings() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if SKIP.intersection(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) >= SHORTEST:
                    yield text


def load(quick: bool = False) -> tuple[Tensor, Tensor]:
    """Returns training and held-out bytes, as int64. ``quick`` omits the docstrings, which take seconds to find.

    A paragraph is kept only where it first appears: topics quote each other, and the held-out text must not contain
    what the model has learnt by heart.
    """
    documents = topics() + ([] if quick else list(docstrings()))
    random.Random(0).shuffle(documents)  # otherwise the end would differ in kind from the rest
    seen: set[str] = set()
    kept = []
    for document in documents:
        paragraphs = []
        for paragraph in re.split(r"\n\s*\n", document.strip("\n")):
            words = " ".join(paragraph.split())
            if words not in seen:
                seen.add(words)
                paragraphs.append(paragraph)
        kept.append("\n\n".join(paragraphs))
    data = "\n\n\n".join(text for text in kept if text).encode()
    if len(data) < 100_000:
        raise SystemExit(f"this Python comes with {len(data)} bytes of documentation: too few to learn from")
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    end = int(len(tokens) * (1 - HELD_OUT))
    return tokens[:end], tokens[end:]


def counting_losses(train: Tensor, held_out: Tensor) -> dict[str, float]:
    """Nats per byte on the held-out text, for unigram and bigram models counted on the training text.

    The bigram model backs off to the unigram model, and that to the uniform distribution, each with the weight of one
    observation. So these are losses of predicting models, comparable with a neural network's, and not entropies of a
    sample.
    """
    once = torch.bincount(train, minlength=256).double()
    unigram = (once + 1 / 256) / (once.sum() + 1)
    twice = torch.bincount(train[:-1] * 256 + train[1:], minlength=256 * 256).double().view(256, 256)
    bigram = (twice + unigram) / (twice.sum(1, keepdim=True) + 1)
    return {
        "unigram": -unigram[held_out].log().mean().item(),
        "bigram": -bigram[held_out[:-1], held_out[1:]].log().mean().item(),
    }
