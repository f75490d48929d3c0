"""Digests: equal prefixes have equal keys, growing mixes only what is new, all of the identity counts."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from ninfer_jax.digests import extend_digests, make_digests
from ninfer_jax.identity import (
    MediaSpan,
    TokenType,
    common_frontier,
    cuts_media,
    equal_up_to,
    extend_identity,
    make_identity,
)

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=12)
identities = st.builds(
    lambda ids, cuts: make_identity(ids, rewrite_execution_frontiers=cuts),
    tokens,
    st.lists(st.integers(1, 11), max_size=2),
)


@given(identities, identities)
def test_keys_agree_exactly_where_the_prompts_do(left, right):  # 64-bit lanes: a chance match will not happen
    a, b = make_digests(left), make_digests(right)
    for f in range(min(left.num_tokens, right.num_tokens) + 1):
        assert (a.key(f) == b.key(f)) == equal_up_to(left, right, f)
    assert a.key(common_frontier(left, right)) == b.key(common_frontier(left, right))


@given(identities, st.lists(tokens, max_size=3))
def test_extending_is_the_same_as_starting_over(identity, answers):
    grown, digests = identity, make_digests(identity)
    for answer in answers:
        grown, digests = extend_identity(grown, answer), extend_digests(digests, answer)
    fresh = make_digests(grown)
    assert digests.num_tokens == grown.num_tokens
    for f in range(grown.num_tokens + 1):
        assert digests.key(f) == fresh.key(f)


def test_every_part_of_the_identity_changes_the_key():
    base = make_identity(range(20), rewrite_execution_frontiers=[8])
    types, positions = base.token_types.copy(), base.positions.copy()
    types[5] = TokenType.IMAGE
    positions[2, 5] += 1
    span = MediaSpan(3, 6, TokenType.IMAGE, b"one")
    others = [
        replace(base, token_types=types),
        replace(base, positions=positions),
        replace(base, mode="other"),
        replace(base, media=(span,)),
        replace(base, media=(replace(span, digest=b"two"),)),
        replace(base, media=(replace(span, token_type=TokenType.VIDEO),)),
        replace(base, rewrite_execution_frontiers=(7,)),
        replace(base, rewrite_execution_frontiers=()),
    ]
    keys = [make_digests(x).key(20) for x in [base, *others]]
    assert len(set(keys)) == len(keys)
    assert len({k.lane0 for k in keys if k.mode == base.mode}) == len(keys) - 1  # either lane is enough
    assert len({k.lane1 for k in keys if k.mode == base.mode}) == len(keys) - 1


def test_a_rewrite_frontier_and_a_span_count_from_their_end_on():
    plain = make_digests(make_identity(range(20)))
    split = make_digests(make_identity(range(20), rewrite_execution_frontiers=[8]))
    assert plain.key(7) == split.key(7) and plain.key(8) != split.key(8)
    shown = replace(make_identity(range(20)), media=(MediaSpan(3, 6, TokenType.IMAGE, b"x"),))
    assert cuts_media(shown, 5)
    assert make_digests(shown).key(3) == plain.key(3) and make_digests(shown).key(6) != plain.key(6)


def test_lane0_is_never_0_and_the_frontier_is_checked():
    digests = make_digests(make_identity(range(5)))
    assert all(digests.key(f).lane0 for f in range(6))
    for wrong in (-1, 6):
        with pytest.raises(ValueError, match="outside of this prompt of 5 tokens"):
            digests.key(wrong)


def test_sums_can_be_forced_equal_for_the_collision_tests():  # ID-04
    a, b = (make_digests(make_identity(ids)) for ids in ([1, 2, 3], [4, 5, 6]))
    same = [replace(d, sums=np.zeros_like(d.sums)) for d in (a, b)]
    assert a.key(3) != b.key(3) and same[0].key(3) == same[1].key(3)


def test_a_long_prompt_is_digested_at_once_and_without_collisions():
    rng = np.random.default_rng(0)
    digests = make_digests(make_identity(rng.integers(0, 50_000, 20_000)))
    assert len({digests.key(f) for f in range(0, 20_001, 7)}) == len(range(0, 20_001, 7))
