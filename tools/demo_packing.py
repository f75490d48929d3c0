"""Rows of training tokens: which tokens the loss counts, and how conversations fill a batch.

Owns tokens and weights. The texts come from demo_corpus; nothing here knows the model.
"""

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from demo_corpus import Conversation, Corpus, conversations
from demo_tokenizer import CONTROL_TOKENS
from tokenizers import Tokenizer

# The answers are what the model is for; reading the questions still teaches it English.
QUESTION_WEIGHT = 0.2
# Shares of the trained tokens. The tales count most because the demo tells them; the play least, its lines
# being the hardest to learn and the furthest from conversation.
MIXTURE = {
    "grimm": 0.32,
    "little_women": 0.22,
    "tinyshakespeare": 0.10,
    "airline_chat": 0.11,
    "retail_chat": 0.07,
    "smalltalk": 0.18,
}


@dataclasses.dataclass(frozen=True, eq=False)
class TokenText:
    """A rendered conversation in tokens."""

    tokens: np.ndarray  # int32[S]
    weights: np.ndarray  # float32[S], how much the loss counts the prediction OF this token


@dataclasses.dataclass(frozen=True, eq=False)
class TokenBatch:
    """Rows for one step."""

    tokens: np.ndarray  # int32[B, T]
    targets: np.ndarray  # int32[B, T]
    weights: np.ndarray  # float32[B, T]


def tokenize(text: str, tokenizer: Tokenizer) -> TokenText:
    """Returns the tokens of a rendered conversation; the loss counts what the model itself would have to say.

    That is each answer with its end mark and each written thought, but no role header and no empty thought:
    those are given by the template.
    """
    ids = tokenizer.encode(text).ids
    turn_start, turn_end = tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id("<|im_end|>")
    header = {role: tokenizer.encode(f"{role}\n").ids for role in ("assistant", "user", "system")}
    opener = tokenizer.encode("<think>\n").ids
    empty = tokenizer.encode("<think>\n\n</think>\n\n").ids
    weights = np.zeros(len(ids), np.float32)
    at = 0
    while at < len(ids):
        if ids[at] != turn_start:
            at += 1
            continue
        role = next(role for role, head in header.items() if ids[at + 1 : at + 1 + len(head)] == head)
        start = at + 1 + len(header[role])
        for given in (empty, opener):
            if role == "assistant" and ids[start : start + len(given)] == given:
                start += len(given)
                break
        end = ids.index(turn_end, start) + 1
        weights[start:end] = 1.0 if role == "assistant" else QUESTION_WEIGHT
        at = end
    return TokenText(np.asarray(ids, np.int32), weights)


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """Returns int32[V], how many bytes of text each token stands for; control tokens stand for none."""
    marks = {tokenizer.token_to_id(token) for token in CONTROL_TOKENS}
    # Byte-level tokens are spelled with one character for each byte.
    sizes = [len(tokenizer.id_to_token(token)) for token in range(tokenizer.get_vocab_size())]
    return np.asarray([0 if token in marks else size for token, size in enumerate(sizes)], np.int32)


class TokenStream:
    """The order of the training data: the one holder of its random state. Picklable, so that a run can be
    resumed.

    Every row begins with a whole conversation, as a request does, and further conversations follow until it
    is full;
    the last one is cut. A source is drawn whenever its share of the tokens so far is furthest below its
    mixture share.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.waiting: dict[str, list[TokenText]] = {source: [] for source in MIXTURE}
        self.drawn_tokens = dict.fromkeys(MIXTURE, 0)

    def next_batch(
        self,
        corpora: Mapping[str, Corpus],
        render: Callable[[Conversation], str],
        tokenizer: Tokenizer,
        rows: int,
        row_tokens: int,
    ) -> TokenBatch:
        """Returns the next `rows` rows of `row_tokens` tokens."""
        tokens = np.zeros((rows, row_tokens + 1), np.int32)
        weights = np.zeros((rows, row_tokens + 1), np.float32)
        for row in range(rows):
            filled = 0
            while filled <= row_tokens:
                source = min(MIXTURE, key=lambda name: self.drawn_tokens[name] / MIXTURE[name])
                if not self.waiting[source]:
                    talks = conversations(corpora[source], self.rng)
                    self.waiting[source] = [tokenize(render(talk), tokenizer) for talk in talks]
                text = self.waiting[source].pop()
                size = min(len(text.tokens), row_tokens + 1 - filled)
                tokens[row, filled : filled + size] = text.tokens[:size]
                weights[row, filled : filled + size] = text.weights[:size]
                self.drawn_tokens[source] += size
                filled += size
        return TokenBatch(tokens[:, :-1], tokens[:, 1:], weights[:, 1:])


def held_out_rows(texts: Sequence[TokenText], rows: int, row_tokens: int) -> Iterator[TokenBatch]:
    """Yields each text in a row of its own (cut at `row_tokens`), the loss counting answers only.

    The last batch is filled up with rows of weight zero, so that all batches have one shape.
    """
    for start in range(0, len(texts), rows):
        tokens = np.zeros((rows, row_tokens + 1), np.int32)
        weights = np.zeros((rows, row_tokens + 1), np.float32)
        for row, text in enumerate(texts[start : start + rows]):
            size = min(len(text.tokens), row_tokens + 1)
            tokens[row, :size] = text.tokens[:size]
            weights[row, :size] = text.weights[:size] == 1.0
        yield TokenBatch(tokens[:, :-1], tokens[:, 1:], weights[:, 1:])
