"""What an engine writes down: its request log adds up to its stats, its traced plans repeat bit for bit."""

from __future__ import annotations

import json
import random
import time
from collections import Counter

import pytest

from ninfer_jax import worker
from ninfer_jax.cli.main import main
from ninfer_jax.engine import Engine
from ninfer_jax.errors import OptionError, RequestError
from ninfer_jax.sampling_params import SamplingParams

SECRET = "xyzzy plugh"


def talk(kit, engine, rounds: int = 4) -> None:
    """Three sessions under pressure, with a cancelled, a late and an impossible request among them."""
    rng = random.Random(7)
    prompts = {name: [rng.randrange(50) for _ in range(60)] for name in ("a", "b", "c")}
    for number in range(rounds):
        for name, prompt in prompts.items():
            params = SamplingParams(max_tokens=6, seed=number, ignore_eos=True)
            result = engine.submit(prompt, sampling=params, session=f"{SECRET} {name}").result()
            prompt += [*result.token_ids, *(rng.randrange(50) for _ in range(20))]
    cancelled = engine.submit(prompts["a"], sampling=SamplingParams(max_tokens=50))
    for _ in range(4):
        engine.step()
    cancelled.cancel()
    cancelled.result()
    blocker = engine.submit([1] * 40, sampling=SamplingParams(max_tokens=60), cache="disabled")
    late = engine.submit([2] * 40, sampling=SamplingParams(max_tokens=60), timeout_s=1e-12)
    with pytest.raises(RequestError):
        late.result()
    blocker.result()
    kit.drain(engine)


@pytest.fixture
def busy(kit, tmp_path, monkeypatch):
    """An engine that has done all that under a real clock, with its two records."""
    monkeypatch.setattr(worker, "ALONE_ALLOWANCE_NS", 50_000_000)
    log, plans = tmp_path / "requests.jsonl", tmp_path / "plans"
    engine = kit.engine(
        clock=time.monotonic_ns,
        pages=5,
        request_log=str(log),
        trace_plans=str(plans),
        max_concurrency=1,
        device_state_slots=2,
    )
    talk(kit, engine)
    return (
        engine,
        [json.loads(line) for line in log.read_text().splitlines()],
        sorted(plans.glob("*.json")),
        log,
    )


def test_the_sums_of_the_log_are_the_stats(busy):
    engine, lines, _, _ = busy
    stats = engine.stats()
    assert len(lines) == stats["submitted"] == 15
    assert sorted(line["request_id"] for line in lines) == list(range(1, 16))

    def counted(name):
        return dict(Counter(line[name] for line in lines if line[name] is not None))

    assert counted("finish_reason") == stats["finished"] and stats["finished"]["cancelled"] == 1
    assert counted("error") == stats["failed"] and len(stats["failed"]) == 1
    assert sum(line["completion_tokens"] for line in lines) == stats["completion_tokens"]
    admitted = [line for line in lines if line["materialization"] is not None]
    records = [line["materialization"] for line in admitted]
    assert len(admitted) == stats["admissions"]
    assert sum(line["prompt_tokens"] for line in admitted) == stats["prompt_tokens"]
    for name in ("reused_tokens", "restored_bytes", "offloaded_bytes"):
        assert sum(record[name] for record in records) == stats[name]
    assert stats["reused_tokens"] > 0 and stats["offloaded_bytes"] > 0
    assert dict(Counter(record["source"] for record in records)) == stats["sources"]
    assert dict(Counter(record["stop_reason"] for record in records)) == stats["stop_reasons"]
    misses = Counter(record["miss_reason"] for record in records if record["miss_reason"] is not None)
    assert dict(misses) == stats["misses"]
    for line, record in zip(admitted, records, strict=True):
        assert record["reused_tokens"] + record["prefill_tokens"] == line["prompt_tokens"]
        assert all(seconds >= 0 for seconds in line["timings"].values())


def test_the_log_holds_no_words(busy):
    _, _, plans, log = busy
    for path in (log, *plans):
        text = path.read_text()
        assert SECRET not in text and "token_ids" not in text


def test_every_admission_leaves_a_plan_that_repeats(busy, capsys):
    engine, lines, plans, _ = busy
    named = {path.stem.split("-")[1] for path in plans}
    assert len(plans) == engine.stats()["admissions"]
    assert named == {line["materialization"]["plan_id"] for line in lines if line["materialization"]}
    for path in plans:
        assert main(["plan", str(path), "--verify"]) == 0
    assert capsys.readouterr().out.count("bit for bit") == len(plans)


def test_the_log_is_appended_to_and_closed_with_the_engine(kit, tmp_path):
    log = tmp_path / "requests.jsonl"
    for count in (1, 2):
        engine = kit.engine(request_log=str(log))
        engine.submit([1, 2, 3], sampling=SamplingParams(max_tokens=2)).result()
        left = engine.submit([4, 5, 6], sampling=SamplingParams(max_tokens=2))
        engine.close()
        with pytest.raises(RequestError):
            left.result()
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert len(lines) == 2 * count and lines[-1]["error"] == "unavailable"


def test_a_disk_that_fails_stops_the_records_and_no_request(kit, tmp_path, monkeypatch):
    engine = kit.engine(request_log=str(tmp_path / "log"), trace_plans=str(tmp_path / "plans"))

    class Full:
        closed = False

        def write(self, text):
            raise OSError("no space left")

        def close(self):
            self.closed = True

    engine._worker._log.close()
    monkeypatch.setattr(engine._worker._log, "_file", Full())
    (tmp_path / "plans").rmdir()
    for _ in range(2):
        answer = engine.submit([1, 2, 3], sampling=SamplingParams(max_tokens=2)).result()
        assert answer.finish_reason == "length"
    assert engine.stats()["faults"] == 0


@pytest.mark.parametrize("option", ["request_log", "trace_plans"])
def test_a_place_that_cannot_be_written_is_refused_before_the_weights_are_read(option, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=option):
        Engine.from_pretrained("demo", **{option: str(tmp_path / "file" / "below")})
