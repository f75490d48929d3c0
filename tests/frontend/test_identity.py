"""Exact identity: what must be equal for two prompts to be the same prompt up to a frontier."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer_jax.identity import (
    MediaSpan,
    PromptIdentity,
    TokenType,
    common_frontier,
    cuts_media,
    equal_up_to,
    extend_identity,
    make_identity,
)


def test_a_text_prompt_counts_its_positions_on_every_axis():
    identity = make_identity([5, 6, 7], rewrite_execution_frontiers=[2, 1, 2, 0, 3])
    assert identity.num_tokens == 3
    assert identity.positions.tolist() == [[0, 1, 2]] * 3
    assert (identity.tokens.dtype, identity.token_types.dtype) == (np.int32, np.int8)
    assert identity.rewrite_execution_frontiers == (1, 2)  # 0 and the end split nothing


def test_arrays_are_read_only_and_the_callers_stay_writable():
    tokens = np.array([1, 2, 3], np.int32)
    identity = extend_identity(make_identity(tokens), [4])
    tokens[0] = 9
    assert identity.tokens.tolist() == [1, 2, 3, 4]
    for array in (identity.tokens, identity.token_types, identity.positions):
        with pytest.raises(ValueError, match="read-only"):
            array[..., 0] = 1


def changed(identity: PromptIdentity, **arrays) -> PromptIdentity:
    return dataclasses.replace(identity, **arrays)


def edited(array: np.ndarray, place, value) -> np.ndarray:
    copy = array.copy()
    copy[place] = value
    return copy


LONG = make_identity(range(200), rewrite_execution_frontiers=[64, 180])
IMAGE = MediaSpan(40, 60, TokenType.IMAGE, b"one")


@pytest.mark.parametrize(
    ("other", "deepest"),
    [
        (LONG, 200),
        (changed(LONG, tokens=edited(LONG.tokens, 150, 7)), 150),
        (changed(LONG, token_types=edited(LONG.token_types, 150, TokenType.IMAGE)), 150),  # ID-01
        (changed(LONG, positions=edited(LONG.positions, (2, 150), 7)), 150),  # ID-01
        (changed(LONG, rewrite_execution_frontiers=(64,)), 179),  # C-7: 180 is part of everything from 180 on
        (changed(LONG, rewrite_execution_frontiers=(64, 100, 180)), 99),
        (changed(LONG, mode="other"), 0),
        (make_identity(range(100), rewrite_execution_frontiers=[64]), 100),
    ],
)
def test_equality_reaches_exactly_as_deep_as_the_first_difference(other, deepest):
    assert common_frontier(LONG, other) == common_frontier(other, LONG) == deepest
    assert equal_up_to(LONG, other, deepest) or deepest == 0
    assert not equal_up_to(LONG, other, deepest + 1)


def test_media_count_as_whole_items():
    # ID-02, ID-11
    left = changed(LONG, media=(IMAGE,))
    right = changed(LONG, media=(dataclasses.replace(IMAGE, digest=b"two"),))
    assert common_frontier(left, right) == 40
    assert equal_up_to(left, right, 40)
    assert not any(equal_up_to(left, right, at) for at in (41, 59, 60, 100))
    assert not equal_up_to(left, left, 50) and cuts_media(left, 50)
    assert equal_up_to(left, left, 60) and not cuts_media(left, 60)


def test_an_item_that_one_prompt_ends_in_is_not_shared():
    short = changed(make_identity(range(50)), media=(IMAGE,))
    long = changed(make_identity(range(200)), media=(IMAGE,))
    assert common_frontier(short, long) == 40


def test_what_comes_after_a_frontier_does_not_matter():
    # A later image changes the delta of the whole prompt, but not that of the text before it.
    later = changed(LONG, rope_delta=-5)
    assert equal_up_to(LONG, later, 100)


def test_an_answer_continues_the_positions():
    prompt = changed(make_identity([1, 2, 3]), rope_delta=-1)
    longer = extend_identity(prompt, [8, 9])
    assert longer.tokens.tolist() == [1, 2, 3, 8, 9]
    assert longer.positions.tolist() == [[0, 1, 2, 2, 3]] * 3
    assert longer.token_types.tolist() == [0] * 5
    assert equal_up_to(prompt, longer, 3)


def test_frontiers_outside_a_prompt_are_never_equal():
    assert not equal_up_to(LONG, LONG, 201)
    assert not equal_up_to(LONG, LONG, -1)
    assert equal_up_to(LONG, LONG, 0)


@given(data=st.data())
def test_the_deepest_frontier_is_the_deepest_that_is_equal(data):
    def draw() -> PromptIdentity:
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=8))
        frontiers = data.draw(st.lists(st.integers(1, 8), max_size=2))
        spans = data.draw(
            st.sampled_from(
                [(), (MediaSpan(1, 3, TokenType.IMAGE, b"a"),), (MediaSpan(4, 6, TokenType.IMAGE, b"b"),)]
            )
        )
        return changed(make_identity(tokens, rewrite_execution_frontiers=frontiers), media=spans)

    left, right = draw(), draw()
    deepest = max(at for at in range(9) if equal_up_to(left, right, at))
    assert common_frontier(left, right) == deepest
