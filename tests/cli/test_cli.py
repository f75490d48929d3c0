"""The command line as its users meet it: reports that parse, one line and exit code 2 for mistakes."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from contextlib import nullcontext

import pytest

import ninfer_jax
from ninfer_jax import Engine
from ninfer_jax.cli import chat, demo, generate
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


def test_generate_passes_tools_thinking_and_timeout_on(started, capsys, tmp_path):
    def generate_with(*words: str) -> tuple[int, str, str]:
        return run(capsys, "generate", *SMALL, "--chat", "Hi", "--max-tokens", "2", "--json", *words)

    def prompt_tokens(*words: str) -> int:
        return json.loads(generate_with(*words)[1])[0]["usage"]["prompt_tokens"]

    tools = tmp_path / "tools.json"
    tools.write_text('[{"type": "function", "function": {"name": "f", "parameters": {}}}]')
    code, _, err = generate_with("--tools", str(tools))
    assert (
        code == 2 and "the prompt has" in err
    )  # the instructions for tools alone are longer than 256 tokens
    assert prompt_tokens("--timeout", "600") < 256
    assert prompt_tokens("--thinking") != prompt_tokens("--no-thinking")  # facts 8.3: an empty block or none
    tools.write_text("{}")
    code, _, err = generate_with("--tools", str(tools))
    assert code == 2 and "holds dict, expected a list of tool objects" in err


def test_generate_gives_up_when_the_time_is_over(started, capsys):
    code, out, _ = run(
        capsys, "generate", *SMALL, "--temperature", "0", "--timeout", "0.001", "--json", "Once upon a time"
    )
    (result,) = json.loads(out) if code == 0 else ({"finish_reason": "timeout"},)  # or it never began
    assert code in (0, 1) and result["finish_reason"] == "timeout"


def test_the_version_is_the_installed_one_and_read_only_when_asked_for(capsys, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"ninfer-jax": "1.2.3"}[name])
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, "ninfer-jax 1.2.3\n")
    assert ninfer_jax.__version__ == "1.2.3" and "__version__" not in vars(ninfer_jax)

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert ninfer_jax.__version__ == "0+uninstalled"


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
        (["generate", "--tools", "t.json", "x"], "--tools needs --chat"),
        (["generate", "--no-thinking", "x"], "--thinking needs --chat"),
        (["generate", "--chat", "--tools", "/nowhere.json", "x"], "/nowhere.json"),
        (["generate", "--timeout", "0", "x"], "--timeout: got 0"),
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


def test_demo_shows_plans_reuse_and_the_cold_check(capsys):
    code, out, _ = run(capsys, "demo", "--max-tokens", "60", "--json")
    report = json.loads(out)
    turns = report["turns"]
    assert code == 0 and {turn["conversation"] for turn in turns} == {"Ana", "Ben", "Guest"}
    for turn in turns:
        assert turn["reused_tokens"] + turn["computed_tokens"] == turn["prompt_tokens"]
        assert turn["plan"][0].startswith("source")
    ana = [turn["prompt_tokens"] for turn in turns if turn["conversation"] == "Ana"]
    assert ana == sorted(set(ana))  # each turn carries the ones before
    assert report["reused_tokens"] == report["stats"]["reused_tokens"] > 0
    assert report["stats"]["offloaded_bytes"] > 0  # it did not all fit
    assert report["cold_equals_warm"]["is_equal"] and "7 requests" in report["cold_equals_warm"]["checked"]
    after = report["after_restart"]
    assert after["restored_checkpoints"] == 3 and after["reused_tokens"] > 0


def test_demo_prints_a_page_for_a_person(capsys):
    code, out, _ = run(capsys, "demo", "--max-tokens", "4")
    assert code == 0 and "Ana:" in out and "| source" in out
    assert "cold equals warm: 7 requests" in out and "the same bits" in out.replace("\n", " ")


@pytest.mark.parametrize("words", ["doctor --json", "--help"], ids=["doctor", "help"])
def test_a_closed_pipe_is_no_error(words):
    # nobody reads at all: everything is still held back when the verb has ended
    script = f"{sys.executable} -m ninfer_jax.cli.main {words} | head -c 0; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_a_reader_that_leaves_during_the_demo_ends_it(monkeypatch):
    closed = []
    monkeypatch.setattr(Engine, "close", lambda self, close=Engine.close: (closed.append(1), close(self)))
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w") as stdout, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stdout)
        assert main(["demo", "--max-tokens", "4"]) == 0
    assert closed


@pytest.mark.parametrize("verb", ["generate", "demo", "chat"])
def test_an_interrupt_ends_quietly_with_130_and_a_closed_engine(verb, capsys, monkeypatch):
    closed = []

    class Interrupted(nullcontext):
        def __exit__(self, *failure):
            closed.append(verb)

    def press(*unused, **named):
        raise KeyboardInterrupt

    class Keys:
        generate = submit = stream = stats = press

    for module in (chat, generate, demo):
        monkeypatch.setattr(module, "open_engine", lambda args, **changes: Interrupted(Keys()))
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    code, _, err = run(capsys, verb, *(["x"] if verb == "generate" else []))
    assert (code, err, closed) == (130, "", [verb])


class Terminal:
    """A verb in a process of its own behind a pseudo-terminal, as a person at the keys has it."""

    def __init__(self, *words: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execv(sys.executable, [sys.executable, "-m", "ninfer_jax.cli.main", *words])
        self.unread = ""

    def wait_for(self, text: str, limit_s: float = 240.0) -> str:
        """Returns what is shown up to and with `text`."""
        deadline_s = time.monotonic() + limit_s
        while text not in self.unread:
            ready, _, _ = select.select([self.fd], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, f"waited for {text!r}, got {self.unread!r}"
            self.unread += self._read()
        shown, found, self.unread = self.unread.partition(text)
        return shown + found

    def _read(self) -> str:
        try:
            data = os.read(self.fd, 4096)
        except OSError:  # what Linux says at the end
            data = b""
        assert data, f"it ended: {self.unread!r}"
        return data.decode("utf-8", "replace")

    def type(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def end(self) -> int:
        """Returns the exit code of a verb that is about to end."""
        try:
            while os.read(self.fd, 4096):
                pass
        except OSError:
            pass
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.pid = 0
        return code

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)


@pytest.mark.slow  # starts two engines in processes of their own
@pytest.mark.parametrize("at_the_prompt", [False, True], ids=["during an answer", "at the prompt"])
def test_chat_on_a_terminal(at_the_prompt):
    terminal = Terminal("chat", *SMALL, "--temperature", "0", "--max-tokens", "200")
    try:
        help_text = terminal.wait_for("> ")
        assert "Ctrl-C stops an answer" in help_text
        if at_the_prompt:
            terminal.type("\x03")
            assert terminal.end() == 130
            return
        terminal.type("Hello!\n")
        assert len(terminal.wait_for("\n> ").splitlines()) >= 2  # the echo and an answer
        terminal.type("Tell me a fairy tale.\n")
        terminal.wait_for("tale.\r\n")  # the echo
        terminal.wait_for(" ")  # the answer has begun
        terminal.type("\x03")
        stopped = terminal.wait_for("\n> ")  # the chat goes on
        terminal.type("And you?\n")
        terminal.wait_for("you?\r\n")
        assert len(terminal.wait_for("\n> ").strip(" >\r\n")) > 0 and len(stopped) < 600
        terminal.type("\x04")
        assert terminal.end() == 0
    finally:
        terminal.close()


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
