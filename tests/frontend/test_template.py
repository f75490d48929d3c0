"""The layout of facts 8.3, byte for byte, and templates wherever a checkpoint keeps them."""

from __future__ import annotations

import json
import resource
import time
from datetime import datetime

import pytest

from ninfer_jax.errors import OptionError, PromptError
from ninfer_jax.frontend.messages import normalise_messages
from ninfer_jax.frontend.template import load_template, make_template
from ninfer_jax.frontend.template_sandbox import MAX_RENDER_STEPS

NOON = datetime(2026, 3, 4, 12, 30)
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"z": 1, "a": {"type": "string", "note": "<é & 'ü'>"}}},
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}


@pytest.fixture(scope="module")
def demo(qwen_directory):
    return load_template(qwen_directory, {})


def render(template, messages, **options) -> str:
    tools = options.pop("tools", None)
    opening = options.pop("add_generation_prompt", True)
    return template.render(
        normalise_messages(messages), tools=tools, add_generation_prompt=opening, options=options, now=NOON
    )


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


def test_user_text_is_trimmed_and_no_system_prompt_is_invented(demo):
    assert render(demo, [user("  hi \n")]) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_system_text_comes_first_and_trimmed(demo):
    messages = [{"role": "system", "content": "\nBe kind. "}, user("hi")]
    assert render(demo, messages, add_generation_prompt=False) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("thinking", "opener"),
    [({"enable_thinking": True}, "<think>\n"), ({"enable_thinking": False}, "<think>\n\n</think>\n\n")],
)
def test_the_answer_opens_inside_or_after_the_thinking_block(demo, thinking, opener):
    assert render(demo, [user("hi")], **thinking).endswith("<|im_start|>assistant\n" + opener)


def test_thinking_is_kept_after_the_last_query_and_dropped_before_it(demo):
    messages = [
        user("a"),
        assistant("b", reasoning_content="because\n"),
        user("c"),
        assistant("<think>\nhm\n</think>\n\nd"),
    ]
    assert render(demo, messages, add_generation_prompt=False) == (
        "<|im_start|>user\na<|im_end|>\n"
        "<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\nd<|im_end|>\n"
    )


def test_an_answer_without_reasoning_still_shows_an_empty_block(demo):
    assert render(demo, [user("a"), assistant("b")], add_generation_prompt=False).endswith(
        "<|im_start|>assistant\n<think>\n\n</think>\n\nb<|im_end|>\n"
    )


def test_tool_calls_follow_the_content(demo):
    arguments = {
        "city": "Köln",
        "days": 2,
        "exact": True,
        "unit": None,
        "at": [1, "é"],
        "box": {"b": 1, "a": 2},
    }
    calls = [{"function": {"name": "weather", "arguments": json.dumps(arguments)}}, CALL]
    messages = [user("a"), assistant("Let me look.", tool_calls=calls)]
    assert render(demo, messages, add_generation_prompt=False).endswith(
        "</think>\n\nLet me look.\n\n"
        "<tool_call>\n<function=weather>\n"
        "<parameter=city>\nKöln\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n"
        "<parameter=exact>\nTrue\n</parameter>\n"
        "<parameter=unit>\nNone\n</parameter>\n"
        '<parameter=at>\n[1, "é"]\n</parameter>\n'
        '<parameter=box>\n{"b": 1, "a": 2}\n</parameter>\n'
        "</function>\n</tool_call>\n"
        "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
    )


def test_a_bare_tool_call_has_nothing_before_it(demo):
    messages = [user("a"), assistant(None, tool_calls=[CALL])]
    assert "</think>\n\n<tool_call>\n<function=weather>\n" in render(demo, messages)


def test_tool_results_share_one_user_turn(demo):
    calling = assistant(None, tool_calls=[CALL, CALL])
    messages = [user("a"), calling, {"role": "tool", "content": "1 "}, {"role": "tool", "content": "2"}]
    assert render(demo, messages).endswith(
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert "<think>\n\n</think>\n\n<tool_call>" in render(demo, messages)  # results are no new query


def test_results_in_user_clothing_are_no_new_query_either(demo):
    messages = [user("a"), assistant("b"), user("<tool_response>\n1\n</tool_response>")]
    assert "<think>\n\n</think>\n\nb<|im_end|>" in render(demo, messages)


def test_tools_stand_before_the_system_text_one_json_object_per_line(demo):
    other = {"type": "function", "function": {"name": "other"}}
    text = render(demo, [{"role": "system", "content": "Be kind."}, user("hi")], tools=[WEATHER, other])
    assert text.startswith("<|im_start|>system\n# Tools\n\n")
    # JSON keeps the caller's key order, its letters and its HTML
    assert (
        '\n\n<tools>\n{"type": "function", "function": {"name": "weather", "parameters": '
        '{"z": 1, "a": {"type": "string", "note": "<é & \'ü\'>"}}}}\n'
        '{"type": "function", "function": {"name": "other"}}\n</tools>\n\n'
    ) in text
    assert "</IMPORTANT>\n\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n" in text
    assert text.count("\n- ") == 4


def test_tools_make_a_system_block_of_their_own(demo):
    text = render(demo, [user("hi")], tools=[WEATHER])
    assert "</IMPORTANT><|im_end|>\n<|im_start|>user\nhi<|im_end|>\n" in text


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "system", "content": "a"}], "no user message"),
        ([user("a"), {"role": "system", "content": "b"}], "must be the first message"),
        ([user("<tool_response>1</tool_response>")], "no user message"),
    ],
)
def test_the_templates_own_words_reach_the_caller(demo, messages, words):
    with pytest.raises(PromptError, match=words):
        render(demo, messages)


def test_strftime_now_reads_the_clock_it_is_given():
    assert render(make_template("{{ strftime_now('%d %b %H:%M') }}"), [user("a")]) == "04 Mar 12:30"


def test_loop_controls_generation_blocks_and_special_tokens():
    source = (
        "{{ eos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert render(make_template(source, special_tokens={"eos_token": "E"}), [user("a"), user("b")]) == "Ea"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages.nothing.there }}",
        "{{ 1 / 0 }}",
    ],
)
def test_templates_cannot_reach_out_and_their_failures_are_prompt_errors(source):
    with pytest.raises(PromptError):
        render(make_template(source), [user("a")])


def test_a_broken_template_names_its_line():
    with pytest.raises(OptionError, match="line 2"):
        make_template("a\n{% if %}")


def test_where_a_template_is_found(tmp_path):
    # the file beside the weights wins over the one inside tokenizer_config.json
    config = {"chat_template": "from config", "eos_token": {"content": "E"}}
    assert load_template(tmp_path, {}) is None
    assert render(load_template(tmp_path, config), [user("a")]) == "from config"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json {{ eos_token }}"}))
    assert render(load_template(tmp_path, config), [user("a")]) == "from json E"
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert render(load_template(tmp_path, config), [user("a")]) == "from file"


def test_named_templates(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    template = load_template(tmp_path, {"chat_template": named})
    assert render(template, [user("a")]) == "plain"
    assert render(template, [user("a")], tools=[WEATHER]) == "with tools"
    with pytest.raises(OptionError, match="one must be named 'default'"):
        load_template(tmp_path, {"chat_template": named[1:]})
    with pytest.raises(OptionError, match="list of objects"):
        load_template(tmp_path, {"chat_template": ["plain"]})


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    ],
)
def test_a_template_that_never_ends_is_stopped(source):
    with pytest.raises(PromptError, match="may never end"):
        make_template(source).render([{"role": "user", "content": "a"}], now=datetime(2030, 1, 1))


TEXT = "{% set s = 'x' * 60000000 %}"


def grown(step: str, first: str = "'x'", times: int = 60) -> str:
    """A template that makes its value anew from itself, time after time."""
    loop = f"{{% for i in range({times}) %}}{{% set n.x = {step} %}}{{% endfor %}}"
    return f"{{% set n = namespace(x={first}) %}}{loop}"


BOMBS = {
    "power": "{{ 10 ** (10 ** 7) }}",
    "squares": grown("n.x * n.x", "3"),
    "center": "{{ 'x'.center(10 ** 9) }}",
    "center-filter": "{{ 'x' | center(10 ** 9) }}",
    "ljust": "{{ 'x'.ljust(10 ** 9) }}",
    "zfill": "{{ 'x'.encode().zfill(10 ** 9) }}",
    "tabs": "{{ '\t'.expandtabs(10 ** 9) }}",
    "bytes": "{{ (5).to_bytes(10 ** 9, 'big') }}",
    "times": "{{ 'x' * 10 ** 9 }}",
    "times-list": "{{ [1] * 10 ** 9 }}",
    "lipsum": "{{ lipsum(n=10 ** 6) }}",
    "range": "{{ range(10 ** 12) | list }}",
    "percent": "{{ '%0999999999d' % 1 }}",
    "percent-star": "{{ '%*d' % (10 ** 9, 1) }}",
    "percent-filter": "{{ '%999999999s' | format('x') }}",
    "format": "{{ '{:>999999999}'.format('x') }}",
    "format-star": "{{ '{:>{}}'.format('x', 10 ** 9) }}",
    "indent": "{{ ('\n' * 100000) | indent(100000) }}",
    "indent-json": "{{ {'a': [1]} | tojson(indent=10 ** 9) }}",
    "batch": "{{ [1] | batch(10 ** 9, 'x') | list }}",
    "slice": "{{ [1] | slice(10 ** 9) | list }}",
    "round": "{{ 2.5 | round(10 ** 8) }}",
    "replace": "{{ ('x' * 100000).replace('x', 'y' * 100000) }}",
    "replace-filter": "{{ ('x' * 100000) | replace('', 'y' * 100000) }}",
    "replace-bytes": "{{ ('x' * 100000).encode().replace('x'.encode(), ('y' * 100000).encode()) }}",
    "translate": "{{ ('x' * 100000).translate({120: 'y' * 100000}) }}",
    "join": "{{ ('y' * 100000).join(range(9999) | map('string')) }}",
    "join-filter": "{{ range(9999) | join('y' * 100000) }}",
    "split": "{{ ('x ' * 30000000).split() | length }}",
    "listed": TEXT + "{{ s | list | length }}",
    "sums": "{{ range(9999) | map('string') | batch(2) | sum(start=[]) }}",
    "concatenation": grown("n.x ~ n.x"),
    "doubling": grown("n.x + n.x"),
    "laughs": grown("[n.x, n.x]") + "{{ n.x }}",
    "laughs-tuple": grown("(n.x, n.x)"),
    "laughs-dict": grown("{1: n.x, 2: n.x}"),
    "laughs-namespace": grown("namespace(a=n.x, b=n.x)") + "{{ n }}",
    "itself": "{% set n = namespace() %}{% set n.x = [n] %}{{ n }}",
    "deep": grown("(n.x,)", times=99999) + "{{ {n.x: 1} }}",
    "kept": TEXT + grown("n.x + [s ~ i]", "[]", times=999),
    "loops": TEXT + "{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}",
    "filtered-loops": TEXT + "{% for a in s %}{% for b in s if b == 'y' %}{% endfor %}{% endfor %}",
    "slices": TEXT + "{% for a in range(99999) %}{% set t = s[1:] %}{% endfor %}",
    "comparisons": TEXT
    + "{% set t = s ~ '' %}{% for a in range(99999) %}{% if s == t %}{% endif %}{% endfor %}",
    "written": "{% for a in range(999) %}{% for b in range(99) %}"
    + "x" * 10_000
    + "{% endfor %}{% endfor %}",
    "macro": "{% macro m() %}" + "x" * 100_000 + "{% endmacro %}" + grown("n.x ~ m()", "''", times=99999),
}


@pytest.mark.parametrize("name", BOMBS)
def test_no_template_takes_long_or_much_memory(name):
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started_s = time.process_time()
    with pytest.raises(PromptError, match=r"chat template|undefined"):
        render(make_template(BOMBS[name]), [user("a")])
    # About what the test takes at worst, times five: each of these would take minutes, or tens of gigabytes.
    assert time.process_time() - started_s < 15
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 1 << 20


def test_the_limits_leave_room_for_what_templates_do():
    source = (
        "{%- for m in messages if m.content is string and m.content != '' -%}"
        "{{ m.role.upper() ~ ': ' + m.content.split('</think>')[-1].lstrip('\n') | trim }};"
        "{%- endfor -%}{{ messages | map(attribute='role') | unique | join(',') }} {{ [1, 2][::-1] }} "
        "{{ '%5.1f|%s' % (2.25, 'x') }} {{ '{:>3}'.format(7) }} {{ {'a': (1,)} | tojson(indent=1) | length }}"
        " {{ 2 ** 10 }} {{ 'ab' * 2 }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    )
    expected = "USER: b;user [2, 1]   2.2|x   7 18 1024 abab 1"
    assert render(make_template(source), [user("a</think>\n\nb ")]) == expected


def test_the_limits_grow_with_the_conversation():
    template = make_template("{% for m in messages %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}")
    text = "x" * 300_000
    assert MAX_RENDER_STEPS <= len(text)  # a character takes two steps here, more than a template has
    assert render(template, [user(text)]) == text


def test_unusable_template_files_are_named(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(OptionError, match="UTF-8"):
        load_template(tmp_path, {})
    with pytest.raises(OptionError, match="must be text"):
        make_template({"default": 6})  # type: ignore[dict-item]
    for deep in (150, 100_000):
        with pytest.raises(OptionError, match="cannot be compiled"):
            make_template("{{ " + "not (" * deep + "a" + ")" * deep + " }}")
