"""Where the messages of a conversation end inside its rendered text.

Owns the search for borders, which must work for any template: it only renders and compares, and never assumes
a format. A border is published only where the text before it is literally what the template makes of the
messages before it. Token frontiers are made from these offsets by `prompt`; nothing here sees a token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ninfer_jax.errors import PromptError
from ninfer_jax.frontend.messages import Message, is_user_query
from ninfer_jax.identity import BoundaryKind

LEADING_ROLES = ("system", "developer")


class RenderFn(Protocol):
    """The checkpoint's template with every option of one request already bound."""

    def __call__(self, messages: Sequence[Message], /, *, with_tools: bool, open_answer: bool) -> str:
        """Returns the text of some messages."""
        ...


@dataclass(frozen=True, slots=True)
class TextBoundary:
    """The first ``offset_chars`` characters render the tools and the first ``message_count`` messages."""

    offset_chars: int
    message_count: int
    kind: BoundaryKind


@dataclass(frozen=True, slots=True)
class _Frames:
    """The text that a template puts around a content; None where it could not be learnt."""

    user_head: str | None = None
    user_tail: str | None = None
    tool_head: str | None = None  # of the first result after an assistant message
    tool_tail: str | None = None  # of the last result before another message


def find_text_boundaries(
    render: RenderFn, messages: Sequence[Message], history: str, *, has_tools: bool
) -> tuple[TextBoundary, ...]:
    """Returns the borders of a rendered conversation, ascending.

    Rendering every prefix would cost a quadratic number of renderings and would still miss what the Qwen3.5
    template does: an assistant message is rendered with its thinking while it is the last turn and without it
    later. So the contents are tagged, the whole conversation is rendered once more, and the result must be
    the history again when the tags are taken out. Where a template resists that, prefixes are rendered one by
    one.

    Args:
        render: the template; may refuse a conversation with PromptError.
        messages: normalised messages.
        history: what `render` makes of all of them without opening an answer.
        has_tools: whether the request has tools.
    """
    tag = _unused_word(history)
    offsets = _offsets_by_tags(render, messages, history, tag)
    if offsets is None:
        offsets = _offsets_by_prefixes(render, messages, history)
    found = [
        TextBoundary(offset, count, BoundaryKind.MESSAGE) for count, offset in offsets.items() if count > 0
    ]
    found.append(TextBoundary(len(history), len(messages), BoundaryKind.MESSAGE))
    leading = count_leading(messages)
    if leading and leading in offsets:
        found.append(TextBoundary(offsets[leading], leading, BoundaryKind.LEADING))
    if has_tools:
        end = offsets.get(0) if leading == 0 else _tools_before_system(render, history, tag)
        if end:
            found.append(TextBoundary(end, 0, BoundaryKind.TOOLS))
    return tuple(sorted(found, key=lambda b: (b.offset_chars, b.message_count, b.kind.value)))


def count_leading(messages: Sequence[Message]) -> int:
    """Returns how many system and developer messages open the conversation."""
    count = 0
    while count < len(messages) and messages[count]["role"] in LEADING_ROLES:
        count += 1
    return count


def replaceable_from(messages: Sequence[Message]) -> list[int]:
    """Returns the message counts after which an answer is generated and may later be rendered differently
    (C-3, C-7).

    These are the ends of the user's queries, and within the last turn also the end before every further
    answer. They depend only on the messages before them and on whether a later query exists, so that a
    conversation that goes on names the same places again.
    """
    last_query = max((n for n, message in enumerate(messages) if is_user_query(message)), default=-1)
    counts = []
    for count in range(1, len(messages) + 1):
        answered = count == len(messages) or messages[count]["role"] == "assistant"
        if answered and (is_user_query(messages[count - 1]) or count > last_query >= 0):
            counts.append(count)
    return counts


def _offsets_by_tags(
    render: RenderFn, messages: Sequence[Message], history: str, tag: str
) -> dict[int, int] | None:
    """Offset where the first k messages end, for every certain k; None if tags change the text."""
    tagged = [n for n, message in enumerate(messages) if message["role"] == "tool" or is_user_query(message)]
    places = None
    for strip in (True, False):  # most templates trim contents, and a tag would shield the blanks from that
        marked = list(messages)
        for n in tagged:
            text = messages[n]["content"].strip() if strip else messages[n]["content"]
            marked[n] = {**messages[n], "content": f"{tag}{n}a{text}{tag}{n}b"}
        try:
            places = _untag(render(marked, with_tools=True, open_answer=False), tag, history)
        except PromptError:
            continue
        if places is not None:
            break
    if places is None or set(places) != {(n, side) for n in tagged for side in "ab"}:
        return None
    frames = _learn_frames(render, tag)
    offsets = {}
    for count in range(len(messages)):
        offset = _border(messages, count, places, frames, history)
        if offset is not None and offset >= max(offsets.values(), default=0):
            offsets[count] = offset
    return offsets


def _border(
    messages: Sequence[Message],
    count: int,
    places: dict[tuple[int, str], int],
    frames: _Frames,
    history: str,
) -> int | None:
    """Where message ``count`` begins, from its own content or from the one before it."""
    start = places.get((count, "a"))
    if start is not None:
        # A later result inside a shared frame does not follow this head, and so begins at no border.
        head = frames.tool_head if messages[count]["role"] == "tool" else frames.user_head
        if head is None or not history[:start].endswith(head):
            return None
        return start - len(head)
    end = places.get((count - 1, "b"))
    if end is not None:
        tail = frames.tool_tail if messages[count - 1]["role"] == "tool" else frames.user_tail
        if tail is None or not history.startswith(tail, end):
            return None
        return end + len(tail)
    return None


def _untag(marked: str, tag: str, history: str) -> dict[tuple[int, str], int] | None:
    """Offsets of the tags once they are taken out; None if what remains is not the history."""
    places: dict[tuple[int, str], int] = {}
    pieces, cursor, removed = [], 0, 0
    for match in re.finditer(rf"{tag}(\d+)([ab])", marked):
        key = (int(match[1]), match[2])
        if key in places:
            return None
        pieces.append(marked[cursor : match.start()])
        places[key] = match.start() - removed
        cursor, removed = match.end(), removed + len(match[0])
    pieces.append(marked[cursor:])
    return places if "".join(pieces) == history else None


def _learn_frames(render: RenderFn, tag: str) -> _Frames:
    """What the template writes around a user's words and a tool's result, read off two tiny chats."""
    question = {"role": "user", "content": f"{tag}q"}
    answer = {"role": "assistant", "content": f"{tag}r"}
    call = {**answer, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
    user_head, user_tail = _frame_after(
        render, [question, answer], {"role": "user", "content": f"{tag}s"}, tag
    )
    tool_head, tool_tail = _frame_after(render, [question, call], {"role": "tool", "content": f"{tag}s"}, tag)
    return _Frames(user_head, user_tail, tool_head, tool_tail)


def _frame_after(
    render: RenderFn, before: list[Message], message: Message, tag: str
) -> tuple[str | None, str | None]:
    """The head and tail of a message after an answer; only text after the answer's words is compared."""
    try:
        short = render(before, with_tools=False, open_answer=False)
        long = render([*before, message], with_tools=False, open_answer=False)
    except PromptError:
        return None, None
    _, found_answer, answer_tail = short.partition(f"{tag}r")
    _, found_again, rest = long.partition(f"{tag}r")
    between, found_content, tail = rest.partition(f"{tag}s")
    if not (found_answer and found_again and found_content) or not between.startswith(answer_tail):
        return None, None
    return between[len(answer_tail) :], tail


def _tools_before_system(render: RenderFn, history: str, tag: str) -> int | None:
    """Where the tools end when a system message follows them in the text."""
    probe = [{"role": "system", "content": f"{tag}s"}, {"role": "user", "content": f"{tag}q"}]
    try:
        with_tools, found, _ = render(probe, with_tools=True, open_answer=False).partition(f"{tag}s")
        without, _, _ = render(probe, with_tools=False, open_answer=False).partition(f"{tag}s")
    except PromptError:
        return None
    if not found or with_tools == without or not history.startswith(with_tools):
        return None
    return len(with_tools)


def _offsets_by_prefixes(render: RenderFn, messages: Sequence[Message], history: str) -> dict[int, int]:
    """The plain way: a prefix of the messages whose rendering is literally a prefix of the history."""
    offsets = {}
    for count in range(1, len(messages)):
        try:
            text = render(messages[:count], with_tools=True, open_answer=False)
        except PromptError:
            continue
        if history.startswith(text):
            offsets[count] = len(text)
    return offsets


def _unused_word(text: str) -> str:
    """A plain word that the text does not contain, so that finding it proves who wrote it."""
    word = "zqx"
    while word in text:
        word += "q"
    return word
