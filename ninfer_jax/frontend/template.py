"""The chat template of a checkpoint: finds it, and renders it in a sandbox.

Owns neither the sandbox (`template_sandbox.py`) nor anything about messages: what it is given is already
validated, and what comes out is text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2

from ninfer_jax.errors import OptionError, PromptError
from ninfer_jax.frontend.template_sandbox import BUDGET, Budget, make_environment

JsonObject = Mapping[str, Any]
DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """Compiled templates of one checkpoint by name, and the special tokens that they may mention."""

    templates: Mapping[str, jinja2.Template]
    mentions_developer: bool  # otherwise a developer message is rendered as a system message
    special_tokens: Mapping[str, str]

    def render(
        self,
        messages: Sequence[JsonObject],
        *,
        tools: Sequence[JsonObject] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
        now: datetime,
    ) -> str:
        """Returns the prompt text.

        Args:
            messages: as `frontend.messages` normalised them.
            tools: tool descriptions, or None.
            add_generation_prompt: whether to open the assistant's answer at the end.
            options: further variables of the template, such as ``enable_thinking``.
            now: what the template's ``strftime_now`` reads, so that one request sees one time.
        Raises:
            PromptError: with the template's own message when it refuses the conversation.
        """
        name = TOOL_TEMPLATE if tools and TOOL_TEMPLATE in self.templates else DEFAULT_TEMPLATE
        given = (messages, tools, dict(options or {}))
        try:
            budget = Budget(given)
            variables: dict[str, Any] = {
                "range": budget.range,
                **self.special_tokens,
                "documents": None,
                "strftime_now": now.strftime,
                **(options or {}),
                "messages": messages,
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
                BUDGET: budget,
            }
            return self.templates[name].render(variables)
        except jinja2.TemplateError as error:
            raise PromptError(error.message or f"the chat template failed: {type(error).__name__}") from error
        except (
            TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError
        ) as error:  # fmt: skip
            # Python errors inside a template come from values it did not expect, so they are the prompt's.
            raise PromptError(
                f"the chat template could not render these messages: {type(error).__name__}: {error}"
            ) from error


def make_template(
    sources: str | Mapping[str, str], *, special_tokens: Mapping[str, str] | None = None
) -> ChatTemplate:
    """Returns a template compiled from its source, or from several sources by name.

    Raises:
        OptionError: if a source is not valid jinja, or none is named "default".
    """
    by_name = {DEFAULT_TEMPLATE: sources} if isinstance(sources, str) else dict(sources)
    if DEFAULT_TEMPLATE not in by_name:
        raise OptionError(f"chat templates are named {sorted(by_name)}, but one must be named 'default'")
    environment = make_environment()
    compiled = {}
    for name, source in by_name.items():
        if not isinstance(source, str):
            raise OptionError(f"chat template {name!r} must be text, got {type(source).__name__}")
        try:
            compiled[name] = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise OptionError(
                f"chat template {name!r} is not valid jinja, line {error.lineno}: {error}"
            ) from error
        except (ValueError, RecursionError, MemoryError, SyntaxError) as error:
            # Python refuses what jinja made of it: too deeply nested, or a number of too many digits.
            raise OptionError(f"chat template {name!r} cannot be compiled: {error}") from error
    return ChatTemplate(
        templates=compiled,
        mentions_developer=any("developer" in source for source in by_name.values()),
        special_tokens=dict(special_tokens or {}),
    )


def load_template(directory: Path, tokenizer_config: JsonObject) -> ChatTemplate | None:
    """Returns the template of a checkpoint directory, or None when it has none.

    ``chat_template.jinja`` wins over ``chat_template.json``, and both over the one in
    ``tokenizer_config.json``, which is a string or a list of named templates.

    Raises:
        OptionError: if a template is there and cannot be used.
    """
    sources = _template_sources(directory, tokenizer_config)
    return make_template(sources, special_tokens=special_token_texts(tokenizer_config)) if sources else None


def special_token_texts(tokenizer_config: JsonObject) -> dict[str, str]:
    """Returns the named special tokens (``eos_token``, ...) of a tokenizer_config.json as plain texts."""
    texts = {}
    for name, value in tokenizer_config.items():
        content = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(content, str):
            texts[name] = content
    return texts


def _template_sources(directory: Path, tokenizer_config: JsonObject) -> str | dict[str, str] | None:
    plain = directory / "chat_template.jinja"
    if plain.is_file():
        sources = {DEFAULT_TEMPLATE: _read_source(plain)}
        for extra in sorted((directory / "additional_chat_templates").glob("*.jinja")):
            sources[extra.stem] = _read_source(extra)
        return sources
    wrapped = directory / "chat_template.json"
    found = tokenizer_config.get("chat_template")
    if wrapped.is_file():
        try:
            found = json.loads(wrapped.read_text(encoding="utf-8"))["chat_template"]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise OptionError(f"{wrapped} must be a JSON object with a 'chat_template'") from error
    if found is None or isinstance(found, str):
        return found
    try:
        return {entry["name"]: entry["template"] for entry in found}
    except (LookupError, TypeError) as error:
        raise OptionError(
            f"chat_template in {directory / 'tokenizer_config.json'} must be a string or a list of objects "
            f"with 'name' and 'template', got {type(found).__name__}"
        ) from error


def _read_source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        raise OptionError(f"{path} is not valid UTF-8: {error}") from error
