"""The model against transformers on the small checkpoints of `tests/data/reference`, and against itself."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ninfer_jax.model import load_model, logits_from_tail
from ninfer_jax.model.transformer import sequence_hidden, sequence_logits

# float32 against float32: the reference's own paths differ by up to 5e-5 (spec/qwen3_5_facts 10); tied logits
# are several times as large, hence 5e-4 there.
LOGITS_ATOL = {"dense": 2e-4, "moe": 2e-4, "tied": 5e-4}
HIDDEN_ATOL = 1e-4
STATE_ATOL = 5e-5
# Our own paths against each other: the same arithmetic in another order.
SELF_ATOL = 1e-4
KINDS = ("dense", "moe", "tied")
# Tying changes only the head, which the logits test covers; every further program costs seconds to compile.
UNTIED = ("dense", "moe")


@pytest.fixture(scope="module")
def arrays(reference_dir):
    return {kind: dict(np.load(reference_dir / kind / "reference.npz")) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(kind, small_model, arrays):
    expected = arrays[kind]
    got = small_model(kind).logits(expected["input_ids"])
    np.testing.assert_allclose(got, expected["logits"], rtol=0, atol=LOGITS_ATOL[kind])
    assert np.abs(got - expected["logits"]).mean() < 2e-5


@pytest.mark.parametrize("kind", UNTIED)
def test_every_layer_equals_transformers(kind, small_model, arrays):
    model, expected = small_model(kind), arrays[kind]

    @jax.jit
    def layers(leaves, tokens):
        seen = []
        sequence_hidden(model.module(leaves), tokens, observe=seen.append)
        return jnp.stack(seen)

    got = layers(model.leaves, expected["input_ids"])
    np.testing.assert_allclose(got, expected["hidden"], rtol=0, atol=HIDDEN_ATOL)


@pytest.mark.parametrize("kind", UNTIED)
def test_states_and_greedy_continuation_equal_transformers(kind, small_model, make_server, arrays):
    expected = arrays[kind]
    server = make_server(small_model(kind))
    prompt = expected["input_ids"].tolist()
    logits = server.prefill(prompt)
    recurrent = np.stack([np.array(pool[0]) for pool in server.cache.recurrent])
    conv = np.stack([np.array(pool[0]) for pool in server.cache.conv])
    np.testing.assert_allclose(recurrent, expected["recurrent"], rtol=0, atol=STATE_ATOL)
    np.testing.assert_allclose(conv, expected["conv"], rtol=0, atol=STATE_ATOL)

    tokens = [int(logits.argmax())]
    while len(tokens) < len(expected["greedy"]):
        length = len(prompt) + len(tokens)
        logits = server.decode(tokens[-1:], [length], pages=[(0, 1, 2)], read=[0], write=[0])[0]
        tokens.append(int(logits.argmax()))
    assert tokens == expected["greedy"].tolist()


@pytest.mark.parametrize("kind", UNTIED)
def test_bfloat16_agrees_by_mean_error_and_top_choice(kind, reference_dir, arrays):
    """bfloat16 moves single logits by whole steps, so the maximum says nothing (spec/qwen3_5_facts 10)."""
    expected = arrays[kind]["logits"]
    got = load_model(reference_dir / kind, dtype="bfloat16").logits(arrays[kind]["input_ids"])
    # transformers itself reaches 1.5 % dense and 4 % MoE, where one flipped expert moves a whole token.
    share, top = {"dense": (0.03, 0.9), "moe": (0.06, 0.85)}[kind]
    assert np.abs(got - expected).mean() < share * expected.std()
    assert (got.argmax(-1) == expected.argmax(-1)).mean() >= top


TOKENS = np.random.default_rng(7).integers(0, 96, 130)


@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 130])
def test_any_split_between_prefill_and_decode_gives_the_same_logits_and_state(length, dense_server):
    tokens = TOKENS[:length]
    expected = dense_server.model.logits(TOKENS)[length - 1]
    whole = [min(length, 128), *([length - 128] if length > 128 else [])]
    dense_server.run(tokens, whole, slot=0)
    for split in ([], [length // 2], [1], [max(1, length - 2), 1], [3, 61, 1], [64]):
        if sum(split) > length:
            continue
        got = dense_server.run(tokens, split, pages=(5, 3, 4), slot=1)
        np.testing.assert_allclose(got, expected, rtol=0, atol=SELF_ATOL, err_msg=f"split {split}")
        for pool in (*dense_server.cache.recurrent, *dense_server.cache.conv):
            np.testing.assert_allclose(pool[1], pool[0], rtol=0, atol=STATE_ATOL, err_msg=f"split {split}")


def test_padding_changes_no_bit(dense_server):
    results = []
    for filler in (0, 95):
        logits = dense_server.prefill(TOKENS[:67], filler=filler, write=2)
        states = [np.array(pool[2]) for pool in (*dense_server.cache.recurrent, *dense_server.cache.conv)]
        pages = [np.array(pool[:3]) for pool in (*dense_server.cache.k_pages, *dense_server.cache.v_pages)]
        results.append([logits, *states, *pages])
    for first, second in zip(*results, strict=True):
        np.testing.assert_array_equal(first, second)


def test_a_step_forks_its_source_and_touches_only_what_it_names(dense_server):
    dense_server.prefill(TOKENS[:70], pages=(0, 1, 2), write=0)
    source = [np.array(pool[0]) for pool in (*dense_server.cache.recurrent, *dense_server.cache.conv)]
    page = np.array(dense_server.cache.k_pages[0][0])
    forked = dense_server.decode([5], [71], pages=[(0, 1, 2)], read=[0], write=[3])[0]
    kept = [np.array(pool[0]) for pool in (*dense_server.cache.recurrent, *dense_server.cache.conv)]
    for before, after in zip(source, kept, strict=True):
        np.testing.assert_array_equal(before, after)
    np.testing.assert_array_equal(page, dense_server.cache.k_pages[0][0])
    in_place = dense_server.decode([5], [71], pages=[(0, 1, 2)], read=[0], write=[0])[0]
    np.testing.assert_array_equal(forked, in_place)
    for pool in dense_server.cache.recurrent:
        np.testing.assert_array_equal(pool[0], pool[3])


def test_rows_of_a_batch_equal_their_solo_runs(dense_server):
    lengths = (1, 64, 70)
    tables = [(0, 1, 1), (2, 3, 3), (5, 4, 4)]
    expected = []
    for row, (length, pages) in enumerate(zip(lengths, tables, strict=True)):
        if length > 1:
            dense_server.prefill(TOKENS[: length - 1], pages=pages, write=row)
        read = row if length > 1 else dense_server.num_slots
        logits = dense_server.decode([TOKENS[length - 1]], [length], pages=[pages], read=[read], write=[3])
        expected.append(logits[0])
    got = dense_server.decode(
        [TOKENS[length - 1] for length in lengths], lengths, pages=tables, read=[4, 1, 2], write=[0, 1, 2]
    )
    # One row runs matrix-vector products, three run matrix products: rounding differs, nothing else may.
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)


def test_tail_gives_the_logits_of_the_last_token_without_running_one(dense_server):
    logits = dense_server.prefill(TOKENS[:33], write=1)
    model = dense_server.model
    got = jax.jit(lambda leaves, cache, slots: logits_from_tail(model.module(leaves), cache, slots))(
        model.leaves, dense_server.cache, jnp.array([1], jnp.int32)
    )
    np.testing.assert_array_equal(got[0], logits)


def test_training_path_equals_serving_path_and_has_gradients(small_model):
    model = small_model("tied")
    tokens = jnp.asarray(TOKENS[:66].reshape(2, 33), jnp.int32)

    @jax.jit
    def loss_and_grad(leaves):
        def loss(leaves):
            logits = sequence_logits(model.module(leaves), tokens)
            return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[..., 0]), logits

        return jax.value_and_grad(loss, has_aux=True)(leaves)

    (_, logits), gradients = loss_and_grad(model.leaves)
    for row in range(2):
        served = model.logits(np.pad(tokens[row], (0, 37)))[:33]  # padded to a length that is compiled anyway
        np.testing.assert_allclose(logits[row], served, rtol=0, atol=SELF_ATOL)
    for gradient in gradients:
        assert np.isfinite(gradient).all()
        assert np.abs(gradient).max() > 0


def test_different_position_rows_reach_the_logits(dense_server):
    """Text cannot tell the M-RoPE rows apart; unequal rows must."""
    text = dense_server.chunk(TOKENS[:40], 0, pages=(0, 1, 2), read=4, write=0)
    moved = dataclasses.replace(text, positions=text.positions.at[1].multiply(2))
    results = []
    for chunk in (text, moved):
        logits, dense_server.cache = dense_server.prefill_fn(
            dense_server.model.leaves, dense_server.cache, chunk
        )
        results.append(np.array(logits))
    assert np.abs(results[0] - results[1]).max() > 1e-3
