"""Downloads that clients order: what is wanted, what is reported, and the bounds."""

from __future__ import annotations

from itertools import count

from broker.dispatch.catalogue import MODEL_CHARACTERS_MAX, REMEMBERED_MAX, Pulls
from protocol.supervisor_messages import PULLS_MAX, PullStage, PullState
from tests.broker.dispatcher_line import refusal


def pulls() -> Pulls:
    numbers = count()
    made = Pulls(lambda: f"pull_{next(numbers)}")
    made.on_states([])
    return made


def report(made: Pulls, id: str, stage: PullStage = "running", **told: int) -> None:
    made.on_states([PullState(id=id, model="org/a", stage=stage, **told)])


def wanted(made: Pulls) -> list[str] | None:
    return None if made.wanted is None else [pull.id for pull in made.wanted]


def test_an_order_is_wanted_until_it_is_reported_to_have_ended() -> None:
    made = pulls()
    assert wanted(made) is None
    assert made.order("org/a").stage == "running"
    assert made.order("org/a").id == "pull_0", "a second order for a model joins the first"
    report(made, "pull_0", done_bytes=1, total_bytes=4)
    assert made.state("pull_0").done_bytes == 1
    report(made, "pull_0", "done", done_bytes=4, total_bytes=4)
    assert (wanted(made), made.state("pull_0").stage) == ([], "done")
    report(made, "pull_0")  # a report from before the supervisor has forgotten it
    assert made.state("pull_0").stage == "done"
    assert made.cancel("pull_0").stage == "done"
    assert made.order("org/a").id == "pull_1"
    assert wanted(made) == ["pull_1"]
    assert [made.cancel("pull_1").stage for _ in range(2)] == ["failed", "failed"]
    report(made, "pull_1")
    assert (wanted(made), made.state("pull_1").failure) == ([], "It was cancelled.")
    assert refusal(made.cancel, "pull_9").kind.status == 404


def test_a_new_gateway_adopts_what_runs_unless_its_supervisor_downloads_nothing() -> None:
    made = Pulls(lambda: "new")
    made.on_states(None)
    assert "roundhouse pull" in refusal(made.order, "org/a").message
    running = PullState(id="a", model="org/a", stage="running")
    made.on_states([running, PullState(id="b", model="org/b", stage="done")])
    assert wanted(made) == ["a"]
    assert [state.id for state in made.states()] == ["a", "b"]
    assert made.order("org/a").id == "a"


def test_only_names_of_models_are_ordered() -> None:
    for model in ("", "a/b/c", "../b", "a/..", "a b/c", "-a/b", "a/" + "b" * MODEL_CHARACTERS_MAX):
        error = refusal(pulls().order, model)
        assert (error.kind.status, error.param) == (400, "model")


def test_orders_and_memory_of_them_are_bounded() -> None:
    made = pulls()
    for number in range(PULLS_MAX):
        made.order(f"org/{number}")
    assert refusal(made.order, "org/more").kind.status == 503
    for number in range(3 * REMEMBERED_MAX):
        made.cancel(made.states()[-1].id)
        made.order(f"org/{number + PULLS_MAX}")
    assert len(made.states()) <= REMEMBERED_MAX
    assert len(made.wanted or ()) == PULLS_MAX
