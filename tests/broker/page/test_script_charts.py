"""`charts.js`, `samples.js` and `pauses.js`: charts of the last minutes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker.page.scripts import Call
from tests.broker.page.status import NOW, document, event, worker

TIME = {"now": NOW, "span": 60}
COLUMNS = ["time", "tokens_per_s", "batch"]


def history(*rows: list[float | None]) -> dict[str, Any]:
    return {"every_s": 1.0, "columns": COLUMNS, "rows": list(rows)}


def test_samples_are_joined_once_and_forgotten_after_five_minutes(call: Call) -> None:
    first = call("samples.js", "joined", [], history([NOW, 5.0, None], [NOW + 1, 6.0, 2.0]))
    assert first[0] == {"time": NOW, "tokens_per_s": 5.0, "batch": None}
    # The second sample is a duplicate with a slightly different time.
    again = call("samples.js", "joined", first, history([NOW + 1.001, 6.0, 2.0], [NOW + 2, 7.0, None]))
    assert [sample["tokens_per_s"] for sample in again] == [5.0, 6.0, 7.0]
    many = call("samples.js", "joined", again, history(*([NOW + 3 + n, n, None] for n in range(400))))
    assert len(many) == 300
    assert call("samples.js", "joined", many, None) == many
    assert call("samples.js", "latest", first, "tokens_per_s") == 6.0
    assert call("samples.js", "nearest", first, NOW + 0.6) == 1


def test_the_top_is_a_round_number_and_as_many_minutes_are_shown_as_are_known(call: Call) -> None:
    for value, base, top in ((0.03, 10, 0.05), (70 * 2**20, 1024, 100 * 2**20)):
        assert call("charts.js", "ceiling", value, base) == pytest.approx(top)
    for age_s, span_s in ((1, 60), (100, 120), (1000, 300)):
        assert call("charts.js", "span", [{"time": NOW - age_s}, {"time": NOW}]) == span_s
    assert call("charts.js", "span", []) == 60


def plotted(call: Call, place: int, samples: list[Any], pauses: list[Any]) -> Any:
    return call("charts.js", "plot", place, samples, pauses, TIME)


def sample(ago_s: float, **values: float | None) -> dict[str, Any]:
    columns = (
        "tokens_per_s", "running", "waiting", "first_token_p50_s", "first_token_p95_s", "cache_hit_rate_1m",
    )  # fmt: skip
    return {"time": NOW - ago_s, **dict.fromkeys(columns), **values}


def test_a_line_goes_through_its_values_and_ends_where_there_are_none(call: Call) -> None:
    speeds = ((50, 0.0), (40, 100.0), (30, None), (20, 50.0))
    drawn = plotted(call, 0, [sample(ago, tokens_per_s=speed) for ago, speed in speeds], [])
    assert drawn["lines"] == ["M50.0 100.0L100.0 0.0M200.0 50.0h0.01"]
    assert drawn["area"].startswith("M50.0 100L50.0 100.0L100.0 0.0V100Z")
    assert drawn["top"] == "100"
    assert [call("charts.js", "across", NOW - s, TIME) for s in (0, 30, 60)] == [300, 150, 0]


def test_an_outlier_does_not_flatten_the_times_to_first_token(call: Call) -> None:
    firsts = [sample(30, first_token_p50_s=0.1, first_token_p95_s=0.2)]
    firsts.append(sample(20, first_token_p50_s=0.2, first_token_p95_s=100.0))
    drawn = plotted(call, 1, firsts, [])
    assert (drawn["top"], drawn["bottom"]) == ("1 min 40 s", "100 ms")
    assert drawn["lines"] == ["M150.0 100.0L200.0 90.0", "M150.0 90.0L200.0 0.0"]
    assert (drawn["now"], drawn["values"]) == ("200 ms", ["200 ms", "1 min 40 s"])


def test_a_reading_tells_the_values_of_one_sample(call: Call) -> None:
    told = call("charts.js", "reading", 3, sample(1, running=4, waiting=2))
    assert told == {"now": "4 + 2", "label": "running 4, waiting 2", "values": ["4", "2"]}
    assert call("charts.js", "reading", 4, sample(1))["now"] == "–"
    drawn = plotted(call, 3, [sample(1, running=4, waiting=2)], [])
    assert (drawn["now"], drawn["label"]) == ("4 + 2", "running 4, waiting 2; at most 4 in 1 min")


# --- pauses ---


def test_a_pause_is_from_the_loss_to_the_next_that_is_ready(call: Call) -> None:
    told = [
        event("said goodbye: asked to stop", NOW - 1, "b"), event("connection lost", NOW - 2),
        event("is silent", NOW - 3), event("connection lost", NOW - 4, "c"), event("ready", NOW - 20),
        event("is stalled", NOW - 30), event("ready", NOW - 90),
    ]  # fmt: skip
    found = call("pauses.js", "pauses", told)
    assert sorted((pause["model"], pause["from"], pause["to"], pause["how"]) for pause in found) == [
        ("c", NOW - 4, None, "connection lost"),
        ("org/model", NOW - 30, NOW - 20, "is stalled"),
        ("org/model", NOW - 3, None, "is silent"),
    ]
    loading = document(events=told, workers=[worker(state="loading")])
    assert call("pauses.js", "pauseOf", loading, "org/model")["how"] == "is silent"
    assert call("pauses.js", "pauseOf", document(events=told), "org/model") is None


def test_a_pause_is_a_band_of_the_chart(call: Call) -> None:
    def bands(start: float, stop: float | None) -> Any:
        pause = {"model": "m", "from": NOW - start, "to": stop and NOW - stop, "how": ""}
        return plotted(call, 0, [], [pause])["bands"]

    assert bands(30, 15) == [{"x": 150, "width": 75}]
    assert bands(90, None) == [{"x": 0, "width": 300}]
    assert bands(30, 29.99) == [{"x": 150, "width": 1}]
    assert bands(120, 90) == []
