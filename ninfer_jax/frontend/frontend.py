"""The frontend of one checkpoint: prompts in, answers out.

Owns the files around the weights (tokenizer, chat template, generation config) and says plainly which one is
missing when it is needed. It runs no model and keeps nothing about any request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from ninfer_jax.errors import OptionError, PromptError
from ninfer_jax.frontend.generation_config import GenerationConfig, make_generation_config
from ninfer_jax.frontend.messages import normalise_messages, normalise_tools
from ninfer_jax.frontend.output import OutputSession, make_output_rules, open_output_session
from ninfer_jax.frontend.prompt import prepare_conversation, prepare_raw_text, prepare_raw_tokens
from ninfer_jax.frontend.template import ChatTemplate, load_template, special_token_texts
from ninfer_jax.frontend.tokenizer import TextTokenizer
from ninfer_jax.identity import PreparedPrompt


@dataclass(frozen=True, eq=False)
class Frontend:
    """Everything between a caller's words and token ids. Build with `from_directory`.

    A checkpoint without a tokenizer still serves: token ids in, token ids out.
    """

    source: str  # where the checkpoint came from, for messages
    vocab_size: int  # rows of the embedding
    tokenizer: TextTokenizer | None
    template: ChatTemplate | None
    generation: GenerationConfig
    clock: Callable[[], datetime]

    @classmethod
    def from_directory(
        cls, path: str | Path, *, vocab_size: int, clock: Callable[[], datetime] = datetime.now
    ) -> Frontend:
        """Returns the frontend of a Hugging Face directory.

        Args:
            path: the directory; tokenizer.json, the chat template and generation_config.json are all
                optional.
            vocab_size: rows of the model's embedding, which may exceed the tokenizer's ids.
            clock: what templates read as the current time.
        Raises:
            OptionError: if a file is there and cannot be used.
        """
        directory = Path(path)
        if not directory.is_dir():
            raise OptionError(f"{directory} is not a directory with a checkpoint")
        tokenizer_config = _read_json(directory / "tokenizer_config.json")
        tokenizer = None
        if (directory / "tokenizer.json").is_file():
            tokenizer = TextTokenizer.from_file(directory / "tokenizer.json")
        eos_text = special_token_texts(tokenizer_config).get("eos_token")
        return cls(
            source=str(directory),
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            template=load_template(directory, tokenizer_config),
            generation=make_generation_config(
                generation=_read_json(directory / "generation_config.json"),
                model=_read_json(directory / "config.json"),
                tokenizer_eos=tokenizer.token_id(eos_text) if tokenizer and eos_text else None,
                vocab_size=vocab_size,
            ),
            clock=clock,
        )

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that ends an answer (facts 8.2)."""
        return self.generation.eos_token_ids

    @property
    def allowed_vocab_size(self) -> int:
        """Ids at or beyond this are padding rows of the embedding and are never sampled."""
        return self.vocab_size if self.tokenizer is None else min(self.vocab_size, self.tokenizer.vocab_size)

    @property
    def generation_defaults(self) -> Mapping[str, Any]:
        """The checkpoint's recommended sampling; empty means greedy."""
        return self.generation.defaults

    def prepare_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> PreparedPrompt:
        """Returns the prompt of a conversation, rendered by the checkpoint's own template.

        Args:
            messages: objects with ``role`` and ``content``, as the OpenAI chat API has them.
            tools: tool descriptions, as the same API has them.
            enable_thinking: None leaves the choice to the template, whose default differs between models.
            template_kwargs: further variables of the template.
            max_tokens: that the prompt may have; None is no limit.
        Raises:
            PromptError: if a message cannot be represented, the template refuses, or there is no template.
            RequestError: CONTEXT_LENGTH_EXCEEDED if it has more than `max_tokens`.
            OptionError: if ``template_kwargs`` is no mapping from names.
        """
        checked = normalise_messages(messages)
        checked_tools = normalise_tools(tools)
        tokenizer = self._need_tokenizer("messages")
        if self.template is None:
            raise PromptError(
                f"{self.source} has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json), so messages cannot be rendered; give a text prompt or token ids"
            )
        if template_kwargs is not None and not (
            isinstance(template_kwargs, Mapping) and all(isinstance(name, str) for name in template_kwargs)
        ):
            raise OptionError(
                f"template_kwargs: got {template_kwargs!r}, expected a mapping from names to values"
            )
        options = dict(template_kwargs or {})
        if enable_thinking is not None:
            options["enable_thinking"] = enable_thinking
        return prepare_conversation(
            checked,
            tools=checked_tools,
            template=self.template,
            tokenizer=tokenizer,
            vocab_size=self.vocab_size,
            options=options,
            now=self.clock(),
            max_tokens=max_tokens,
        )

    def prepare_text(self, text: str, *, max_tokens: int | None = None) -> PreparedPrompt:
        """Returns the prompt of a text, used as it is.

        Raises:
            PromptError: if the text is empty or the checkpoint has no tokenizer.
            RequestError: CONTEXT_LENGTH_EXCEEDED if it has more than `max_tokens`.
        """
        return prepare_raw_text(
            text,
            tokenizer=self._need_tokenizer("text"),
            vocab_size=self.vocab_size,
            max_tokens=max_tokens,
        )

    def prepare_tokens(
        self,
        ids: Sequence[int] | np.ndarray,
        *,
        anchor_prompt_end: bool = False,
        max_tokens: int | None = None,
    ) -> PreparedPrompt:
        """Returns the prompt of token ids; works without a tokenizer.

        Raises:
            PromptError: if there is no id, or one is outside the embedding.
            RequestError: CONTEXT_LENGTH_EXCEEDED if there are more than `max_tokens`.
        """
        return prepare_raw_tokens(
            ids,
            vocab_size=self.vocab_size,
            anchor_prompt_end=anchor_prompt_end,
            max_tokens=max_tokens,
        )

    def open_output(
        self,
        prepared: PreparedPrompt,
        *,
        max_tokens: int,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        min_tokens: int = 0,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> OutputSession:
        """Returns the empty answer to a prompt.

        Thinking goes to its own channel in conversations only: a raw prompt asks for raw text.

        Args:
            prepared: the prompt it answers.
            max_tokens, stop, stop_token_ids, ignore_eos, min_tokens, include_stop, skip_special_tokens: as in
                `make_output_rules`.
        Raises:
            OptionError: if a value is out of range, or stop strings are given without a tokenizer.
        """
        rules = make_output_rules(
            self.tokenizer,
            eos_token_ids=self.eos_token_ids,
            stop=stop,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            min_tokens=min_tokens,
            max_tokens=max_tokens,
            include_stop=include_stop,
            skip_special_tokens=skip_special_tokens,
            splits_channels=prepared.from_messages,
        )
        return open_output_session(rules, starts_in_reasoning=prepared.starts_in_reasoning)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of whole token ids.

        Raises:
            PromptError: if the checkpoint has no tokenizer.
        """
        return self._need_tokenizer("text").decode(ids, skip_special_tokens=skip_special_tokens)

    def _need_tokenizer(self, what: str) -> TextTokenizer:
        if self.tokenizer is None:
            raise PromptError(
                f"{self.source} has no tokenizer.json, so it takes and gives token ids only, not {what}; "
                "add the file, or use token ids"
            )
        return self.tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise OptionError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value
