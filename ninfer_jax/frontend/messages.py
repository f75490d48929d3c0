"""The messages and tools that a caller may send, checked and brought into the one form that templates read.

Owns validation. It renders nothing and never edits text: what the caller wrote is what the template sees.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ninfer_jax.errors import PromptError

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = ("text", "input_text", "output_text")
_MEDIA_WORDS = ("image", "video", "audio", "file")


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Returns the conversation with plain string contents and tool arguments as objects.

    Text parts are joined without anything between them. Arguments that arrive as a JSON string, as OpenAI
    clients send them, become the object they spell. Keys that are not named here pass through to the
    template.

    Raises:
        PromptError: naming the message by its index and role, what was got and what is expected.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise PromptError(
            "messages must be a list of objects like {'role': 'user', 'content': 'hi'}, "
            f"got {_kind(messages)}"
        )
    if not messages:
        raise PromptError("messages is empty; give at least one user message")
    return [_normalise_message(index, message) for index, message in enumerate(messages)]


def normalise_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Returns the tool descriptions in the caller's key order, or None when there are none.

    Raises:
        PromptError: if one is not an object with ``function.name``.
    """
    if tools is None:
        return None
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise PromptError(f"tools must be a list of tool objects, got {_kind(tools)}")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise PromptError(
                f"tools[{index}] must look like "
                "{'type': 'function', 'function': {'name': ..., 'parameters': ...}}"
            )
        try:
            json.dumps(tool)
        except (TypeError, ValueError, RecursionError) as error:
            raise PromptError(f"tools[{index}] ({name}) cannot be written as JSON: {error}") from error
    return [dict(tool) for tool in tools] or None


def is_user_query(message: Message) -> bool:
    """Returns whether a message asks something, rather than carrying tool results in user clothing."""
    if message["role"] != "user":
        return False
    text = message["content"].strip()
    return not (text.startswith("<tool_response>") and text.endswith("</tool_response>"))


def _normalise_message(index: int, message: Mapping[str, Any]) -> Message:
    if not isinstance(message, Mapping):
        raise PromptError(
            f"messages[{index}] must be an object with 'role' and 'content', got {_kind(message)}"
        )
    role = message.get("role")
    if role not in ROLES:
        raise PromptError(f"messages[{index}] has role {role!r}; use one of {', '.join(ROLES)}")
    where = f"messages[{index}] ({role})"
    result: Message = dict(message)
    calls = message.get("tool_calls")
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    empty_allowed = role == "tool" or (role == "assistant" and (bool(calls) or bool(reasoning)))
    result["content"] = _content_text(where, message.get("content"), empty_allowed)
    if reasoning is None:
        result.pop("reasoning_content", None)
    elif isinstance(reasoning, str) and role == "assistant":
        result["reasoning_content"] = reasoning
    else:
        raise PromptError(
            f"{where}: reasoning_content must be text on an assistant message, got {_kind(reasoning)}"
        )
    if not calls:
        result.pop("tool_calls", None)
    elif role != "assistant":
        raise PromptError(f"{where}: only assistant messages may have tool_calls")
    elif isinstance(calls, Sequence) and not isinstance(calls, str | bytes):
        result["tool_calls"] = [_tool_call(f"{where}.tool_calls[{n}]", call) for n, call in enumerate(calls)]
    else:
        raise PromptError(f"{where}: tool_calls must be a list, got {_kind(calls)}")
    return result


def _content_text(where: str, content: Any, empty_allowed: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if empty_allowed:
            return ""
        raise PromptError(f"{where} has no content; give a string or a list of text parts")
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        return "".join(_part_text(f"{where}.content[{n}]", part) for n, part in enumerate(content))
    raise PromptError(f"{where}: content must be a string or a list of text parts, got {_kind(content)}")


def _part_text(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise PromptError(
            f"{where} must be a text part like {{'type': 'text', 'text': 'hi'}}, got {_kind(part)}"
        )
    kind = part.get("type", "text" if "text" in part else None)
    if kind in _TEXT_PARTS:
        text = part.get("text")
        if isinstance(text, str):
            return text
        raise PromptError(f"{where}: 'text' must be a string, got {_kind(text)}")
    names = [kind] if isinstance(kind, str) else [str(key) for key in part]
    for word in _MEDIA_WORDS:
        if any(word in name for name in names):
            raise PromptError(f"{where}: {word} parts are not supported yet; send text parts only")
    raise PromptError(f"{where}: unknown part type {kind!r}; use 'text'")


def _tool_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise PromptError(f"{where} must look like {{'function': {{'name': ..., 'arguments': {{...}}}}}}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise PromptError(f"{where}: arguments of {name!r} are not valid JSON: {error}") from error
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise PromptError(f"{where}: arguments of {name!r} must be an object, got {_kind(arguments)}")
    return {**call, "function": {**function, "arguments": dict(arguments)}}


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__
