"""Sessions that survive: saved, restored in another engine, continued with the same bits (C-11, PER-01)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ninfer_jax import Engine, SamplingParams
from ninfer_jax.cli.main import main
from ninfer_jax.engine_sessions import folder_name
from ninfer_jax.errors import SessionError, SessionErrorKind
from ninfer_jax.session_files import open_session_files
from ninfer_jax.session_store import read_contents

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "tests" / "data" / "reference"
SMALL = {"max_context": 512, "max_concurrency": 2, "prefill_chunk": 64, "kv_capacity": 1024}
PROMPT = [(7 * i + 3) % 90 for i in range(90)]


def open_engine(kind: str, **changes) -> Engine:
    return Engine.from_pretrained(REFERENCE / kind, threaded=False, **{**SMALL, **changes})


def answer(engine: Engine, prompt, session="ana", **sampling):
    params = SamplingParams(max_tokens=9, logprobs=5, seed=1, **sampling)
    return engine.submit(prompt, sampling=params, session=session, anchor_prompt_end=True).result()


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_restored_session_goes_on_with_the_bits_of_one_that_never_stopped(tmp_path, kind):
    with open_engine(kind) as engine:
        first = answer(engine, PROMPT, temperature=0.8)
        before = engine.stats()["occupancy"], engine._parts.program.resource_revision
        engine.save_session("ana", tmp_path / "s")
        assert (engine.stats()["occupancy"], engine._parts.program.resource_revision) == before  # PER-02
        longer = [*PROMPT, *first.token_ids, 5, 6, 7]
        never_stopped = answer(engine, longer, temperature=0.8)
    with open_engine(kind) as engine:
        report = engine.restore_session(tmp_path / "s")
        assert [kind for kind, _ in report.kept] == ["long_anchor", "session_endpoint"]
        assert (report.tokens, report.dropped) == (98, ())
        continued = answer(engine, longer, session=None, temperature=0.8)
        assert continued.usage.cached_tokens == never_stopped.usage.cached_tokens == 98
        assert continued.materialization.prefill_tokens == len(longer) - 98  # only what is new
        assert (continued.token_ids, continued.logprobs) == (never_stopped.token_ids, never_stopped.logprobs)
        engine._parts.program.check()


def test_a_smaller_engine_with_other_chunks_and_lanes_takes_it(tmp_path):
    with open_engine("dense") as engine:
        first = answer(engine, PROMPT)
        engine.save_session("ana", tmp_path / "s")
    with open_engine(
        "dense", max_context=256, kv_capacity=256, max_concurrency=1, prefill_chunk=128,
        device_state_slots=0, host_state_slots=0,
    ) as engine:  # fmt: skip
        report = engine.restore_session(tmp_path / "s", session="ana")
        assert report.kept == (("session_endpoint", 98),)
        assert report.dropped == (("long_anchor", 89, "no state slot is free"),)
        again = answer(engine, [*PROMPT, *first.token_ids, 5])
        assert again.usage.cached_tokens == 98
        engine.save_session("ana", tmp_path / "s")  # a request after the restore takes the binding over (Y-4)
        assert engine.list_sessions(tmp_path)[0].tokens > 98


def test_what_does_not_belong_or_fit_is_refused_and_nothing_changes(tmp_path):
    with open_engine("dense") as engine:
        answer(engine, PROMPT)
        engine.save_session("ana", tmp_path / "s")
    with pytest.raises(SessionError, match="98 tokens, max_context here is 64") as refused:
        read_contents(open_session_files(tmp_path / "s"), max_tokens=64)
    assert refused.value.kind is SessionErrorKind.TOO_LARGE
    with open_engine("dense", load_format="dummy") as engine:  # the same geometry, other weights
        before = engine.stats()
        with pytest.raises(SessionError, match="weights: saved") as refused:
            engine.restore_session(tmp_path / "s")
        assert refused.value.kind is SessionErrorKind.FOREIGN
        assert engine.stats()["occupancy"] == before["occupancy"]
        assert engine.stats()["cache"] == before["cache"]


def test_unknown_sessions_and_paths_say_so(tmp_path):
    with open_engine("dense") as engine:
        with pytest.raises(SessionError, match="no finished context is bound to 'nobody'"):
            engine.save_session("nobody", tmp_path / "s")
        with pytest.raises(SessionError, match="holds no saved session"):
            engine.restore_session(tmp_path / "s")
        with pytest.raises(SessionError, match="is no directory"):
            engine.list_sessions(tmp_path / "missing")


def test_a_session_directory_outlives_the_engine(tmp_path):
    directory = str(tmp_path / "all")
    with open_engine("dense", session_dir=directory) as engine:
        first = {key: answer(engine, [key_tokens, *PROMPT], session=key) for key, key_tokens in KEYS.items()}
    assert sorted(os.listdir(directory)) == sorted(folder_name(key) for key in KEYS)
    with open_engine("dense", session_dir=directory) as engine:
        assert engine.stats()["cache"]["sessions_bound"] == 2
        for key, head in KEYS.items():
            again = answer(engine, [head, *PROMPT, *first[key].token_ids, 9], session=key)
            assert again.usage.cached_tokens == 99
        assert {facts.session for facts in engine.list_sessions(directory)} == set(KEYS)


KEYS = {"ana": 1, "../b/ö": 2}


def test_the_command_line_lists_inspects_verifies_and_erases(tmp_path, capsys):
    with open_engine("dense") as engine:
        answer(engine, PROMPT)
        engine.save_session("ana", tmp_path / "s")
    assert main(["session", "list", str(tmp_path), "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert (facts["session"], facts["tokens"]) == ("ana", 98)
    assert main(["session", "inspect", str(tmp_path / "s")]) == 0
    assert "98 tokens" in capsys.readouterr().out
    assert main(["session", "verify", str(tmp_path / "s")]) == 0
    assert "every byte is what was saved" in capsys.readouterr().out
    damaged = next(p for p in (tmp_path / "s").rglob("*") if p.is_file() and p.stat().st_size > 2000)
    contents = bytearray(damaged.read_bytes())
    contents[len(contents) // 2] ^= 4
    damaged.write_bytes(contents)
    assert main(["session", "verify", str(tmp_path / "s")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["session", "erase", str(tmp_path / "s")]) == 0
    assert not (tmp_path / "s").exists()
    assert main(["session", "erase", str(tmp_path)]) == 2


@pytest.mark.slow
def test_another_process_goes_on_where_this_one_saved(tmp_path):
    def run(*arguments: str) -> dict:
        command = [sys.executable, "-m", "ninfer_jax.cli.main", "session", *arguments]
        engine = ["--max-context", "512", "--concurrency", "1", "--max-tokens", "12", "--temperature", "0"]
        done = subprocess.run(
            [*command, *engine, "--json"], cwd=ROOT, capture_output=True, text=True, check=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
        return json.loads(done.stdout)

    first = run("save", str(tmp_path / "s"), "--message", "Who was the wolf?")
    again = run("restore", str(tmp_path / "s"), "--message", "Who was the wolf?")
    assert again["text"] == first["text"]
    assert again["reused_tokens"] == again["prompt_tokens"]  # the same prompt: nothing is computed
