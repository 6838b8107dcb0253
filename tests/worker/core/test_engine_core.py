"""The model thread's loop: ends, cancels, failures and back pressure, on a scripted engine."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.errors import Code
from protocol.messages import Failed, Finished, StepOutputs
from tests.worker.engines import (
    END,
    INCARNATION,
    Broken,
    House,
    ScriptedEngine,
    ScriptedPipeline,
    breaking,
)
from worker.core import engine_core as loop_module
from worker.core.commands import Stop
from worker.core.failures import FAILURES_MAX, EngineKeepsFailing
from worker.process.device_errors import DeviceError
from worker.values import CacheSpec

# --- how a request ends ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "max_tokens", "pipeline", "tokens", "text", "reason"),
    [
        ((5, 6), 99, {}, [5, 6, END], "<5><6>", "stop"),
        ((5, 6, 7, 8), 3, {}, [5, 6, 7], "<5><6><7>", "length"),
        ((5,), 2, {}, [5, END], "<5>", "stop"),
        ((5, 6, 7, 8, 9), 99, {"stop": 7}, [5, 6, 7], "<5><6>", "stop"),
        ((5, 6), 99, {"held": 6}, [5, 6, END], "<5><6>", "stop"),
        ((5, 6), 2, {"held": 6}, [5, 6], "<5><6>", "length"),
    ],
    ids=["end", "length", "end in the last place", "stop string", "held until the end", "held, length"],
)
def test_an_answer_ends_with_its_reason_and_all_its_text(
    script: tuple[int, ...],
    max_tokens: int,
    pipeline: dict[str, int],
    tokens: list[int],
    text: str,
    reason: str,
) -> None:
    house = House()
    house.pipelines["a"] = lambda: ScriptedPipeline(**pipeline)
    house.submit("a", *script, max_tokens=max_tokens)
    house.run()
    assert (house.tokens("a"), house.text("a")) == (tokens, text)
    end = house.end("a")
    assert isinstance(end, Finished)
    assert (end.reason, end.incarnation) == (reason, INCARNATION)
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (3, len(tokens))


def test_phases_are_timed() -> None:
    house = House(rows_max=1, prefill_tokens=2)
    step_s = 0.5

    def tick() -> None:
        house.now += step_s

    house.engine.at = {(kind, n): tick for kind in ("prefill", "step") for n in range(99)}
    house.submit("a", 5, prompt=5)
    house.submit("b", 5, prompt=1)
    house.run()
    first, second = house.end("a"), house.end("b")
    assert isinstance(first, Finished)
    assert isinstance(second, Finished)
    assert first.timings.queued_s == 0.0
    assert first.timings.prefill_s == pytest.approx(2 * step_s)
    # The first step of a row only dispatches its first token.
    assert first.timings.decode_s == pytest.approx(3 * step_s)
    assert second.timings.queued_s == pytest.approx(5 * step_s)


def test_a_step_is_one_message_with_every_row() -> None:
    house = House(rows_max=4, prefill_tokens=99)
    for id, length in (("a", 1), ("b", 2), ("c", 3), ("d", 3)):
        house.submit(id, *range(10, 10 + length))
    house.run()
    carried = [[d.id for d in m.deltas] for m in house.published if isinstance(m, StepOutputs)]
    assert carried == [list("abcd"), list("abcd"), list("bcd"), list("cd")]
    assert all(house.reason(id) == "stop" for id in "abcd")


def test_a_cancel_in_each_phase_ends_that_row_alone_and_says_nothing_of_it() -> None:
    house = House(rows_max=2, prefill_tokens=2)
    house.submit("decoding", *range(1, 50), prompt=1, max_tokens=40)
    house.submit("prefilling", 5, prompt=90)
    house.submit("waiting", 5)
    house.submit("next", 7)

    def cancel() -> None:
        said.extend(house.tokens("decoding"))
        for id in ("decoding", "prefilling", "waiting", "unknown", "decoding"):
            house.drop(id)

    said: list[int] = []
    house.engine.at["step", 5] = cancel
    house.run()
    # The step that was in flight when the cancel arrived still counts.
    assert house.tokens("decoding") == [*said, len(said) + 1]
    assert [house.ends(id) for id in ("decoding", "prefilling", "waiting")] == [[], [], []]
    assert house.text("next") == "<7>"


# --- failures of one request -------------------------------------------------------------------------


def broken_pipeline() -> ScriptedPipeline:
    raise Broken("secret detail")


def fail(house: House, kind: str, id: str, call: int) -> None:
    """Let a request fail in this way; `call`: number of the engine's call for it."""
    match kind:
        case "pipeline":
            house.pipelines[id] = broken_pipeline
        case "output":
            house.pipelines[id] = lambda: ScriptedPipeline(bad=6)
        case "grammar":
            house.engine.ill[id] = 1
        case _:
            house.engine.at[kind, call] = breaking("secret detail")


FAULTS = pytest.mark.parametrize("kind", ["prefill", "start", "pipeline", "output", "grammar"])


@FAULTS
def test_a_request_that_fails_does_so_alone_and_without_details(kind: str) -> None:
    house = House(prefill_tokens=99)
    house.submit("before", *range(1, 9), prompt=3)
    house.submit("bad", 5, 6, prompt=30)
    house.submit("after", 6, prompt=3)
    # The two short prompts are run and started together.
    fail(house, kind, "bad", {"prefill": 1, "start": 2}.get(kind, 0))
    house.run()
    end = house.end("bad")
    assert isinstance(end, Failed)
    assert end.code == "engine_error"
    assert "Broken" in end.message
    assert "secret" not in end.message
    assert house.tokens("bad") == ([5] if kind in ("output", "grammar") else [])
    assert house.text("before") == "".join(f"<{n}>" for n in range(1, 9))
    assert house.text("after") == "<6>"
    assert house.engine.resets == 0


@FAULTS
def test_requests_with_faults_of_their_own_never_end_the_thread(kind: str) -> None:
    house, ids = House(rows_max=1), [f"r{n}" for n in range(3 * FAILURES_MAX)]
    for n, id in enumerate(ids):
        house.submit(id, 5, 6)
        for call in (3 * n, 3 * n + 1, 3 * n + 2):
            fail(house, kind, id, call)
    house.run()
    assert all(house.failed(id) for id in ids)
    assert house.engine.probes == (len(ids) if kind in ("prefill", "start") else 0)


@pytest.mark.parametrize("again", [True, False])
def test_prompts_that_fail_together_are_run_again_apart(again: bool) -> None:
    house = House(prefill_tokens=99)
    for id in ("one", "bad", "two"):
        house.submit(id, 5, 6)
    house.engine.at["prefill", 0] = breaking("one of them")
    if again:
        house.engine.at["prefill", 2] = breaking("this one")
    house.run()
    assert house.engine.groups == [["one", "bad", "two"], ["one"], ["bad"], ["two"]]
    assert [id for id in ("one", "bad", "two") if house.text(id) != "<5><6>"] == ["bad"] * again
    assert house.engine.probes == again


def test_ends_of_prompts_that_fail_together_are_run_again_from_their_beginnings() -> None:
    house = House(engine=ScriptedEngine(shape=CacheSpec()), store_bytes=10**9, prefill_tokens=2048)
    stored = tuple(range(600))
    house.submit("first", 5, 6, tokens=stored)
    house.run()
    together = ["one", "two"]
    for number, id in enumerate(together):
        house.submit(id, 5, 6, tokens=(*stored, *range(1000 * (1 + number), 1000 * (1 + number) + 50)))
    calls = len(house.engine.groups)
    house.engine.at["prefill", calls] = breaking("side by side")
    house.run()
    assert house.engine.restored.keys() >= set(together)
    assert house.engine.groups[calls : calls + 3] == [together, ["one"], ["two"]]
    assert all(house.text(id) == "<5><6>" for id in together)


def test_rows_are_finished_before_any_of_them_is_stored() -> None:
    class Storing(ScriptedEngine):
        def copy_cache(self, row: str, *given: Any, **options: Any) -> Any:
            copied.append([len(house.ends(id)) for id in ("a", "b")])
            return super().copy_cache(row, *given, **options)

    copied: list[list[int]] = []
    house = House(engine=Storing(shape=CacheSpec()), store_bytes=10**9, prefill_tokens=2048)
    for id in ("a", "b"):
        house.submit(id, *range(1, 60), prompt=30)
    house.run()
    assert copied[-2:] == [[1, 1], [1, 1]]


def test_memory_of_caches_is_counted_once_a_turn_however_many_commands_come() -> None:
    house = House(rows_max=40)
    counted: list[int] = []
    house.engine.cache_bytes = lambda: counted.append(1) or 0  # type: ignore[method-assign, func-returns-value]
    for number in range(30):
        house.submit(f"r{number}", 5)
    house.run()
    assert len(counted) <= house.loop.counters.steps + 3


def test_a_request_that_is_here_already_is_not_taken_twice() -> None:
    house = House()
    house.submit("a", 5, 6)
    house.inbox.put(house.inbox.commands[0])
    house.run()
    assert house.text("a") == "<5><6>"
    assert house.reason("a") == "stop"


# --- failures of a step ------------------------------------------------------------------------------


def test_a_step_that_fails_costs_the_rows_in_it_and_the_others_go_on() -> None:
    house = House(rows_max=3, prefill_tokens=4)
    house.submit("d1", *range(1, 50), prompt=1)
    house.submit("d2", *range(1, 50), prompt=1)
    house.submit("prefilling", 5, 6, prompt=40)
    house.submit("waiting", 7, prompt=9)
    house.engine.at["step", 4] = breaking("the step")
    house.run()
    assert house.failed("d1")
    assert house.failed("d2")
    assert house.text("d1") == "<1><2><3>"
    # Its cache was lost halfway. The engine has checked that its prompt was prefilled again from the start.
    assert house.text("prefilling") == "<5><6>"
    assert house.text("waiting") == "<7>"
    assert house.engine.resets == 1


@pytest.mark.parametrize("kind", ["step", "prefill", "start"])
def test_an_error_of_the_gpu_ends_the_thread_at_once_and_fails_nobody(kind: str) -> None:
    house = House(rows_max=4)
    house.submit("a", 5, 6, prompt=3)
    house.submit("b", 5, 6, prompt=3)

    def fail() -> None:
        raise RuntimeError("[METAL] Command buffer execution failed: Timeout.")

    house.engine.at[kind, 0] = fail
    with pytest.raises(DeviceError, match=r"the GPU failed: \[METAL\]"):
        house.loop.run()
    assert house.ends("a") == house.ends("b") == []


@pytest.mark.parametrize("kind", ["step", "prefill"])
def test_failures_in_a_row_end_the_thread(kind: str) -> None:
    house = House(rows_max=1)
    house.engine.broken = True
    for n in range(FAILURES_MAX + 5):
        house.submit(f"r{n}", 5)
    house.engine.at = {(kind, n): breaking("again") for n in range(99)}
    with pytest.raises(EngineKeepsFailing, match="10 failures in a row"):
        house.loop.run()
    assert [house.failed(f"r{n}") for n in range(FAILURES_MAX)] == [True] * FAILURES_MAX
    assert house.ends(f"r{FAILURES_MAX}") == []
    assert house.engine.breaches == []


def test_a_step_that_works_in_between_makes_failures_bearable() -> None:
    house = House(rows_max=1, prefill_tokens=1)
    house.engine.broken = True
    total = 3 * FAILURES_MAX
    for n in range(total):
        house.submit(f"r{n}", 5, prompt=2)
    # Every ninth request succeeds; those before it fail at their first step.
    well = [n for n in range(total) if n % (FAILURES_MAX - 1) == FAILURES_MAX - 2]
    ill, calls = [n for n in range(total) if n not in well], 0
    for n in range(total):
        if n in ill:
            house.engine.at["step", calls] = breaking("again")
        # A successful request takes three steps: one that dispatches, one for its token, one for its end.
        calls += 3 if n in well else 1
    house.run()
    assert [n for n in range(total) if house.failed(f"r{n}")] == ill
    assert all(house.text(f"r{n}") == "<5>" for n in well)


def test_a_step_that_only_sets_out_makes_no_failure_bearable() -> None:
    house = House(rows_max=1)
    for n in range(FAILURES_MAX):
        house.submit(f"r{n}", 5)
    house.engine.at = {("step", 2 * n + 1): breaking("when it is read") for n in range(FAILURES_MAX)}
    with pytest.raises(EngineKeepsFailing):
        house.loop.run()


# --- back pressure and the end -----------------------------------------------------------------------


def test_no_step_is_made_while_nobody_takes_what_was_said_but_commands_are_obeyed() -> None:
    house = House()
    house.submit("a", *range(1, 20))
    house.submit("b", 5, 6)
    waits: list[int] = []

    def clog() -> None:
        house.backlog = lambda: loop_module.OUTBOX_MESSAGES_MAX

    def wait() -> None:
        waits.append(house.engine.calls["step"])
        if len(waits) == 3:
            house.drop("a")
        if len(waits) == 4:
            assert house.loop.scheduler.get("a") is None
            house.backlog = lambda: loop_module.OUTBOX_MESSAGES_MAX - 1

    house.engine.at["step", 2] = clog
    house.inbox.on_wait = wait
    house.run()
    assert waits == [2, 2, 2, 2]
    assert len(house.tokens("a")) == 2
    assert house.text("b") == "<5><6>"


def test_a_stop_ends_the_thread_with_rows_aboard() -> None:
    house = House()
    house.submit("a", *range(1, 1000), max_tokens=999)
    house.engine.at["step", 3] = lambda: house.inbox.put(Stop())
    house.loop.run()
    assert not house.inbox.idle
    assert len(house.tokens("a")) == 3
    assert house.ends("a") == []


def test_deadline_passes_while_nobody_takes_what_was_said() -> None:
    house = House()
    house.submit("late", 5, 6, 7, deadline_s=1.0)

    def clog() -> None:
        house.backlog = lambda: loop_module.OUTBOX_MESSAGES_MAX

    def pause() -> None:
        house.now += 0.3

    house.engine.at["step", 1] = clog
    house.inbox.on_wait = pause
    house.run()
    end = house.end("late")
    assert isinstance(end, Failed)
    assert end.code == Code.DEADLINE_EXCEEDED
