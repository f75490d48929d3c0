"""Conversations as token frontiers: borders that are exact, and identities that go on from turn to turn."""

from __future__ import annotations

import dataclasses
import itertools
import json
from datetime import datetime

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer_jax.errors import PromptError
from ninfer_jax.frontend.boundaries import find_text_boundaries, replaceable_from
from ninfer_jax.frontend.messages import normalise_messages
from ninfer_jax.frontend.template import make_template
from ninfer_jax.identity import BoundaryKind, common_frontier, equal_up_to

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = {"function": {"name": "look", "arguments": {"at": "x"}}}


def system(text: str) -> dict:
    return {"role": "system", "content": text}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


def tool(text: str) -> dict:
    return {"role": "tool", "content": text}


CHAT = [system("Be kind."), user("one"), assistant("first", reasoning_content="so"), user("two")]
LOOP = [
    *CHAT,
    assistant("look", tool_calls=[CALL, CALL]),
    tool("r1"),
    tool("r2"),
    assistant("then"),
    user("three "),
]


def ends(prepared, kind=BoundaryKind.MESSAGE) -> dict[int, int]:
    return {b.message_count: b.frontier_tokens for b in prepared.boundaries if b.kind is kind}


def text_up_to(frontend, prepared, frontier: int) -> str:
    return frontend.decode(prepared.identity.tokens[:frontier], skip_special_tokens=False)


def test_message_ends_are_the_literal_text_of_the_messages_before_them(frontend):
    prepared = frontend.prepare_messages(LOOP)
    found = {count: text_up_to(frontend, prepared, at) for count, at in ends(prepared).items()}
    one = "<|im_start|>system\nBe kind.<|im_end|>\n"
    two = one + "<|im_start|>user\none<|im_end|>\n"
    three = two + "<|im_start|>assistant\nfirst<|im_end|>\n"  # without its thinking: a later query follows
    four = three + "<|im_start|>user\ntwo<|im_end|>\n"
    assert {count: found[count] for count in (1, 2, 3, 4)} == {1: one, 2: two, 3: three, 4: four}
    assert found[5].endswith("</tool_call><|im_end|>\n")
    assert 6 not in found  # results share a turn: between them there is no end
    assert found[7].endswith("r2\n</tool_response><|im_end|>\n")
    assert found[9] == prepared.text[: prepared.text.rindex("<|im_start|>assistant")]
    assert ends(prepared, BoundaryKind.LEADING) == {1: ends(prepared)[1]}
    assert prepared.generation_opener_frontier == ends(prepared)[9]


def test_every_frontier_is_what_its_own_prefix_tokenises_to(frontend):
    for messages in (CHAT, LOOP, LOOP[:7], LOOP[1:], [user("")], [system("a"), user(" \n b\n")]):
        prepared = frontend.prepare_messages(messages, tools=TOOLS)
        tokens = prepared.identity.tokens
        assert prepared.boundaries
        for boundary in prepared.boundaries:
            at = boundary.frontier_tokens
            prefix = text_up_to(frontend, prepared, at)
            assert prepared.text.startswith(prefix)
            assert frontend.tokenizer.encode(prefix) == tokens[:at].tolist()


@pytest.mark.parametrize("name", ["miniswe_sessions.jsonl", "swe_agent_sessions.jsonl"])
def test_every_end_in_real_sessions_is_found_and_exact(frontend, shared_dir, name):
    path = shared_dir / "workloads" / "text" / name
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    with path.open(encoding="utf-8") as lines:
        sessions = [json.loads(line)["messages"] for line in itertools.islice(lines, 2)]
    for messages in sessions:
        prepared = frontend.prepare_messages(messages)
        assert ends(prepared).keys() == set(range(1, len(messages) + 1))
        for frontier in list(ends(prepared).values())[::5]:  # tokenising every prefix is quadratic
            prefix = text_up_to(frontend, prepared, frontier)
            assert frontend.tokenizer.encode(prefix) == prepared.identity.tokens[:frontier].tolist()


def test_the_whole_prompt_is_tokenised_at_once(frontend):
    prepared = frontend.prepare_messages(CHAT)
    assert prepared.identity.tokens.tolist() == frontend.tokenizer.encode(prepared.text)
    # the end of the turn and what follows it are not glued from parts: one token for two line ends
    assert prepared.text.endswith("<think>\n\n</think>\n\n")
    assert prepared.identity.tokens.tolist()[-4:] == [248068, 271, 248069, 271]


@pytest.mark.parametrize("messages", [[user("Hey you")], CHAT])
def test_tools_end_before_any_other_instruction(frontend, messages):
    # N-4: two conversations with the same tools share exactly this much
    prepared = frontend.prepare_messages(messages, tools=TOOLS)
    ((count, at),) = ends(prepared, BoundaryKind.TOOLS).items()
    assert count == 0
    shared = text_up_to(frontend, prepared, at)
    assert '"name": "look"' in shared and "Be kind" not in shared and "Hey you" not in shared
    # the empty end before the first message is no message boundary (N-6)
    assert 0 not in ends(prepared)
    assert ends(frontend.prepare_messages(messages), BoundaryKind.TOOLS) == {}


def test_prompts_with_the_same_start_have_the_same_first_frontiers(frontend):
    long, short = frontend.prepare_messages(LOOP, tools=TOOLS), frontend.prepare_messages(CHAT, tools=TOOLS)
    for count, at in ends(short).items():
        assert ends(long)[count] == at
        assert equal_up_to(long.identity, short.identity, at)
    assert ends(long, BoundaryKind.TOOLS) == ends(short, BoundaryKind.TOOLS)


def test_a_boundary_inside_a_token_is_not_published(frontend):
    # Without a border word between messages the line ends of two messages become one token.
    loose = dataclasses.replace(
        frontend,
        template=make_template(
            "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
        ),
    )
    prepared = loose.prepare_messages([user("a"), user("\nb"), user("c")])
    assert prepared.text == "a\n\nb\nc\n>"
    assert ends(prepared).keys() == {2, 3}  # the end of the first is inside the token of two line ends
    for count, at in ends(prepared).items():
        assert text_up_to(loose, prepared, at) == {2: "a\n\nb\n", 3: "a\n\nb\nc\n"}[count]


def test_a_template_that_resists_tags_is_searched_prefix_by_prefix(frontend):
    shouting = make_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content|upper }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    loud = dataclasses.replace(frontend, template=shouting)
    prepared = loud.prepare_messages(CHAT)
    assert {n: text_up_to(loud, prepared, at).count("<|im_end|>") for n, at in ends(prepared).items()} == {
        1: 1, 2: 2, 3: 3, 4: 4,
    }  # fmt: skip


ROLE_TEXT = st.text(alphabet="ab \n<>", max_size=6)


@settings(max_examples=40)
@given(data=st.data())
def test_tags_find_every_border_that_plain_prefixes_prove(data):
    """The fast search against the plain definition: rendering a prefix gives a prefix of the rendering."""
    template = make_template(
        "{% for m in messages %}[{{ m.role }}]{{ m.content|trim }}"
        "{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %};{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    messages = []
    for role in data.draw(st.lists(st.sampled_from(["user", "assistant", "tool"]), min_size=1, max_size=7)):
        messages.append({"role": role, "content": data.draw(ROLE_TEXT)})
    messages = normalise_messages([{"role": "system", "content": "s"}, *messages])

    def render(some, *, with_tools, open_answer):
        return template.render(some, add_generation_prompt=open_answer, now=datetime(2026, 1, 1))

    history = render(messages, with_tools=False, open_answer=False)
    found = find_text_boundaries(render, messages, history, has_tools=False)
    for boundary in found:
        plain = render(messages[: boundary.message_count], with_tools=False, open_answer=False)
        assert history[: boundary.offset_chars] == plain
    counts = {b.message_count for b in found if b.kind is BoundaryKind.MESSAGE}
    for count in range(1, len(messages)):
        before, after = messages[count - 1]["role"], messages[count]["role"]
        # after an answer or an instruction only a question or a result shows where the next message begins
        if {before, after} & {"user", "tool"}:
            assert count in counts
    assert len(messages) in counts


def test_where_answers_may_be_replaced():
    # C-3, C-7: after each query; within the last turn before every further answer, too
    assert replaceable_from(normalise_messages(CHAT)) == [2, 4]
    assert replaceable_from(normalise_messages(LOOP)) == [2, 4, 9]
    assert replaceable_from(normalise_messages(LOOP[:7])) == [2, 4, 7]
    assert replaceable_from(normalise_messages(LOOP[:8])) == [2, 4, 7, 8]
    assert replaceable_from(normalise_messages([*LOOP[:4], user("and"), assistant("x"), user("y")])) == [
        2,
        5,
        7,
    ]


def test_rewrite_frontiers_split_a_rebuild_where_the_turns_were(frontend):
    prepared = frontend.prepare_messages(LOOP)
    at = ends(prepared)
    assert prepared.identity.rewrite_execution_frontiers == (at[2], at[4], at[9])


def test_the_next_turn_repeats_the_identity_of_this_one(frontend):
    # An answer that the template renders as it was generated: the next prompt must match all of it exactly.
    first = frontend.prepare_messages([user("one")])
    calling = assistant("look", tool_calls=[CALL])
    second = frontend.prepare_messages([user("one"), calling, tool("r")])
    third = frontend.prepare_messages([user("one"), calling, tool("r"), assistant("done"), user("two")])
    assert common_frontier(first.identity, second.identity) == first.identity.num_tokens
    # The next query drops the thinking of the answers, so only the query's own end survives (TurnClosure).
    assert common_frontier(second.identity, third.identity) >= first.generation_opener_frontier
    assert equal_up_to(second.identity, third.identity, first.generation_opener_frontier)


@pytest.mark.parametrize(("thinking", "inside"), [(True, True), (False, False), (None, False)])
def test_whether_the_answer_starts_inside_a_thinking_block(frontend, thinking, inside):
    quoting = [user("what does <think> mean?")]
    assert frontend.prepare_messages(quoting, enable_thinking=thinking).starts_in_reasoning is inside


def test_a_quoted_marker_opens_nothing(frontend):
    plain = make_template(
        "{% for m in messages %}{{ m.content }};{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    chat = dataclasses.replace(frontend, template=plain)
    assert not chat.prepare_messages([user("what does <think> mean?")]).starts_in_reasoning


def test_template_options_reach_the_template(frontend):
    saying = dataclasses.replace(
        frontend, template=make_template("{{ word }}{{ enable_thinking is defined }}")
    )
    assert saying.prepare_messages([user("a")], template_kwargs={"word": "x"}).text == "xFalse"
    assert (
        saying.prepare_messages([user("a")], template_kwargs={"word": "x"}, enable_thinking=True).text
        == "xTrue"
    )


def test_developer_messages_are_system_messages_where_the_template_knows_no_better(frontend):
    messages = [{"role": "developer", "content": "Be kind."}, user("one")]
    prepared = frontend.prepare_messages(messages)
    assert prepared.text.startswith("<|im_start|>system\nBe kind.<|im_end|>\n")
    assert ends(prepared, BoundaryKind.LEADING) == {1: ends(prepared)[1]}


def test_raw_prompts_have_no_structure(frontend):
    # N-7
    text = frontend.prepare_text("Once upon a time<|im_end|>")
    assert text.identity.tokens.tolist()[-1] == 248046
    assert text.boundaries == () and text.generation_opener_frontier is None
    assert text.identity.rewrite_execution_frontiers == ()
    tokens = frontend.prepare_tokens(np.arange(600), anchor_prompt_end=True)
    assert (tokens.prompt_end_anchor, tokens.generation_opener_frontier) == (599, 599)
    plain = frontend.prepare_tokens(range(600))
    assert (plain.prompt_end_anchor, plain.boundaries) == (None, ())
    assert equal_up_to(plain.identity, tokens.identity, 600)  # the anchor is no part of the identity


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([], "no tokens"),
        ([1, 248320], "token id 248320 at index 1 is outside 0..248319"),
        ([-1], "token id -1 at index 0"),
        ([1.5], "flat list of integers, got float64"),
        ([[1], [2]], "flat list of integers"),
        ([[1], [2, 3]], "flat list of integers"),
        (["a"], "flat list of integers"),
    ],
)
def test_token_ids_are_checked(frontend, tokens, words):
    with pytest.raises(PromptError, match=words):
        frontend.prepare_tokens(tokens)


def test_texts_are_checked(frontend):
    with pytest.raises(PromptError, match="no tokens"):
        frontend.prepare_text("")
    with pytest.raises(PromptError, match="must be a string, got list"):
        frontend.prepare_text([1, 2])


def test_a_vocabulary_smaller_than_the_tokenizer_is_noticed(frontend):
    small = dataclasses.replace(frontend, vocab_size=1000)
    assert small.allowed_vocab_size == 1000
    with pytest.raises(PromptError, match=r"outside 0\.\.999"):
        small.prepare_text("The quick brown fox")
