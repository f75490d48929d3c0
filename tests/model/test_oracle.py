"""The model against the shared transformers oracle: prompts, layers, states, greedy tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ninfer_jax.model import load_model
from ninfer_jax.model.transformer import sequence_hidden

# The figures recommended in spec/qwen3_5_facts 10 for a float32 implementation; tied logits are larger.
ATOL = {"logits": 2e-4, "tied": 5e-4, "hidden": 1e-4, "state": 5e-5, "key": 1e-4}
PROMPTS = (1, 7, 63, 64, 65, 130, 300)
FAST = ("dense-tiny-s0-f32", "dense-tiny-s0-bf16", "moe-tiny-s0-f32")
SLOW = ("dense-tiny-s0-f32-tied", "moe-tiny-s0-f32-perexpert", "vlm-tiny-s0-f32")
CHECKPOINTS = (*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW))


@pytest.fixture(scope="module")
def oracle(shared_dir):
    loaded = {}

    def get(name):
        if name not in loaded:
            folder = shared_dir / "oracle" / "reference" / name
            if not folder.is_dir():
                pytest.skip(f"needs {folder}")
            model = load_model(folder / "checkpoint", dtype="float32")
            loaded[name] = model, dict(np.load(folder / "reference.npz"))
        return loaded[name]

    return get


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_of_every_prompt(name, oracle):
    model, arrays = oracle(name)
    tolerance = ATOL["tied" if "tied" in name else "logits"]
    longest = np.zeros(320, np.int32)  # one compiled length for all prompts: padding lies after them
    for length in PROMPTS:
        tokens = longest.copy()
        tokens[:length] = arrays[f"p{length:03}/input_ids"]
        got = model.logits(tokens)[:length]
        expected = arrays[f"p{length:03}/logits"]
        np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance, err_msg=f"prompt {length}")
        assert np.abs(got - expected).mean() <= (2e-5 if "tied" in name else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", (*FAST, *SLOW))
def test_every_layer(name, oracle):
    model, arrays = oracle(name)
    tokens = arrays[f"p{int(arrays['layers/prompt_len']):03}/input_ids"]

    @jax.jit
    def layers(leaves, tokens):
        seen = []
        final = sequence_hidden(model.module(leaves), tokens, observe=seen.append)
        return jnp.stack(seen), final

    hidden, final = layers(model.leaves, tokens)
    np.testing.assert_allclose(hidden, arrays["layers/hidden"], rtol=0, atol=ATOL["hidden"])
    np.testing.assert_allclose(final, arrays["layers/final_norm"], rtol=0, atol=ATOL["hidden"])


@pytest.mark.slow
@pytest.mark.parametrize("name", (*FAST, *SLOW))
def test_states_keys_and_greedy_tokens(name, oracle, make_server):
    model, arrays = oracle(name)
    server = make_server(model)
    tokens = arrays["p130/input_ids"]
    for prefix in (2, 64, 65):
        server.prefill(tokens[:prefix])
        state = f"state/n{prefix:03}"
        recurrent = np.stack([np.array(pool[0]) for pool in server.cache.recurrent])
        conv = np.stack([np.array(pool[0]) for pool in server.cache.conv])
        np.testing.assert_allclose(recurrent, arrays[f"{state}/recurrent"], rtol=0, atol=ATOL["state"])
        np.testing.assert_allclose(conv, arrays[f"{state}/conv"][..., 1:], rtol=0, atol=ATOL["state"])
        for pools, kind in ((server.cache.k_pages, "key"), (server.cache.v_pages, "value")):
            rows = np.stack(
                [np.concatenate([np.array(pool[0]), np.array(pool[1])], axis=1) for pool in pools]
            )
            expected = arrays[f"{state}/{kind}"]
            np.testing.assert_allclose(rows[:, :, :prefix], expected, rtol=0, atol=ATOL["key"])
    for length in (1, 65):
        prompt = arrays[f"p{length:03}/input_ids"]
        logits = server.prefill(prompt)
        expected = arrays[f"p{length:03}/greedy"].tolist()
        produced = [int(logits.argmax())]
        while len(produced) < len(expected):
            now = length + len(produced)
            logits = server.decode(produced[-1:], [now], pages=[(0, 1, 2)], read=[0], write=[0])[0]
            produced.append(int(logits.argmax()))
        assert produced == expected
