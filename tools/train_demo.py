"""Trains the embedded demo model from the corpora and writes `ninfer_jax/assets/demo`.

    python tools/train_demo.py --corpora ../shared/workloads/corpora --out ninfer_jax/assets/demo

Owns the run: steps, held-out loss, saved state, log, export. The data are in demo_corpus and demo_packing,
the optimizer in demo_optimizer, the files in demo_checkpoint and demo_tokenizer; the forward pass is the
product's own. A run that was interrupted continues from `--work-dir`. The steps and figures of the model in
the package are in ninfer_jax/assets/demo/README.md.
"""

import argparse
import dataclasses
import json
import os
import pickle
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import demo_checkpoint
import demo_corpus
import demo_packing
import demo_tokenizer
import jax
import jax.numpy as jnp
import numpy as np
import optax
from demo_optimizer import make_optimizer, rate_at
from tokenizers import Tokenizer

from ninfer_jax.model.config import Qwen35Config
from ninfer_jax.model.loader import export_tensors, module_from_parameters
from ninfer_jax.model.transformer import Qwen35, sequence_logits
from ninfer_jax.model.weights import CheckpointStyle, build_parameter, recipes

Params = dict[str, jax.Array]  # dotted module path -> parameter
ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = ROOT / "ninfer_jax" / "assets" / "demo" / "chat_template.jinja"
TEXT_STYLE = CheckpointStyle(prefix="model.", fused_experts=True)
HELD_OUT_SEED = 7


@dataclasses.dataclass(frozen=True)
class RunSize:
    """What decides how long a run takes."""

    num_steps: int = 430
    decay_steps: int = 180
    rows: int = 4
    row_tokens: int = 512
    checkpoint_steps: int = 25
    held_out_steps: int = 100
    held_out_texts: int | None = 4  # of each source during the run; all of them at the end


@dataclasses.dataclass(frozen=True)
class HeldOutLoss:
    """The loss on answers that the training never saw."""

    nats_per_token: float
    bits_per_byte: float
    num_tokens: int


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """Everything that stays fixed during a run."""

    train: Mapping[str, demo_corpus.Corpus]
    held_out: Mapping[str, Sequence[demo_packing.TokenText]]
    render: Callable[[demo_corpus.Conversation], str]
    tokenizer: Tokenizer
    raw_config: dict
    config: Qwen35Config


def make_setting(
    corpora: Path, template: str, geometry: Mapping | None = None, vocab_size: int = 1024
) -> Setting:
    """Returns the data, tokenizer and geometry of a run.

    Args:
        corpora: folder of the six corpus files.
        template: text of the chat template.
        geometry: config.json fields that replace the demo's own (smoke runs).
        vocab_size: symbols of the tokenizer.
    """
    train, held_out = demo_corpus.read_corpora(corpora)
    render = demo_corpus.make_renderer(template)
    tokenizer = demo_tokenizer.train_tokenizer(_tokenizer_texts(train, render), vocab_size)
    rng = random.Random(HELD_OUT_SEED)
    held_out_texts = {
        source: [
            demo_packing.tokenize(render(talk), tokenizer)
            for talk in demo_corpus.conversations(held_out[source], rng)
        ]
        for source in demo_corpus.SOURCES
    }
    end_of_text_id = tokenizer.token_to_id(demo_tokenizer.END_OF_TEXT)
    raw_config = demo_checkpoint.demo_config(vocab_size, end_of_text_id) | dict(geometry or {})
    config = Qwen35Config.from_hf(raw_config)
    return Setting(train, held_out_texts, render, tokenizer, raw_config, config)


def _tokenizer_texts(
    train: Mapping[str, demo_corpus.Corpus], render: Callable[[demo_corpus.Conversation], str]
) -> list[str]:
    rng = random.Random(0)
    texts = []
    for source in demo_corpus.SOURCES:
        for talk in demo_corpus.conversations(train[source], rng):
            text = render(talk)
            for token in demo_tokenizer.CONTROL_TOKENS + demo_tokenizer.MARKUP_TOKENS:
                text = text.replace(token, "\0")
            texts += text.split("\0")
    return texts


def params_from_tensors(setting: Setting, tensors: Mapping[str, np.ndarray]) -> Params:
    """Returns the module's parameters from Hugging Face tensors, float32."""
    return {
        recipe.path: jnp.array(build_parameter(recipe, tensors.__getitem__, np.dtype(np.float32)))
        for recipe in recipes(setting.config, TEXT_STYLE)
    }


def tensors_from_params(setting: Setting, params: Params) -> dict[str, np.ndarray]:
    """Returns Hugging Face tensors from the module's parameters, float32."""
    return export_tensors(module_of(setting.config, params), TEXT_STYLE)


def module_of(config: Qwen35Config, params: Params) -> Qwen35:
    """Returns the model with the given parameters; traceable."""
    return module_from_parameters(config, jnp.dtype(jnp.float32), lambda path, _: params[path])


def make_step(config: Qwen35Config, optimizer: optax.GradientTransformation):
    """Returns the jitted training step.

    It maps (params, state, tokens, targets, weights, rate) to (params, state, loss).

    Params and state are donated.
    """

    def step(params, state, tokens, targets, weights, rate):
        def loss_of(params):
            losses = _token_losses(config, params, tokens, targets)
            return jnp.sum(losses * weights) / jnp.sum(weights)

        loss, gradient = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(gradient, state, params)
        params = {path: value + rate * updates[path] for path, value in params.items()}
        return params, state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def make_summed_loss(config: Qwen35Config):
    """Returns the jitted (params, tokens, targets, weights) -> weighted sum of token losses in nats."""
    return jax.jit(
        lambda params, tokens, targets, weights: jnp.sum(
            _token_losses(config, params, tokens, targets) * weights
        )
    )


def _token_losses(config: Qwen35Config, params: Params, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    logits = sequence_logits(module_of(config, params), tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def held_out_loss(
    setting: Setting, params: Params, summed_loss, size: RunSize, limit: int | None
) -> dict[str, HeldOutLoss]:
    """Returns the loss on the answers of each source's held-out texts.

    Args:
        setting: has the texts.
        params: the weights.
        summed_loss: from `make_summed_loss`.
        size: gives the batch shape; texts are cut at a row.
        limit: at most so many texts of each source; None means all.
    """
    sizes = demo_packing.token_bytes(setting.tokenizer)
    results = {}
    for source, texts in setting.held_out.items():
        nats = num_tokens = num_bytes = 0.0
        for batch in demo_packing.held_out_rows(texts[:limit], size.rows, size.row_tokens):
            nats += float(summed_loss(params, batch.tokens, batch.targets, batch.weights))
            num_tokens += float(batch.weights.sum())
            num_bytes += float((sizes[batch.targets] * batch.weights).sum())
        results[source] = HeldOutLoss(nats / num_tokens, nats / np.log(2) / num_bytes, int(num_tokens))
    return results


def train(setting: Setting, size: RunSize, work_dir: Path, seed: int, log: Callable[[dict], None]) -> Params:
    """Returns the trained parameters, after continuing whatever run `work_dir` holds.

    Args:
        setting: data and geometry.
        size: steps and batch.
        work_dir: holds state.pickle, replaced every `checkpoint_steps`.
        seed: of weights and data order.
        log: receives one record a step.
    """
    optimizer = make_optimizer()
    stream = demo_packing.TokenStream(seed)
    params = params_from_tensors(setting, demo_checkpoint.first_tensors(setting.raw_config, seed))
    state = optimizer.init(params)
    start = 0
    saved_path = work_dir / "state.pickle"
    if saved_path.is_file():
        start, stream, params, leaves = pickle.loads(saved_path.read_bytes())
        params = {path: jnp.asarray(value) for path, value in params.items()}
        state = jax.tree.unflatten(jax.tree.structure(state), [jnp.asarray(leaf) for leaf in leaves])
        log({"event": "resume", "step": start})
    step_fn, summed_loss = make_step(setting.config, optimizer), make_summed_loss(setting.config)
    began_s = time.monotonic()
    for step in range(start, size.num_steps):
        batch = stream.next_batch(
            setting.train, setting.render, setting.tokenizer, size.rows, size.row_tokens
        )
        rate = rate_at(step, size.num_steps, size.decay_steps)
        params, state, loss = step_fn(
            params, state, batch.tokens, batch.targets, batch.weights, jnp.float32(rate)
        )
        record = {
            "step": step + 1,
            "loss": float(loss),
            "rate": rate,
            "elapsed_s": time.monotonic() - began_s,
        }
        if (step + 1) % size.held_out_steps == 0:
            record["held_out"] = {
                source: loss.nats_per_token
                for source, loss in held_out_loss(
                    setting, params, summed_loss, size, size.held_out_texts
                ).items()
            }
        log(record)
        if (step + 1) % size.checkpoint_steps == 0 or step + 1 == size.num_steps:
            saved = (
                step + 1,
                stream,
                jax.tree.map(np.asarray, params),
                list(map(np.asarray, jax.tree.leaves(state))),
            )
            temporary = saved_path.with_suffix(".new")
            temporary.write_bytes(pickle.dumps(saved))
            os.replace(temporary, saved_path)  # an interrupted write leaves the previous state
    return params


def export(setting: Setting, params: Params, directory: Path) -> Params:
    """Writes the checkpoint and tokenizer; returns the parameters as they are on disk, in bfloat16 steps."""
    tensors = tensors_from_params(setting, params)
    turn_end_id = setting.tokenizer.token_to_id(demo_tokenizer.TURN_END)
    stored = demo_checkpoint.write_checkpoint(directory, setting.raw_config, tensors, turn_end_id)
    demo_tokenizer.write_tokenizer(
        setting.tokenizer, directory, setting.raw_config["max_position_embeddings"]
    )
    return params_from_tensors(setting, {name: value.astype(np.float32) for name, value in stored.items()})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corpora", type=Path, default=ROOT.parent / "shared" / "workloads" / "corpora")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--work-dir", type=Path, default=Path("demo-run"), help="state and log of the run")
    parser.add_argument("--steps", type=int, default=RunSize.num_steps)
    parser.add_argument("--decay-steps", type=int, default=RunSize.decay_steps)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    options.work_dir.mkdir(parents=True, exist_ok=True)
    size = RunSize(num_steps=options.steps, decay_steps=options.decay_steps)
    setting = make_setting(options.corpora, TEMPLATE.read_text())
    with open(options.work_dir / "log.jsonl", "a") as log_file:

        def log(record: dict) -> None:
            print(json.dumps(record), file=log_file, flush=True)
            if "step" in record and record["step"] % 10 == 0:
                print(json.dumps(record), flush=True)

        params = train(setting, size, options.work_dir, options.seed, log)
        params = export(setting, params, options.out)
        losses = held_out_loss(setting, params, make_summed_loss(setting.config), size, None)
        report = {source: dataclasses.asdict(loss) for source, loss in losses.items()}
        log({"event": "exported", "step": size.num_steps, "held_out": report})
        print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
