"""Prompts that are far too long are refused by a bound that never claims a token too many."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ninfer_jax.errors import PromptError, RequestError, RequestErrorKind
from ninfer_jax.frontend import prompt
from ninfer_jax.frontend.tokenizer import TextTokenizer

ENGLISH = "It was a dark and stormy night; the rain fell in torrents, except at 3 or 4 intervals.\n"
# Characters that NFC joins, also across the border behind an added token, and ones it takes apart.
MARKS = [
    "e",
    "\u0301",
    "\u0338",
    "\u212a",
    "\u1100",
    "\u1161",
    "\u11a8",
    "\u0958",
    "\u0344",
    "\ufb1d",
    ">",
    "<",
]
PIECES = ["<|im_end|>", "</think>", "abc", " the", "stop", "  ", "\n\n", "42", "é", "🙂", "你好", *MARKS]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=40).map("".join))
@example("<|im_end|>\u0338" * 9)
def test_the_bound_is_below_the_truth_for_a_small_vocabulary(tiny, text):
    assert tiny.least_tokens(text) <= len(tiny.encode(text))


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=40).map("".join))
def test_the_bound_is_below_the_truth_for_the_real_vocabulary(qwen, text):
    assert qwen.least_tokens(text) <= len(qwen.encode(text))


@pytest.mark.parametrize(
    ("text", "least"),
    [
        (ENGLISH * 12_000, 18_000),  # about one token in ten
        ("你好，世界" * 60_000, 18_000),  # noqa: RUF001
        ("1234567890" * 100_000, 1_000_000),  # every digit is a token
        (" " * 1_000_000, 7_800),  # the longest token is 128 blanks
    ],
    ids=["english", "chinese", "digits", "blanks"],
)
def test_the_bound_decides_for_long_texts_of_every_kind(qwen, text, least):
    assert qwen.least_tokens(text) >= least


def test_a_far_too_long_prompt_is_refused_without_tokenising(frontend, monkeypatch):
    text = ENGLISH * 12_000
    frontend.tokenizer.least_tokens("")  # the look through the vocabulary

    def refuse(self, text):
        raise AssertionError("tokenised")

    monkeypatch.setattr(TextTokenizer, "encode_with_offsets", refuse)
    started_s = time.process_time()
    for prepare in (
        frontend.prepare_text,
        lambda text, **limit: frontend.prepare_messages([user(text)], **limit),
    ):
        message = r"the prompt has at least \d+ tokens; .* max_context = 8192: shorten it"
        with pytest.raises(RequestError, match=message) as refused:
            prepare(text, max_tokens=8191)
        assert refused.value.kind is RequestErrorKind.CONTEXT_LENGTH_EXCEEDED
    assert time.process_time() - started_s < 0.5  # some 10 ms each; tokenising takes more than a second
    with pytest.raises(PromptError, match="lone surrogate"):
        frontend.prepare_text(text + "\ud800", max_tokens=8191)


def test_where_the_bound_does_not_decide_the_count_is_exact(frontend, monkeypatch):
    text = "The quick brown fox " * 5
    count = len(frontend.tokenizer.encode(text))
    for bounded_chars in (prompt._BOUNDED_CHARS, 0):
        monkeypatch.setattr(prompt, "_BOUNDED_CHARS", bounded_chars)
        assert frontend.prepare_text(text, max_tokens=count).identity.num_tokens == count
        with pytest.raises(RequestError, match=f"the prompt has {count} tokens; .* max_context = {count}:"):
            frontend.prepare_text(text, max_tokens=count - 1)


@pytest.mark.parametrize("change", ["normalizer", "blanks", "removal", "content"])
def test_a_tokenizer_that_may_lose_text_has_no_bound(change):
    alphabet = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.decoder = decoders.ByteLevel()
    assert TextTokenizer(tokenizer).least_tokens("abc") == 3
    if change == "normalizer":
        tokenizer.normalizer = normalizers.Replace("a", "")
    elif change == "blanks":
        tokenizer.add_tokens([AddedToken("<x>", rstrip=True)])  # one token for any number of blanks
    elif change == "content":
        tokenizer.add_tokens([AddedToken("<\u212a>")])
    else:
        steps.insert(0, pre_tokenizers.Split(Regex(r"\s+"), "removed"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    assert TextTokenizer(tokenizer).least_tokens("abc") == 0


def user(text: str) -> dict:
    return {"role": "user", "content": text}
