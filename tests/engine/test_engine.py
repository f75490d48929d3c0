"""The engine's promises on a model-free executor, driven one boundary at a time."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from ninfer_jax.errors import EngineClosedError, OptionError, PromptError, RequestError, RequestErrorKind
from ninfer_jax.results import Finished, GenerationStart, TextDelta, Usage
from ninfer_jax.sampling_params import SamplingParams

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


def params(max_tokens=5, **changes):
    return SamplingParams(max_tokens=max_tokens, seed=changes.pop("seed", 0), **changes)


@pytest.mark.smoke
def test_one_request_from_submission_to_its_result(kit):
    engine = kit.engine()
    handle = engine.submit(PROMPT, sampling=params())
    assert not handle.done()
    result = handle.result()
    assert list(result.token_ids) == kit.solo(engine, PROMPT, params())
    assert (result.finish_reason, result.stop_detail) == ("length", None)
    assert result.usage == Usage(prompt_tokens=20, completion_tokens=5, cached_tokens=0)
    assert result.usage.total_tokens == 25
    assert (result.materialization.source, result.materialization.reused_tokens) == ("root", 0)
    assert result.logprobs is None
    assert result.timings.total_s > 0
    kit.assert_quiet(engine)


def test_states_in_order(kit):
    # Q-1, seen from outside: prompt of 20 in chunks of 16 is two chunks, then one token a round
    engine = kit.engine()
    handle = engine.submit(PROMPT, sampling=params(3))
    seen = []
    while not handle.done():
        assert engine.step()
        stats = engine.stats()
        seen.append((stats["prefill_chunks"], sum(stats["decode_rounds"].values()), stats["active"]))
    assert seen == [(1, 0, 1), (2, 0, 1), (2, 1, 1), (2, 2, 0)]


@pytest.mark.smoke
def test_batched_rows_equal_their_solo_runs(kit):
    engine = kit.engine(max_concurrency=4)
    shapes = ((20, 3), (7, 9), (1, 6), (16, 1), (5, 12))
    requests = [(PROMPT[:length], params(tokens)) for length, tokens in shapes]
    handles = [engine.submit(prompt, sampling=sampling) for prompt, sampling in requests]
    results = [handle.result() for handle in handles]
    for (prompt, sampling), result in zip(requests, results, strict=True):
        assert list(result.token_ids) == kit.solo(engine, prompt, sampling)
    assert max(map(int, engine.stats()["decode_rounds"])) > 1
    kit.assert_quiet(engine)


def test_decode_rounds_hold_exactly_the_ready_rows(kit):
    # exact B, no padding to C, no round without rows
    engine = kit.engine(max_concurrency=8)
    handles = [engine.submit([1 + i], sampling=params(2 + i)) for i in range(3)]
    for handle in handles:
        handle.result()
    rounds = engine.stats()["decode_rounds"]
    assert sum(int(rows) * count for rows, count in rounds.items()) == 1 + 2 + 3
    assert set(rounds) <= {"1", "2", "3"}


def test_prefill_and_decode_alternate(kit):
    # a long prompt advances one chunk per boundary with a decode round between
    engine = kit.engine(max_concurrency=2, chunk=8)
    first = engine.submit([1], sampling=params(40))
    while engine.stats()["completion_tokens"] < 1:
        engine.step()
    second = engine.submit(list(range(40)), sampling=params(1))
    before = engine.stats()
    for _ in range(8):
        engine.step()
    after = engine.stats()
    assert after["prefill_chunks"] - before["prefill_chunks"] == 4
    assert after["decode_rows"] - before["decode_rows"] == 4
    first.cancel()
    second.cancel()


def test_stop_token_ids_end_the_answer(kit):
    engine = kit.engine()
    drawn = kit.solo(engine, PROMPT, params(20))
    stop = drawn[6]
    result = engine.submit(PROMPT, sampling=params(20, stop_token_ids=(stop,))).result()
    assert list(result.token_ids) == drawn[: drawn.index(stop) + 1]
    assert (result.finish_reason, result.stop_detail) == ("stop", stop)


def test_end_of_sequence_ids_of_the_checkpoint_end_the_answer_unless_ignored(kit):
    probe = kit.engine()
    drawn = kit.solo(probe, PROMPT, params(20))
    engine = kit.engine(eos=frozenset({drawn[4]}))
    result = engine.submit(PROMPT, sampling=params(20)).result()
    assert (len(result.token_ids), result.finish_reason) == (drawn.index(drawn[4]) + 1, "stop")
    result = engine.submit(PROMPT, sampling=params(20, ignore_eos=True)).result()
    assert (list(result.token_ids), result.finish_reason) == (drawn, "length")


def test_max_tokens_defaults_to_the_rest_of_the_context_and_never_exceeds_it(kit):
    engine = kit.engine(max_context=64)
    assert engine.submit(PROMPT).result().usage.completion_tokens == 44
    assert engine.submit(PROMPT, sampling=params(1000)).result().usage.completion_tokens == 44
    assert engine.submit(PROMPT, sampling=SamplingParams(min_tokens=500)).result().finish_reason == "length"


def test_prompts_longer_than_the_context_are_refused_at_the_door(kit):
    # request-local, nothing queued, the place comes back
    engine = kit.engine(max_context=64)
    for length in (64, 65, 200):
        message = f"the prompt has {length} tokens.*max_context = 64"
        with pytest.raises(RequestError, match=message) as refused:
            engine.submit([1] * length)
        assert refused.value.kind is RequestErrorKind.CONTEXT_LENGTH_EXCEEDED
    assert engine.stats()["outstanding"] == 0
    assert engine.submit([1] * 63).result().usage.completion_tokens == 1


def test_rdy_01_infeasible_even_alone_fails_by_itself(kit):
    # RDY-01: the pool is smaller than one longest request; the queue behind goes on
    engine = kit.engine(max_context=256, pages=2)
    too_large = engine.submit([1] * 100, sampling=params(100))
    fine = engine.submit([1] * 100, sampling=params(20))
    with pytest.raises(RequestError, match="do not fit this engine even alone") as refused:
        too_large.result()
    assert refused.value.kind is RequestErrorKind.CONTEXT_LENGTH_EXCEEDED
    assert fine.result().finish_reason == "length"
    kit.assert_quiet(engine)


def test_rdy_02_a_blocked_head_waits_and_only_a_proven_request_passes_it(kit):
    # RDY-02, SCH-01, Q-4, A-7: FIFO with the head blocking; a later request passes only if the head stays
    # possible beside it once its donor has ended
    engine = kit.engine(max_context=256, pages=4, max_concurrency=3)
    first = engine.submit([1] * 60, sampling=params(100))  # 3 of 4 pages, the donor
    head = engine.submit([2] * 200, sampling=params(30))  # all 4 pages: blocked
    stranding = engine.submit([3], sampling=params(2))  # fits now, but would leave 3 pages for the head
    for _ in range(20):
        engine.step()
    stats = engine.stats()
    assert (stats["active"], stats["waiting"], stats["backfills"]) == (1, 2, 0)
    assert stats["blocked_assessments"] == 2  # G-14: not re-examined while the revision stands still
    assert first.result().finish_reason == "length"
    assert head.result().timings.queue_s < stranding.result().timings.queue_s
    kit.assert_quiet(engine)


def test_bf_01_a_request_that_cannot_strand_the_head_passes_it(kit):
    engine = kit.engine(max_context=256, pages=4, max_concurrency=3)
    first = engine.submit([1] * 60, sampling=params(100))  # 3 of 4 pages, the donor
    head = engine.submit([2] * 100, sampling=params(28))  # 2 pages: blocked
    small = engine.submit([3], sampling=params(2))  # 1 page: 3 are left for the head
    for _ in range(20):
        engine.step()
    assert small.done() and not first.done() and engine.stats()["backfills"] == 1
    assert head.result().usage.completion_tokens == 28
    kit.assert_quiet(engine)


def test_overload_is_refused_at_the_door(kit):
    # C + pending places
    engine = kit.engine(max_concurrency=1, max_pending_requests=2)
    handles = [engine.submit(PROMPT, sampling=params()) for _ in range(3)]
    with pytest.raises(RequestError, match=r"3 requests are unfinished or unread, the limit is 3") as refused:
        engine.submit(PROMPT)
    assert refused.value.kind is RequestErrorKind.OVERLOADED
    assert [handle.result().finish_reason for handle in handles] == ["length"] * 3
    engine.submit(PROMPT, sampling=params()).result()


@pytest.mark.parametrize("read_first", [True, False])
def test_a_place_comes_back_once_in_either_order(kit, read_first):
    # response_done and consumer_released, exactly once in either order
    engine = kit.engine()
    handle = engine.submit(PROMPT, sampling=params())
    if read_first:  # the consumer goes before the response ends
        handle.close()
        assert engine.stats()["outstanding"] == 1
        kit.drain(engine)
    else:  # the response ends before the consumer reads it
        kit.drain(engine)
        assert handle.done() and engine.stats()["outstanding"] == 1
        handle.result()
    assert engine.stats()["outstanding"] == 0
    for _ in range(2):  # nothing that comes later gives it back again
        handle.close()
        handle.result()
        kit.drain(engine)
    del handle
    gc.collect()
    kit.drain(engine)
    assert engine.stats()["outstanding"] == 0


def test_an_abandoned_handle_cancels_its_request(kit):
    engine = kit.engine()
    for steps in range(6):  # waiting, prefilling, decoding
        handle = engine.submit(PROMPT, sampling=params(50))
        for _ in range(steps):
            engine.step()
        del handle
        gc.collect()
        kit.drain(engine)
        assert engine.stats()["outstanding"] == 0
    assert engine.stats()["finished"] == {"cancelled": 6}
    kit.assert_quiet(engine)


@pytest.mark.parametrize("steps", range(5))
def test_cancel_takes_effect_at_the_next_boundary_in_every_state(kit, steps):
    # Q-6; steps 0: waiting, 1: prefilling, 2..: decoding
    engine = kit.engine(max_concurrency=1)
    behind = None
    handle = engine.submit(PROMPT, sampling=params(50))
    for _ in range(steps):
        engine.step()
    if steps:
        behind = engine.submit(PROMPT, sampling=params(2))
    handle.cancel()
    handle.cancel()
    engine.step()
    assert handle.done()
    result = handle.result()
    assert result.finish_reason == "cancelled"
    assert list(result.token_ids) == kit.solo(engine, PROMPT, params(50))[: max(0, steps - 1)]
    if behind is not None:
        assert behind.result().finish_reason == "length"
    handle.cancel()  # harmless after the end
    kit.drain(engine)
    kit.assert_quiet(engine)


def test_a_cancel_that_arrives_during_the_step_accepts_nothing(kit):
    # a cancelled row accepts none; its neighbour's token is kept
    handles = []

    def cancel_during(step):
        if step == "decode" and handles:
            handles[0].cancel()

    engine = kit.engine(before_step=cancel_during)
    one, two = (engine.submit([token], sampling=params(5)) for token in (1, 2))
    while engine.stats()["decode_rows"] < 2:
        engine.step()
    (before,) = (len(job.token_ids) for job in engine._worker._jobs.values() if job.response is one._response)
    handles.append(one)
    assert one.result().finish_reason == "cancelled"
    assert len(one.result().token_ids) == before
    assert list(two.result().token_ids) == kit.solo(engine, [2], params(5))
    kit.assert_quiet(engine)


def test_waiting_too_long_is_a_queue_timeout(kit, fake_clock):
    #
    engine = kit.engine(clock=fake_clock, max_concurrency=1, pending_timeout_s=10)
    running = engine.submit(PROMPT, sampling=params(100))
    waiting = engine.submit(PROMPT, sampling=params(2))
    engine.step()
    fake_clock.advance(11)
    engine.step()
    with pytest.raises(RequestError, match=r"waited 11\.0 s without being admitted") as late:
        waiting.result()
    assert late.value.kind is RequestErrorKind.QUEUE_TIMEOUT
    assert running.result().finish_reason == "length"  # the pending timeout ends with admission
    kit.assert_quiet(engine)


def test_a_requests_own_deadline_counts_in_every_state(kit, fake_clock):
    engine = kit.engine(clock=fake_clock, max_concurrency=1)
    running = engine.submit(PROMPT, sampling=params(100), timeout_s=5)
    waiting = engine.submit(PROMPT, sampling=params(2), timeout_s=4)
    for _ in range(5):
        engine.step()
    fake_clock.advance(4.5)
    engine.step()
    with pytest.raises(RequestError) as late:
        waiting.result()
    assert late.value.kind is RequestErrorKind.QUEUE_TIMEOUT
    assert not running.done()
    fake_clock.advance(1)
    result = running.result()
    assert (result.finish_reason, len(result.token_ids)) == ("timeout", 5)
    kit.assert_quiet(engine)


def test_events_of_one_answer(kit):
    engine = kit.engine()
    events = list(engine.submit(PROMPT, sampling=params(4)))
    assert events[0] == GenerationStart(request_id=1, prompt_tokens=20, reused_tokens=0, source="root")
    assert [type(event) for event in events[1:-1]] == [TextDelta] * 4
    kit.assert_well_formed(events)
    handle = engine.submit(PROMPT, sampling=params(4))
    list(handle)
    assert list(handle) == []  # a single pass
    assert list(handle.result().token_ids) == kit.solo(engine, PROMPT, params(4))


@pytest.mark.smoke
def test_streaming_equals_not_streaming(kit):
    engine = kit.engine(text=True)
    text = "The owl said: \u201cgood night\u201d"
    for seed in range(4):
        sampling = params(40, seed=seed)
        whole = engine.generate(text, sampling)
        events = list(engine.stream(text, sampling=sampling))
        kit.assert_well_formed(events)
        assert (events[-1].result.text, events[-1].result.token_ids) == (whole.text, whole.token_ids)


def test_stop_strings_end_text_and_never_show(kit):
    engine = kit.engine(text=True)
    whole = engine.generate("start", params(120))
    pairs = (whole.text[i : i + 2] for i in range(20, 100))
    stop = next(pair for pair in pairs if pair.isascii() and pair.isalnum())
    events = list(engine.stream("start", sampling=params(120, stop=stop)))
    kit.assert_well_formed(events)
    result = events[-1].result
    assert (result.finish_reason, result.stop_detail) == ("stop", stop)
    assert result.text == whole.text[: whole.text.index(stop)]


def test_text_held_back_comes_out_when_an_answer_is_cut_off(kit):
    engine = kit.engine(text=True)
    whole = engine.generate("start", params(60)).text
    held = next(character for character in whole[5:] if character.isascii() and character.isalnum())
    handle = engine.submit("start", sampling=params(60, stop=held + "\0"))
    engine.step()
    (job,) = engine._worker._jobs.values()
    while job.output.held != held:
        assert engine.step() and not handle.done()
    handle.cancel()
    events = list(handle)
    kit.assert_well_formed(events)
    assert events[-1].result.text == whole[: whole.index(held) + 1]


def test_logprobs_align_with_tokens(kit):
    engine = kit.engine()
    plain, rich = (
        engine.submit([token], sampling=params(6, logprobs=count)) for token, count in ((1, None), (2, 3))
    )
    result = rich.result()
    assert [entry.token_id for entry in result.logprobs] == list(result.token_ids)
    assert {entry.logprob for entry in result.logprobs} == {-1.0}
    assert {entry.top for entry in result.logprobs} == {((0, -1.0), (1, -1.0), (2, -1.0))}
    assert plain.result().logprobs is None
    events = engine.stream([2], sampling=params(3, logprobs=0))
    deltas = [event for event in events if isinstance(event, TextDelta)]
    assert [delta.logprobs[0].token_id for delta in deltas] == [delta.token_ids[0] for delta in deltas]
    assert deltas[0].logprobs[0].top == ()


def test_generate_keeps_order_for_any_number_of_prompts(kit):
    engine = kit.engine(max_concurrency=2, max_pending_requests=1)
    prompts = [[1 + i % 40] * (1 + i % 7) for i in range(30)]
    sampling = [params(1 + (5 * i) % 8) for i in range(30)]
    results = engine.generate(prompts, sampling)
    for prompt, chosen, result in zip(prompts, sampling, results, strict=True):
        assert list(result.token_ids) == kit.solo(engine, prompt, chosen)
    assert engine.stats()["outstanding"] == 0
    kit.assert_quiet(engine)


def test_generate_takes_one_or_many_of_each_kind(kit):
    engine = kit.engine(text=True)
    one = engine.generate("hello", params(3))
    assert engine.generate(list(b"hello"), params(3)).text != ""
    assert [result.text for result in engine.generate(["hello", "hello"], params(3))] == [one.text] * 2
    assert engine.generate([], params(3)) == []
    array = np.array([5, 6, 7])
    assert engine.generate(array, params(3)).token_ids == engine.generate([5, 6, 7], params(3)).token_ids
    assert len(engine.generate(np.array([[5, 6], [7, 8]]), params(3))) == 2
    with pytest.raises(OptionError, match=r"sampling: got 1 for 2 prompts"):
        engine.generate(["a", "b"], [params(3)])


def test_generate_lets_go_of_everything_when_one_prompt_is_refused(kit):
    engine = kit.engine(max_context=64)
    with pytest.raises(RequestError, match="the prompt has 70 tokens"):
        engine.generate([[1], [2], [3] * 70, [4]], params(50))
    kit.drain(engine)
    assert engine.stats()["outstanding"] == 0
    kit.assert_quiet(engine)


def test_generate_never_waits_for_places_that_its_own_thread_holds(kit):
    engine = kit.engine(max_concurrency=1, max_pending_requests=1)
    unread = [engine.submit([1], sampling=params(1)) for _ in range(2)]
    with pytest.raises(RequestError, match="2 requests are unfinished or unread"):
        engine.generate([2], params(1))
    for handle in unread:
        handle.close()
    assert engine.generate([2], params(1)).finish_reason == "length"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda e: e.submit([]), PromptError, r"prompt: got list of length 0, expected text, token ids"),
        (lambda e: e.submit(3.5), PromptError, r"prompt: got float"),
        (lambda e: e.submit([1, "a"]), PromptError, r"prompt: got list of length 2"),
        (lambda e: e.submit([1, 99]), PromptError, r"99"),
        (lambda e: e.submit("text"), PromptError, r"no tokenizer"),
        (lambda e: e.submit([{"role": "user", "content": "hi"}]), PromptError, r"no tokenizer"),
        (lambda e: e.submit([1], tools=[]), OptionError, r"tools belongs to messages"),
        (
            lambda e: e.submit("a", anchor_prompt_end=True),
            OptionError,
            r"anchor_prompt_end belongs to prompts of token ids, got a prompt of str",
        ),
        (lambda e: e.submit([1], sampling={"max_tokens": 3}), OptionError, r"sampling: got dict"),
        (lambda e: e.submit([1], sampling=SamplingParams(top_p=2)), OptionError, r"top_p: got 2"),
        (lambda e: e.submit([1], sampling=SamplingParams(logit_bias={70: 1.0})), OptionError, r"logit_bias"),
        (lambda e: e.submit([1], timeout_s=0), OptionError, r"timeout_s: got 0"),
        (lambda e: e.submit([1], session=""), OptionError, r"session: got 0 bytes, expected 1\.\.256"),
        (lambda e: e.submit([1], session="x" * 257), OptionError, r"session: got 257 bytes"),
        (lambda e: e.submit([1], retention="live_session"), OptionError, r"'live_session' without a session"),
        (
            lambda e: e.submit([1], cache="on"),
            OptionError,
            r"cache: got 'on', expected one of 'read_",
        ),
        (
            lambda e: e.submit([1], colour="red"),
            OptionError,
            r"unknown argument colour; .* session",
        ),
        (lambda e: e.chat("hello"), PromptError, r"chat: got str"),
        (lambda e: e.generate(5), PromptError, r"prompts: got int"),
    ],
)
def test_mistakes_are_refused_before_anything_is_queued(kit, call, error, message):
    engine = kit.engine()
    with pytest.raises(error, match=message):
        call(engine)
    stats = engine.stats()
    assert (stats["submitted"], stats["outstanding"]) == (0, 0)


def test_close_ends_everything_once(kit):
    engine = kit.engine(max_concurrency=1)
    running, waiting = (engine.submit(PROMPT, sampling=params(50)) for _ in range(2))
    for _ in range(4):
        engine.step()
    engine.close()
    for handle in (running, waiting):
        with pytest.raises(RequestError, match="the engine was closed") as ended:
            handle.result()
        assert ended.value.kind is RequestErrorKind.UNAVAILABLE
    engine.close()
    with pytest.raises(EngineClosedError, match="closed"):
        engine.submit(PROMPT)
    stats = engine.stats()
    assert (stats["waiting"], stats["active"], stats["outstanding"]) == (0, 0, 0)
    assert stats["occupancy"] == {}
    assert engine._parts.program._executor.closed


def test_with_closes(kit):
    with kit.engine() as engine:
        handle = engine.submit(PROMPT, sampling=params(50))
    with pytest.raises(RequestError, match="closed"):
        handle.result()


def test_mode_01_disabled_starts_from_root_and_says_so(kit):
    # MODE-01, MODE-03, C-10: root only, reused 0, with the same reservation as anybody
    engine = kit.engine()
    default = engine.submit(PROMPT, sampling=params(30))
    disabled = engine.submit(PROMPT, sampling=params(30), cache="disabled")
    engine.step()
    pages = engine.stats()["occupancy"]["main_pages"]
    assert pages == 2  # 50 tokens each
    assert disabled.result().materialization.miss_reason == "disabled"
    assert default.result().materialization.miss_reason == "no_match"
    assert disabled.result().usage.cached_tokens == 0
    assert disabled.result().token_ids == default.result().token_ids
    kit.assert_quiet(engine)


def test_cfg_06_the_same_prompt_twice_with_the_cache_off(kit):
    # CFG-06
    engine = kit.engine(max_concurrency=2, cache={"enabled": False})
    assert engine._parts.program.capacity.num_state_slots == 2
    for _ in range(2):
        result = engine.submit(PROMPT, sampling=params(), session="ana").result()
        assert (result.usage.cached_tokens, result.materialization.miss_reason) == (0, "disabled")
        kit.assert_quiet(engine)


def test_act_01_admission_reserves_prompt_and_whole_output(kit):
    # ACT-01: prompt 100 and output 50 are 3 pages and one state slot from the first boundary on
    engine = kit.engine(chunk=128)
    handle = engine.submit([1] * 100, sampling=params(50))
    engine.step()
    occupancy = engine.stats()["occupancy"]
    assert (occupancy["main_pages"], occupancy["main_pages_reserved"], occupancy["state_slots"]) == (3, 1, 1)
    handle.result()
    kit.assert_quiet(engine)


def test_sch_02_nothing_moves_while_decoding(kit):
    # SCH-02, R-11: ordinary progress changes no occupancy total and no revision
    engine = kit.engine(max_context=1024)
    handle = engine.submit(PROMPT, sampling=params(1000))
    for _ in range(3):
        engine.step()
    program = engine._parts.program
    before = (program.resource_revision, engine.stats()["occupancy"]["main_pages"])
    for _ in range(900):
        engine.step()
    assert (program.resource_revision, engine.stats()["occupancy"]["main_pages"]) == before
    handle.cancel()


def test_hints_are_kept_with_the_request(kit):
    engine = kit.engine()
    handle = engine.submit(
        PROMPT, sampling=params(), session="ana", automatic_private_anchors=9, update_session_index=False
    )
    engine.step()
    (job,) = engine._worker._jobs.values()
    hints = job.request.hints
    assert (hints.session, hints.retention, hints.automatic_private_anchors) == ("ana", "live_session", 2)
    assert hints.update_session_index is False
    assert job.request.publication_order == 1
    handle.cancel()


def test_describe_names_model_options_and_memory(kit):
    engine = kit.engine(max_concurrency=3, prefill_chunk=1024, chunk=64)  # longer than the context: cut
    text = engine.describe()
    for part in (
        "kernels: none",
        "in chunks of 64",
        "fake: 4 layers",
        "256 tokens per request",
        "3 at once",
        "8 private continuations",
        "total",
    ):
        assert part in text


def test_a_finished_event_carries_the_result(kit):
    *_, last = kit.engine().stream(PROMPT, sampling=params(2))
    assert isinstance(last, Finished) and last.result.finish_reason == "length"


def test_seeds_make_answers_repeatable_whatever_else_runs(kit):
    engine = kit.engine()
    sampling = SamplingParams(max_tokens=8, temperature=1.0, seed=11)
    alone = engine.submit(PROMPT, sampling=sampling).result().token_ids
    others = [engine.submit([i + 1], sampling=SamplingParams(max_tokens=20)) for i in range(3)]
    assert engine.submit(PROMPT, sampling=sampling).result().token_ids == alone
    for other in others:
        other.cancel()
