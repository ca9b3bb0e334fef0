"""Texts as numbers: words by their hash, or the tokens of a Hugging Face tokenizer."""

import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from dispfl.errors import ConfigError, DataError

WORDS = "words"
"""The built-in tokenizer. It has no vocabulary, which sites would have to agree on."""
HASHES = 2**20
"""Word numbers are 1 to this one; 0 pads."""
_WORD = re.compile(r"\w+|[^\w\s]")


def tokenize(
    texts: Sequence[str], tokenizer: str, tokens: int, home: Path | None = None
) -> dict[str, Tensor]:
    """Return `input_ids` and `attention_mask` (N, tokens) of texts, cut and padded.

    A tokenizer besides `words` is a folder that Hugging Face `transformers` saved, looked up in
    `home`, or a name on its hub.
    """
    if tokenizer == WORDS:
        return _hashed_words(texts, tokens)
    try:
        transformers = import_module("transformers")
    except ImportError:
        raise ConfigError(
            f"data.tokenizer is {tokenizer}, which needs transformers: pip install transformers."
            f" The built-in tokenizer is {WORDS}.",
            key="data.tokenizer",
        ) from None

    folder = (home or Path()) / Path(tokenizer).expanduser()
    source = str(folder) if folder.exists() else tokenizer
    try:
        encode = transformers.AutoTokenizer.from_pretrained(source)
        encoded = encode(
            list(texts),
            padding="max_length",
            truncation=True,
            max_length=tokens,
            return_tensors="pt",
        )
    except Exception as problem:  # of the file system, the network, or a damaged file
        reason = str(problem).strip().partition("\n")[0] or type(problem).__name__
        raise DataError(f"The tokenizer {tokenizer} cannot be used: {reason}.") from problem
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def _hashed_words(texts: Sequence[str], tokens: int) -> dict[str, Tensor]:
    ids = torch.zeros(len(texts), tokens, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        words = _WORD.findall(text.lower())[:tokens]
        ids[row, : len(words)] = torch.tensor([_word_number(word) for word in words])
        mask[row, : max(1, len(words))] = 1  # an empty text has one padding token
    return {"input_ids": ids, "attention_mask": mask}


@lru_cache(maxsize=200_000)
def _word_number(word: str) -> int:
    digest = hashlib.blake2b(word.encode(), digest_size=8, person=b"dispfl word").digest()
    return 1 + int.from_bytes(digest, "little") % HASHES
