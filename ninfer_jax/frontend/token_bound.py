"""A lower bound of how many tokens a text has, from the vocabulary alone and without tokenising.

Tokenising a megabyte takes a second or two, too long to tell somebody that it will not fit. Every token
covers so many letters, digits, blanks, signs and other characters of the text, and together the tokens cover
it; so the text has at least as many tokens as the fullest tokens would need. It owns no limit and no error.

With `n[c]` characters of class `c` in the text and `t[c]` in a token, take weights `w[c]` for which
`sum_c w[c] * t[c] <= 1` for every token of the vocabulary: then `sum_c w[c] * n[c]` is at most the number of
tokens. One class alone gives such weights, and so does 1 / (most of any token) in every class, scaled down.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer
from tokenizers.normalizers import NFC

# Classes: letters, digits, blanks, signs of ASCII, and every other character by the first of its bytes. The
# bytes that follow it belong to none, so a character that two tokens share is counted once.
_NUM_CLASSES = 5
_NO_CLASS = _NUM_CLASSES

# Steps of a pre-tokenizer that leave every byte of the text to some token.
_KEEPING_STEPS = ("ByteLevel", "Digits", "Split")


@dataclass(frozen=True, eq=False)
class TokenBound:
    """The weights, made by `make_token_bound`."""

    tokenizer: Tokenizer
    weights: np.ndarray  # f64[M, 5], M sets of weights

    def least_tokens(self, text: str) -> int:
        """Returns a number of tokens that `text` has at least; takes some milliseconds a megabyte.

        Args:
            text: valid Unicode.
        """
        if not text.isascii() and self.tokenizer.normalizer is not None:
            text = self.tokenizer.normalizer.normalize_str(text)
        counts = np.bincount(np.frombuffer(text.encode("utf-8"), np.uint8), minlength=256)
        in_class = np.bincount(_class_of_byte(), weights=counts, minlength=_NUM_CLASSES + 1)
        best = float(np.max(self.weights @ in_class[:_NUM_CLASSES]))
        return math.ceil(best * (1 - 1e-9))  # rounding must not claim a token too many


def make_token_bound(tokenizer: Tokenizer, symbols: Mapping[str, int]) -> TokenBound | None:
    """Returns the bound for a byte-level BPE, or None where its settings allow none.

    Args:
        tokenizer: as loaded; nothing in it is changed.
        symbols: the byte that each character of the vocabulary stands for.
    """
    if not _keeps_all_text(tokenizer):
        return None
    counts = [_class_counts(tokenizer.get_vocab(with_added_tokens=False), symbols)]
    as_bytes = {chr(byte): byte for byte in range(128)}
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    if added:
        counts.append(_class_counts(added, as_bytes))
    of_token = np.concatenate(counts)  # int64[T, 5]
    single = np.diag(1.0 / np.maximum(1, of_token.max(axis=0)))
    together = np.diag(single)
    together = together / max(1.0, float((of_token @ together).max()))
    return TokenBound(tokenizer, np.concatenate([single, together[None]]))


def _keeps_all_text(tokenizer: Tokenizer) -> bool:
    """Whether tokens and text correspond byte by byte, but for the composition of characters (NFC).

    Composed as one, a text has in no class more characters than in the pieces between added tokens, which are
    composed apart: what joins across such a border is an ASCII character and the mark behind it.
    """
    if tokenizer.normalizer is not None and not isinstance(tokenizer.normalizer, NFC):
        return False
    for token in tokenizer.get_added_tokens_decoder().values():
        if token.lstrip or token.rstrip or not token.content.isascii():
            return False
    if tokenizer.pre_tokenizer is None:
        return True
    described = json.loads(tokenizer.pre_tokenizer.__getstate__())
    steps = described.get("pretokenizers", [described])
    return all(step.get("type") in _KEEPING_STEPS and step.get("behavior") != "Removed" for step in steps)


def _class_of_byte() -> np.ndarray:
    """Returns int64[256], the class of each byte, `_NO_CLASS` for those inside a character."""
    kinds = np.empty(256, np.int64)
    for byte in range(256):
        character = chr(byte)
        if byte >= 128:
            kinds[byte] = 4 if byte >= 0xC0 else _NO_CLASS
        elif character.isalpha():
            kinds[byte] = 0
        elif character.isdigit():
            kinds[byte] = 1
        else:
            kinds[byte] = 2 if byte <= 32 or byte == 127 else 3
    return kinds


def _class_counts(tokens: Iterable[str], symbols: Mapping[str, int]) -> np.ndarray:
    """Returns int64[T, 5], how many characters of each class every token covers."""
    spelled = [token for token in tokens if token]
    kind_of_code = np.full(max(map(ord, symbols)) + 1, _NO_CLASS)
    kinds = _class_of_byte()
    for symbol, byte in symbols.items():
        kind_of_code[ord(symbol)] = kinds[byte]
    codes = np.frombuffer("".join(spelled).encode("utf-32-le"), np.uint32)
    # A character outside the alphabet occurs in no text that the vocabulary is asked to spell.
    kind = np.where(
        codes < len(kind_of_code), kind_of_code[np.minimum(codes, len(kind_of_code) - 1)], _NO_CLASS
    )
    starts = np.cumsum([0, *map(len, spelled[:-1])])
    return np.stack([np.add.reduceat(kind == c, starts, dtype=np.int64) for c in range(_NUM_CLASSES)], axis=1)
