"""Answers as immutable sessions: where they end and what text is certain, however the tokens arrive."""

from __future__ import annotations

import codecs
import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ninfer_jax.errors import InvariantError, OptionError
from ninfer_jax.frontend.channels import (
    THINK_CLOSE,
    THINK_OPEN,
    ChannelState,
    Mode,
    split_channels,
)
from ninfer_jax.frontend.output import OutputSession, make_output_rules, open_output_session
from ninfer_jax.frontend.stops import make_stop_strings
from ninfer_jax.frontend.tokenizer import TextTokenizer


def open_session(tokenizer: TextTokenizer | None, *, thinking: bool = False, **options) -> OutputSession:
    options = {"eos_token_ids": frozenset(), "max_tokens": 1000, "splits_channels": False} | options
    return open_output_session(make_output_rules(tokenizer, **options), starts_in_reasoning=thinking)


def token(tokenizer: TextTokenizer, text: str) -> int:
    """The one token that a text is."""
    return next(n for n in range(tokenizer.vocab_size) if tokenizer.piece(n) == text.encode())


def drive(session: OutputSession, tokens, cuts=()) -> tuple[dict[str, str], int, str | None, object]:
    """Feeds tokens in pieces and returns text by channel, accepted tokens, finish reason and stop detail."""
    text = {"content": "", "reasoning": ""}
    accepted, reason, detail = 0, None, None
    borders = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    for start, end in itertools.pairwise(borders):
        preview = session.preview(tokens[start:end])
        assert 1 <= preview.accepted <= end - start
        assert preview.accepted == end - start or preview.finish_reason is not None
        session, accepted = preview.next, accepted + preview.accepted
        deltas, reason, detail = preview.deltas, preview.finish_reason, preview.stop_detail
        for delta in deltas:
            assert delta.text
            text[delta.channel] += delta.text
        if reason is not None:
            break
    for delta in session.finish():
        text[delta.channel] += delta.text
    return text, accepted, reason, detail


# --- characters


@given(data=st.data())
def test_any_split_of_the_tokens_gives_the_whole_decode(tiny, data):
    tokens = data.draw(st.lists(st.integers(0, tiny.vocab_size - 1), min_size=1, max_size=30))
    cuts = data.draw(st.lists(st.integers(1, 30), max_size=6))
    skip = data.draw(st.booleans())
    text, accepted, reason, _ = drive(open_session(tiny, skip_special_tokens=skip), tokens, cuts)
    assert text["content"] == tiny.decode(tokens, skip_special_tokens=skip)
    assert (accepted, reason) == (len(tokens), None)


def test_a_character_waits_for_its_last_byte(tiny):
    session = open_session(tiny)
    seen = []
    for byte in "é🙂".encode():
        preview = session.preview([byte])
        session = preview.next
        seen.append("".join(delta.text for delta in preview.deltas))
    assert seen == ["", "é", "", "", "", "🙂"]


def test_an_answer_cut_inside_a_character_shows_that_it_was(tiny):
    preview = open_session(tiny, max_tokens=3).preview([ord("a"), 0xF0, 0x9F])
    assert preview.finish_reason == "length"
    assert "".join(delta.text for delta in preview.deltas) == "a\ufffd"
    halfway = open_session(tiny).preview([ord("a"), 0xF0]).next
    assert [delta.text for delta in halfway.finish()] == ["\ufffd"]


# --- ends


def naive_end(tokenizer, tokens, stops, ending, min_tokens, max_tokens, include_stop):
    """The definition, with no state: decode every prefix from the start and look at its end."""

    def complete(count: int) -> str:
        raw = b"".join(tokenizer.piece(t) for t in tokens[:count] if t not in tokenizer.special_ids)
        return codecs.getincrementaldecoder("utf-8")("replace").decode(raw)

    base = len(complete(min_tokens))
    for count in range(1, len(tokens) + 1):
        if count > min_tokens and tokens[count - 1] in ending:
            whole = tokenizer.decode(tokens[: count - 1])
            return count, whole, "stop", tokens[count - 1]
        if count > min_tokens:
            text = complete(count)
            for end in range(base, len(text) + 1):
                found = [s for s in stops if text[base:end].endswith(s)]
                if found:
                    stop = max(found, key=len)
                    return count, text[: end if include_stop else end - len(stop)], "stop", stop
        if count == max_tokens:
            return count, tokenizer.decode(tokens[:count]), "length", None
    return len(tokens), tokenizer.decode(tokens), None, None


STOP_TEXT = st.sampled_from(
    ["a", "ab", "abc", "bc", "ca", "\n\n", "aab", "abab", "🙂", "é", " the", "stop", "ops", "b a b"]
)


@given(data=st.data())
@example(data=None)
def test_stops_against_the_definition_for_every_split(tiny, data):
    if data is None:
        tokens, cuts, stops = [ord("a"), 257, ord("b")], [1, 2], ["bca", "abc"]
        options = {"min_tokens": 0, "max_tokens": 9, "include_stop": False}
        ending: set[int] = set()
    else:
        words = st.sampled_from(
            [*map(ord, "abc \n"), *range(256, 274), 0xC3, 0xA9, tiny.token_id("<|im_start|>")]
        )
        tokens = data.draw(st.lists(words, min_size=1, max_size=14))
        cuts = data.draw(st.lists(st.integers(1, 14), max_size=5))
        stops = data.draw(st.lists(STOP_TEXT, max_size=3))
        ending = data.draw(st.sets(st.sampled_from([ord("c"), 260, 265]), max_size=1))
        max_tokens = data.draw(st.integers(1, 16))
        options = {
            "min_tokens": data.draw(st.integers(0, min(4, max_tokens))),
            "max_tokens": max_tokens,
            "include_stop": data.draw(st.booleans()) and not ending,
        }
    session = open_session(tiny, stop=stops, stop_token_ids=list(ending), **options)
    text, accepted, reason, detail = drive(session, tokens, cuts)
    expected = naive_end(tiny, tokens, stops, ending, **options)
    assert (accepted, text["content"], reason, detail) == expected


def test_text_that_may_become_a_stop_is_held_and_then_given(tiny):
    session = open_session(tiny, stop=["stop!"])
    seen = []
    for word in ("a", "st", "op", "s", "st"):
        preview = session.preview([token(tiny, word)])
        session = preview.next
        seen.append("".join(delta.text for delta in preview.deltas))
    assert seen == ["a", "", "", "stop", "s"]
    assert [delta.text for delta in session.finish()] == ["st"]


def test_held_text_is_part_of_an_answer_that_ends_otherwise(tiny):
    tokens = [ord("a"), ord("s"), ord("t"), 2]
    ended = open_session(tiny, stop="stop", eos_token_ids=frozenset({2})).preview(tokens)
    assert (ended.finish_reason, ended.stop_detail) == ("stop", 2)
    assert "".join(delta.text for delta in ended.deltas) == "ast"
    assert ended.next.finish() == ()  # everything was given


def test_a_stop_inside_a_batch_rejects_what_follows(tiny):
    preview = open_session(tiny, stop=["bc"]).preview([ord("a"), ord("b"), ord("c"), ord("d"), ord("e")])
    assert (preview.accepted, preview.finish_reason, preview.stop_detail) == (3, "stop", "bc")
    assert preview.next.num_tokens == 3


def test_the_session_before_a_preview_is_unchanged(tiny):
    session = open_session(tiny, stop=["stop"]).preview([token(tiny, "st")]).next
    assert session.preview([token(tiny, "op")]).finish_reason == "stop"  # aborted by the caller
    preview = session.preview([ord("x")])
    assert [delta.text for delta in preview.deltas] == ["stx"]


def test_the_earliest_end_wins_and_then_the_longest():
    stops = make_stop_strings(["abcd", "bc", "xbc"])
    assert stops.find("zabcd").stop == "bc"
    assert (stops.find("zxbc").start, stops.find("zxbc").stop) == (1, "xbc")
    assert stops.find("abx") is None
    assert "zab"[: stops.hold_start("zab")] == "z"


@pytest.mark.parametrize("ignoring", [False, True])
def test_end_tokens(tiny, ignoring):
    end = tiny.token_id("<|im_end|>")
    session = open_session(tiny, eos_token_ids=frozenset({end}), ignore_eos=ignoring, max_tokens=4)
    text, accepted, reason, detail = drive(session, [ord("a"), end, ord("b"), ord("c")])
    if ignoring:
        assert (text["content"], accepted, reason, detail) == ("abc", 4, "length", None)
    else:
        assert (text["content"], accepted, reason, detail) == ("a", 2, "stop", end)


def test_ignoring_end_tokens_leaves_the_callers_own_ends(tiny):
    session = open_session(tiny, eos_token_ids=frozenset({2}), stop_token_ids=[3], ignore_eos=True)
    assert session.preview([2, 3]).accepted == 2
    assert session.preview([2, 3]).stop_detail == 3


def test_the_first_tokens_never_end_an_answer(tiny):
    session = open_session(tiny, eos_token_ids=frozenset({2}), stop=["aa"], min_tokens=3)
    text, accepted, reason, _ = drive(session, [ord("a"), ord("a"), 2, ord("a"), 2])
    assert (text["content"], accepted, reason) == ("aa\x02a", 5, "stop")


def test_an_end_on_the_last_allowed_token_is_a_stop(tiny):
    assert (
        open_session(tiny, eos_token_ids=frozenset({2}), max_tokens=2).preview([1, 2]).finish_reason == "stop"
    )
    assert open_session(tiny, max_tokens=2).preview([1, 2]).finish_reason == "length"


def test_the_stop_can_be_kept(tiny):
    end = tiny.token_id("<|im_end|>")
    kept = {"include_stop": True, "eos_token_ids": frozenset({end})}
    assert drive(open_session(tiny, **kept), [ord("a"), end])[0]["content"] == "a<|im_end|>"
    assert drive(open_session(tiny, stop="bc", **kept), list(b"abcd"))[0]["content"] == "abc"


def test_special_tokens_show_when_asked(tiny):
    tokens = [ord("a"), tiny.token_id("<|im_start|>"), tiny.token_id("<tool_call>")]
    assert drive(open_session(tiny), tokens)[0]["content"] == "a<tool_call>"
    shown = open_session(tiny, skip_special_tokens=False)
    assert drive(shown, tokens)[0]["content"] == "a<|im_start|><tool_call>"


def test_an_ended_answer_takes_nothing_more(tiny):
    ended = open_session(tiny, max_tokens=1).preview([1]).next
    with pytest.raises(InvariantError, match="ended with 'length'"):
        ended.preview([1])
    with pytest.raises(InvariantError, match="at least one token"):
        open_session(tiny).preview([])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens": 0}, "max_tokens >= 1"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens=3, max_tokens=2"),
        ({"min_tokens": -1}, "0 <= min_tokens"),
        ({"stop": [""]}, "non-empty strings, got ''"),
        ({"stop": [3]}, "non-empty strings, got 3"),
    ],
)
def test_rules_are_checked(tiny, options, words):
    with pytest.raises(OptionError, match=words):
        open_session(tiny, **options)


# --- channels


def channels_of(text: str, *, thinking: bool = False) -> dict[str, str]:
    return join(split_channels(start_state(thinking), text, final=True)[0])


def start_state(thinking: bool) -> ChannelState:
    return ChannelState(Mode.REASONING_FRESH if thinking else Mode.START)


def join(deltas) -> dict[str, str]:
    out = {"reasoning": "", "content": ""}
    for delta in deltas:
        out[delta.channel] += delta.text
    return out


@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "content"),
    [
        ("plain", False, "", "plain"),
        ("\n plain\n", False, "", "\n plain\n"),
        ("<think>\nwhy\nso\n</think>\n\nthus\n", False, "why\nso", "thus\n"),
        ("why\n</think>\n\nthus", True, "why", "thus"),
        ("\n</think>\n\nthus", True, "", "thus"),
        ("why</think>\n\n  thus", True, "why", "  thus"),  # blanks that are not line ends are the answer's
        ("<think>\nwhy</think>thus", True, "why", "thus"),  # the model opens again what the prompt opened
        ("why \n\n", True, "why \n\n", ""),  # never closed
        ("why </thi", True, "why </thi", ""),
        ("  <think>why</think>", False, "why", ""),
        ("say <think> aloud</think>", False, "", "say <think> aloud</think>"),  # quoted, not meant
        (f"say {THINK_OPEN}why{THINK_CLOSE}\nthus", False, "why", "say thus"),  # tokens are always meant
        (f"{THINK_CLOSE}thus", False, "", "thus"),
        (f"wh{THINK_OPEN}y{THINK_CLOSE}thus", True, "why", "thus"),
        ("<thin air>", False, "", "<thin air>"),
    ],
)
def test_thinking_and_answer(text, thinking, reasoning, content):
    assert channels_of(text, thinking=thinking) == {"reasoning": reasoning, "content": content}


PIECE = st.sampled_from(
    ["a", " ", "\n", "<", "</", "think>", "<think>", "</think>", "</th", "ink>", THINK_OPEN, THINK_CLOSE]
)


@given(pieces=st.lists(PIECE, max_size=10), thinking=st.booleans())
def test_channels_do_not_depend_on_the_pieces(pieces, thinking):
    state, deltas = start_state(thinking), []
    for piece in pieces:
        for character in piece:
            more, state = split_channels(state, character, final=False)
            deltas += more
    more, _ = split_channels(state, "", final=True)
    whole = "".join(pieces)
    expected = split_channels(start_state(thinking), whole, final=True)[0]
    assert join([*deltas, *more]) == join(expected)
    merged = [delta.channel for delta in expected]
    assert merged == [c for n, c in enumerate(merged) if n == 0 or merged[n - 1] != c]  # neighbours differ


def test_markers_as_tokens_and_as_letters(tiny):
    opening, closing = tiny.token_id("<think>"), tiny.token_id("</think>")
    by_token = [opening, *b"\nwhy\n", closing, *b"\n\nthus"]
    by_letter = list(b"<think>\nwhy\n</think>\n\nthus")
    for tokens in (by_token, by_letter):
        for cuts in ([], range(len(tokens))):
            text, *_ = drive(open_session(tiny, splits_channels=True), tokens, cuts)
            assert text == {"reasoning": "why", "content": "thus"}
    quoted = list(b"say <think> aloud")
    assert drive(open_session(tiny, splits_channels=True), quoted)[0]["content"] == "say <think> aloud"


def test_a_prompt_that_opened_the_block(tiny):
    tokens = [*b"why\n", tiny.token_id("</think>"), *b"\n\nthus"]
    for cuts in ([], range(len(tokens))):
        text, *_ = drive(open_session(tiny, splits_channels=True, thinking=True), tokens, cuts)
        assert text == {"reasoning": "why", "content": "thus"}


def test_raw_answers_keep_their_markers(tiny):
    tokens = [tiny.token_id("<think>"), *b"why", tiny.token_id("</think>"), *b"thus"]
    assert drive(open_session(tiny), tokens)[0] == {"reasoning": "", "content": "<think>why</think>thus"}


@pytest.mark.parametrize("letters", [False, True])
def test_a_stop_may_name_a_marker(tiny, letters):
    closing = list(b"</think>") if letters else [tiny.token_id("</think>")]
    session = open_session(tiny, splits_channels=True, thinking=True, stop=["</think>"])
    text, _, reason, detail = drive(session, [*b"why", *closing, *b"thus"], range(20))
    assert (text, reason, detail) == ({"reasoning": "why", "content": ""}, "stop", "</think>")


def test_stops_work_inside_thinking(tiny):
    session = open_session(tiny, splits_channels=True, thinking=True, stop=["stop"])
    text, *_ = drive(session, [*b"why ", token(tiny, "st"), token(tiny, "op"), ord("x")], range(9))
    assert text == {"reasoning": "why ", "content": ""}


# --- the short way


@given(data=st.data())
def test_a_plain_tokens_preview_is_the_general_one(tiny, data):
    """Whole answers, so that every token meets half characters, markers, thinking, blanks and the limit."""
    words = [*map(ord, "ab<> \n/"), *range(256, 274), 0xC3, 0xA9]
    words += [token(tiny, "a "), *(tiny.token_id(text) for text in ("<think>", "</think>", "<|im_end|>"))]
    session = open_session(
        data.draw(st.sampled_from([tiny, None])),
        thinking=data.draw(st.booleans()),
        splits_channels=data.draw(st.booleans()),
        skip_special_tokens=data.draw(st.booleans()),
        stop_token_ids=data.draw(st.sampled_from([[], [ord("b")]])),
        min_tokens=data.draw(st.integers(0, 3)),
        max_tokens=data.draw(st.integers(4, 20)),
    )
    while session.finish_reason is None:
        drawn = data.draw(st.sampled_from(words))
        plain, general = session._preview_plain(drawn), session._preview_any([drawn])
        assert plain in (None, general)
        assert session.preview([drawn]) == general
        session = general.next


def test_the_short_way_is_the_usual_one(tiny):
    session = open_session(tiny, splits_channels=True)
    for drawn in b"plain words, and blanks\n":
        preview = session._preview_plain(drawn)
        assert preview is not None
        session = preview.next
    eventful = [0xC3, tiny.token_id("<|im_end|>"), tiny.token_id("</think>")]
    assert [session._preview_plain(drawn) for drawn in eventful] == [None] * 3
    assert open_session(tiny, stop="x")._preview_plain(ord("a")) is None


# --- where the answer can be rebuilt (C-8)


def canonical(session: OutputSession, tokens) -> list[int | None]:
    """The canonical frontier after each token."""
    values = []
    for token in tokens:
        session = session.preview([token]).next
        values.append(session.canonical_tokens)
    return values


def test_the_canonical_frontier_is_after_the_last_visible_character(tiny):
    end = tiny.token_id("<|im_end|>")
    session = open_session(tiny, eos_token_ids=frozenset({end}))
    assert session.canonical_tokens == 0
    assert canonical(session, [ord("a"), token(tiny, " the"), ord("\n"), ord(" "), end]) == [1, 2, 2, 2, 2]


def test_no_token_border_no_canonical_frontier(tiny):
    assert canonical(open_session(tiny), [ord("a"), 0xC3, 0xA9]) == [1, None, 3]  # inside a character
    mixed = token(tiny, "a ")
    assert canonical(open_session(tiny), [mixed, ord(" "), ord("c")]) == [None, None, 3]
    hidden = [ord("a"), tiny.token_id("<|im_start|>"), ord("b")]  # the text no longer rebuilds the tokens
    assert canonical(open_session(tiny), hidden) == [1, None, None]


def test_a_cut_stop_keeps_a_border_only_where_it_began_one(tiny):
    stop = token(tiny, "stop")
    assert canonical(open_session(tiny, stop="stop"), [ord("a"), stop]) == [1, 1]
    assert (
        canonical(open_session(tiny, stop="stop"), [ord("a"), token(tiny, "st"), token(tiny, "op")])[-1]
        is None
    )
    assert canonical(open_session(tiny, stop="op"), [ord("a"), stop]) == [1, None]
