"""Writes tests/data/demo/held_out.json: held-out texts and what the embedded checkpoint makes of them.

    python tools/demo_excerpt.py --corpora ../shared/workloads/corpora

Owns the expectations of tests/test_demo_assets.py, and nothing of the training: run it again after a new
checkpoint was written.
"""

import argparse
import json
import random
from pathlib import Path

import demo_corpus
import demo_packing
import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from ninfer_jax.model import load_model
from ninfer_jax.model.transformer import sequence_logits

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "ninfer_jax" / "assets" / "demo"
MAX_CHARS = 900
GREEDY_PROMPT = "Tell me a story about a king."
GREEDY_TOKENS = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corpora", type=Path, default=ROOT.parent / "shared" / "workloads" / "corpora")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "data" / "demo" / "held_out.json")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
    render = demo_corpus.make_renderer((ASSETS / "chat_template.jinja").read_text())
    model = load_model(ASSETS, dtype="float32")
    logits = jax.jit(lambda leaves, tokens: sequence_logits(model.module(leaves), tokens))
    _, held_out = demo_corpus.read_corpora(options.corpora)
    rng = random.Random(11)
    samples = []
    for source, corpus in held_out.items():
        talks = map(render, demo_corpus.conversations(corpus, rng))
        text = next(text for text in talks if MAX_CHARS // 3 < len(text) < MAX_CHARS)
        piece = demo_packing.tokenize(text, tokenizer)
        padded = np.zeros((1, 512), np.int32)
        padded[0, : len(piece.tokens)] = piece.tokens
        log_probs = jax.nn.log_softmax(logits(model.leaves, padded)[0])
        counted = np.flatnonzero(piece.weights == 1.0)
        losses = [-float(log_probs[at - 1, piece.tokens[at]]) for at in counted]
        nats = float(np.mean(losses))
        samples.append(
            {"source": source, "text": text, "num_answer_tokens": len(losses), "nats_per_token": nats}
        )
    prompt = f"<|im_start|>user\n{GREEDY_PROMPT}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    tokens = tokenizer.encode(prompt).ids
    start = len(tokens)
    for _ in range(GREEDY_TOKENS):
        padded = np.zeros((1, 512), np.int32)
        padded[0, : len(tokens)] = tokens
        tokens.append(int(jnp.argmax(logits(model.leaves, padded)[0, len(tokens) - 1])))
    greedy = {
        "question": GREEDY_PROMPT,
        "answer_tokens": tokens[start:],
        "answer": tokenizer.decode(tokens[start:]),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(
        json.dumps({"samples": samples, "greedy": greedy}, indent=1, ensure_ascii=False) + "\n"
    )


if __name__ == "__main__":
    main()
