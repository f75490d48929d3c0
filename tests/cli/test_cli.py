"""The command line as its users meet it: reports that parse, one line and exit code 2 for mistakes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import nullcontext

import pytest

from ninfer_jax import Engine
from ninfer_jax.cli import chat, generate
from ninfer_jax.cli.main import exit_code_of, main, one_line
from ninfer_jax.errors import EngineClosedError, OptionError, PromptError, RequestError, RequestErrorKind

SMALL = ["--max-context", "256", "--concurrency", "2", "--prefill-chunk", "64"]  # the fixture's engine


@pytest.fixture(scope="module")
def engine():
    """One small engine for every verb that needs some engine: starting is tested where it is the point."""
    with Engine.from_pretrained("demo", max_context=256, max_concurrency=2, prefill_chunk=64) as engine:
        yield engine


@pytest.fixture
def started(engine, monkeypatch):
    """Lets ``generate`` and ``chat`` find that engine already open."""
    for verb in (chat, generate):
        monkeypatch.setattr(verb, "open_engine", lambda args, **changes: nullcontext(engine))


def run(capsys, *words: str) -> tuple[int, str, str]:
    """Runs one verb in this process; returns exit code, stdout and stderr."""
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def test_generate_prints_answers_in_the_order_of_the_prompts(started, capsys):
    code, out, _ = run(
        capsys, "generate", *SMALL, "--max-tokens", "4", "--temperature", "0", "Once", "Twice", "--json"
    )
    both = json.loads(out)
    assert code == 0 and len(both) == 2
    _, out, _ = run(capsys, "generate", *SMALL, "--max-tokens", "4", "--temperature", "0", "Twice", "--json")
    assert json.loads(out)[0]["token_ids"] == both[1]["token_ids"]
    assert both[0]["usage"]["completion_tokens"] == len(both[0]["token_ids"]) <= 4


def test_generate_takes_token_ids_and_chat_turns(started, capsys):
    code, out, _ = run(capsys, "generate", *SMALL, "--token-ids", "5,6,7", "--max-tokens", "3", "--json")
    assert code == 0 and json.loads(out)[0]["usage"]["prompt_tokens"] == 3
    code, out, _ = run(
        capsys, "generate", *SMALL, "--chat", "--system", "Be kind.", "Hello", "--max-tokens", "3", "--json"
    )
    assert code == 0 and json.loads(out)[0]["usage"]["prompt_tokens"] > 3


def test_generate_reads_stdin_when_no_prompt_is_given(started, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon\n"))
    code, out, _ = run(capsys, "generate", *SMALL, "--max-tokens", "3", "--json")
    assert code == 0 and json.loads(out)[0]["usage"]["prompt_tokens"] >= 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "--model", "/nowhere", "x"], "/nowhere"),
        (["generate", "--concurrency", "9", "x"], "max_concurrency"),
        (["generate", "--kv-capacity", "lots", "x"], "--kv-capacity"),
        (["generate", "--token-ids", "1,x"], "--token-ids"),
        (["generate", "--token-ids", "1", "--chat"], "--chat"),
        (["generate", "--system", "s", "x"], "--system"),
        (["generate", "--temperature", "-1", "x"], "temperature"),
        (["doctor", "--model", "/nowhere"], "/nowhere"),
        (["demo", "--max-context", "0"], "max_context"),
    ],
)
def test_mistakes_are_one_clear_line_and_exit_code_2(capsys, words, said):
    code, out, err = run(capsys, *words)
    assert code == 2 and out == ""
    assert err.count("\n") == 1 and said in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--token-ids", "999999"], "999999"), (["word " * 400], "max_context = 256")],
    ids=["id", "long"],
)
def test_prompts_that_cannot_run_are_mistakes_too(started, capsys, words, said):
    code, out, err = run(capsys, "generate", *words)
    assert code == 2 and out == ""
    assert err.count("\n") == 1 and said in err


@pytest.mark.parametrize("words", [[], ["nothing"], ["bench"], ["generate", "--max-tokens", "many", "x"]])
def test_unknown_words_are_exit_code_2(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2


def test_doctor_reports_what_would_fit(capsys):
    code, out, _ = run(capsys, "doctor", *SMALL, "--json")
    report = json.loads(out)
    assert code == 0 and report["problems"] == [] and report["packages"]["jax"]
    axes = report["fit"]["axes"].values()
    assert report["fit"]["planned_bytes"] == sum(axis["planned_bytes"] for axis in axes) > 0
    code, out, _ = run(capsys, "doctor", *SMALL)
    assert code == 0 and "what would be allocated" in out


def test_chat_holds_a_conversation_over_a_pipe(started, capsys, monkeypatch):
    turns = "/regenerate\nHello there\n/regenerate\n/unknown\n\n/reset\nHow are you?\n/quit\nnever read\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(turns))
    code, out, err = run(capsys, "chat", *SMALL, "--max-tokens", "5", "--seed", "3")
    assert code == 0
    assert (
        len(out.rstrip("\n").splitlines()) >= 3
    )  # an answer, the same turn again, an answer after the reset
    assert "nothing to regenerate" in err and "/unknown" in err


def test_demo_holds_both_conversations_and_reports(capsys):
    code, out, _ = run(capsys, "demo", "--concurrency", "2", "--max-tokens", "6", "--json")
    report = json.loads(out)
    assert code == 0 and {turn["conversation"] for turn in report["turns"]} == {"Ana", "Ben"}
    assert report["completion_tokens"] == sum(turn["completion_tokens"] for turn in report["turns"])
    prompts = [turn["prompt_tokens"] for turn in report["turns"] if turn["conversation"] == "Ana"]
    assert prompts == sorted(prompts) and len(set(prompts)) == len(
        prompts
    )  # each turn carries the ones before


def test_a_closed_pipe_is_no_error():
    script = f"{sys.executable} -m ninfer_jax.cli.main doctor --json | head -c 1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stdout == "{" and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (OptionError("x"), 2),
        (FileNotFoundError(2, "no", "/x"), 2),
        (RequestError(RequestErrorKind.CONTEXT_LENGTH_EXCEEDED, "x"), 2),
        (RequestError(RequestErrorKind.FAULT, "x"), 1),
        (EngineClosedError("x"), 1),
        (ValueError("a defect"), None),
    ],
)
def test_mistakes_failures_and_defects_differ(failure, code):
    assert exit_code_of(failure) == code


def test_one_line_keeps_the_file_name_of_an_os_error():
    assert (
        one_line(FileNotFoundError(2, "No such file or directory", "/x")) == "/x: No such file or directory"
    )
    assert one_line(ValueError("two\nlines")) == "two lines"


def test_digits_that_are_no_decimals_are_one_line_and_two(capsys):
    for words in (("--token-ids", "²"), ("--kv-capacity", "²", "x")):
        code, out, err = run(capsys, "generate", *words)
        assert (code, out) == (2, "") and "got '²'" in err


@pytest.mark.parametrize("read", [generate.read_stdin, lambda: chat.read_turn(False)])
def test_input_that_is_no_text_is_one_clear_mistake(monkeypatch, read):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff\n"), encoding="utf-8"))
    with pytest.raises(PromptError, match="standard input is not utf-8 text"):
        read()
