"""What a caller may send, and the words it hears when it may not."""

from __future__ import annotations

import pytest

from ninfer_jax.errors import PromptError
from ninfer_jax.frontend.messages import is_user_query, normalise_messages, normalise_tools


def one(**message) -> dict:
    return normalise_messages([message])[0]


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}, {"text": "d"}]
    assert one(role="user", content=parts)["content"] == "abcd"


@pytest.mark.parametrize("arguments", ['{"b": 1, "a": [2]}', {"b": 1, "a": [2]}])
def test_tool_arguments_become_objects_in_their_own_order(arguments):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = one(role="assistant", content=None, tool_calls=[call])
    assert message["content"] == ""
    assert list(message["tool_calls"][0]["function"]["arguments"].items()) == [("b", 1), ("a", [2])]
    assert message["tool_calls"][0]["id"] == "c1"


@pytest.mark.parametrize("arguments", [None, "", "  ", "{}"])
def test_no_arguments_are_an_empty_object(arguments):
    message = one(role="assistant", tool_calls=[{"name": "f", "arguments": arguments}])
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_reasoning_goes_by_either_name():
    assert one(role="assistant", content="a", reasoning="b")["reasoning_content"] == "b"
    assert one(role="assistant", content="a", reasoning_content="b")["reasoning_content"] == "b"


def test_the_callers_messages_are_not_touched():
    call = {"function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    normalise_messages([message])
    assert message == {"role": "assistant", "content": None, "tool_calls": [call]}
    assert call == {"function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hi", "must be a list of objects"),
        ({"role": "user", "content": "hi"}, "must be a list of objects"),
        ([], "messages is empty"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"role": "robot", "content": "hi"}], r"messages\[0\] has role 'robot'; use one of system"),
        ([{"content": "hi"}], "has role None"),
        ([{"role": "user"}], r"messages\[0\] \(user\) has no content"),
        ([{"role": "assistant", "content": None}], "has no content"),
        ([{"role": "user", "content": 3}], "content must be a string or a list of text parts, got int"),
        ([{"role": "user", "content": [3]}], r"content\[0\] must be a text part"),
        ([{"role": "user", "content": [{"type": "text"}]}], "'text' must be a string, got nothing"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "image parts are not supported yet",
        ),
        ([{"role": "user", "content": [{"image": "x.png"}]}], "image parts are not supported yet"),
        ([{"role": "user", "content": [{"type": "video"}]}], "video parts are not supported yet"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "audio parts are not supported yet"),
        ([{"role": "user", "content": [{"type": "hologram"}]}], "unknown part type 'hologram'"),
        (
            [{"role": "user", "content": "a", "tool_calls": [1]}],
            "only assistant messages may have tool_calls",
        ),
        ([{"role": "assistant", "tool_calls": "f"}], "tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [{}]}], r"tool_calls\[0\] must look like"),
        ([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}], "'f' are not valid JSON"),
        (
            [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}],
            "must be an object, got list",
        ),
        (
            [{"role": "user", "content": "a", "reasoning_content": "b"}],
            "must be text on an assistant message",
        ),
    ],
)
def test_mistakes_are_named(messages, words):
    with pytest.raises(PromptError, match=words):
        normalise_messages(messages)


def test_tools_are_checked_and_kept_in_order():
    tool = {"type": "function", "function": {"parameters": {"z": 1, "a": 2}, "name": "f"}}
    assert normalise_tools([tool]) == [tool]
    assert normalise_tools(None) is None
    assert normalise_tools([]) is None


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ({"name": "f"}, "tools must be a list"),
        ([{"name": "f"}], r"tools\[0\] must look like"),
        ([{"type": "function", "function": {"name": ""}}], r"tools\[0\] must look like"),
        ([{"type": "function", "function": {"name": "f", "x": {1}}}], "cannot be written as JSON"),
    ],
)
def test_tool_mistakes_are_named(tools, words):
    with pytest.raises(PromptError, match=words):
        normalise_tools(tools)


def test_what_counts_as_a_query():
    assert is_user_query({"role": "user", "content": "hi"})
    assert not is_user_query({"role": "user", "content": " <tool_response>1</tool_response>\n"})
    assert not is_user_query({"role": "tool", "content": "hi"})


def test_json_nested_without_end_is_the_callers_mistake():
    call = {"function": {"name": "f", "arguments": "[" * 100_000}}
    with pytest.raises(PromptError, match="not valid JSON"):
        normalise_messages([{"role": "assistant", "content": "", "tool_calls": [call]}])
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(PromptError, match="cannot be written as JSON"):
        normalise_tools([{"function": {"name": "f", "parameters": deep}}])
