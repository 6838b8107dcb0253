"""GET /metrics: metrics, labels and access; the dashboard uses only exported names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from broker.api.admin.status_routes import REASONS_MAX
from protocol.messages import Heartbeat
from protocol.supervisor_messages import ModelState, ModelStates
from protocol.types import MemoryPressure, PrefixStatus, PreparationStatus, RankMemory, Resources
from tests.broker.application import House, house_with_worker
from tests.factories import accepted, events, finished, request, reused

MODEL = "org/model"
ROOT = Path(__file__).resolve().parents[4]
GRAFANA = ROOT / "deploy" / "grafana" / "roundhouse.json"

Figures = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def scrape(house: House, **headers: str) -> Figures:
    exchange = await house.get("/metrics", **headers).end()
    assert exchange.status == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(exchange.body.decode())
        for sample in family.samples
    }


def figure(figures: Figures, name: str, **labels: str) -> float:
    return figures[f"roundhouse_{name}", frozenset(labels.items())]


def use(house: House) -> None:
    """Serve a request by two workers, one of which is lost, and report all that a worker can report."""
    line = house.line
    line.dispatcher.catalogue.on_model_states(ModelStates(models=[ModelState(name=MODEL, restarts=4)]))
    with line.dispatcher.submit(line.dispatcher.find(MODEL), [request("chatcmpl-secret")], ()):
        line.say("w", accepted("w", "chatcmpl-secret"), reused("w", "chatcmpl-secret", 2, "ram"))
        line.say("w", events("w", "chatcmpl-secret", "x"))
        line.clock.now += 0.04
        line.say("w", events("w", "chatcmpl-secret", "y", first=1))
        line.dispatcher.lost("w")
        line.serving("w2", MODEL)
        line.say("w2", accepted("w2", "chatcmpl-secret~2"), events("w2", "chatcmpl-secret~2", "z"))
        line.say("w2", finished("w2", "chatcmpl-secret~2", tokens=3))
    ranks = [RankMemory(rank=1, resident_bytes=30, device_bytes=40)]
    misses = {f"m{n}": 30 - n for n in range(20)}
    beat = Heartbeat(
        incarnation="w2", running=2, waiting=1, steps=5, cache_bytes=100,
        resources=Resources(resident_bytes=1000, footprint_bytes=1500, device_bytes=2000, ranks=ranks),
        prefix=PrefixStatus(ram_bytes=10, ram_limit=20, disk_bytes=30, written_bytes=50, misses=misses),
        preparation=PreparationStatus(waiting=4, oldest_s=0.5, started=7, waited_s=2.5, refused=3),
        pressure=MemoryPressure(level="critical", relief="drop_idle"),
    )  # fmt: skip
    line.say("w2", beat)
    line.dispatcher.dropped["gap"] += 1
    house.link.errors["decode"] += 1
    house.gateway.http_counters.turned_away()


async def test_metrics_are_counted_by_model(house: House) -> None:
    use(house)
    assert (await house.get("/nowhere").end()).status == 404
    told = await scrape(house)
    model = {"model": MODEL}
    assert figure(told, "requests_total", **model, task="generate", code="stop") == 1
    assert figure(told, "generation_tokens_total", **model) == 3
    assert figure(told, "cached_prompt_tokens_total", **model) == 2
    assert figure(told, "inter_token_seconds_bucket", **model, le="0.03") == 0
    assert figure(told, "inter_token_seconds_bucket", **model, le="0.05") == 1
    assert figure(told, "request_resumes_total", **model) == 1
    assert figure(told, "worker_losses_total", **model, reason="dead") == 1
    assert figure(told, "preparation_refused_total", **model) == 3
    assert figure(told, "memory_pressure", **model) == 2
    assert figure(told, "rank_device_bytes", **model, rank="1") == 40
    assert figure(told, "worker_cache_bytes", **model) == 110
    assert figure(told, "prefix_cache_written_bytes_total", **model) == 50
    assert figure(told, "errors_total", code="route_not_found") == 1
    assert figure(told, "line_errors_total", reason="decode") == 1
    assert figure(told, "connections_turned_away_total") == 1
    exchange = await house.get("/metrics", accept="application/openmetrics-text; version=1.0.0").end()
    assert exchange.headers["content-type"].startswith("application/openmetrics-text")
    assert exchange.body.endswith(b"# EOF\n")


async def test_whatever_a_worker_calls_its_misses_the_labels_are_bounded_and_no_id_is_one(
    house: House,
) -> None:
    use(house)
    told = await scrape(house)
    misses = [dict(labels) for name, labels in told if name == "roundhouse_prefix_cache_misses_total"]
    reasons = {labels["reason"] for labels in misses}
    assert len(reasons) == REASONS_MAX + 1
    assert figure(told, "prefix_cache_misses_total", model=MODEL, reason="other") == 14 + 13 + 12 + 11
    assert "secret" not in str(told)


@pytest.mark.parametrize(("keyless", "status"), [(False, 401), (True, 200)])
async def test_it_needs_a_key_unless_the_settings_say_otherwise(keyless: bool, status: int) -> None:
    keyed = House(api_keys=("sesame",), keyless_metrics=keyless)
    assert (await keyed.get("/metrics").end()).status == status
    assert (await keyed.get("/metrics", x_api_key="sesame").end()).status == 200
    assert (await keyed.get("/v1/status").end()).status == 401
    assert keyed.gateway.http_counters.errors["invalid_api_key"] == (1 if keyless else 2)


def expressions(document: Any) -> list[str]:
    """Return the queries of a dashboard's panels and variables."""
    asked = [target["expr"] for panel in document["panels"] for target in panel["targets"]]
    return asked + [each["definition"] for each in document["templating"]["list"] if "definition" in each]


async def test_the_dashboard_and_the_documents_name_what_is_there_by_labels_that_are_there(
    tmp_path: Path,
) -> None:
    house = house_with_worker(MODEL, rows=1, batch_dir=tmp_path)
    use(house)
    await house.get("/nowhere").end()
    labels: dict[str, set[str]] = {}
    for name, pairs in await scrape(house):
        labels.setdefault(name, set()).update(label for label, _ in pairs)
    for expression in expressions(json.loads(GRAFANA.read_text())):
        named = re.findall(r"(roundhouse_\w+)", expression)
        assert named, expression
        assert set(named) <= labels.keys(), expression
        grouped = re.findall(r"by \(([\w, ]+)\)", expression)
        wanted = {label.strip() for group in grouped for label in group.split(",")}
        wanted |= {"model"} if "$model" in expression else set()
        assert all(wanted <= labels[name] for name in named), expression
    text = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    documented = set(re.findall(r"roundhouse_[a-z_]+", text))
    assert len(documented) > 15
    assert {name for name in documented if not any(each.startswith(name) for each in labels)} == set()
