"""Display of `/v1/status` in the terminal, once or refreshed: models, requests, throughput, recent errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Event
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from deploy.console.http import ConsoleError

REQUESTS_SHOWN_MAX = 24
ENDS_SHOWN_MAX = 8
SPARK_WIDTH = 60
ID_CHARS = 8
"""Number of an id's last characters to show, because ids differ there."""
_BARS = "▁▂▃▄▅▆▇█"
_STYLES = {
    "ready": "green", "loaded": "green", "loading": "yellow", "draining": "yellow", "silent": "red",
    "stalled": "red", "starving": "red", "failed": "red", "unloaded": "dim",
}  # fmt: skip

_RELIEF = {
    "shrink": "caches shrink",
    "drop_idle": "caches are emptied",
    "refuse_long": "new long prompts are refused",
}

Document = Mapping[str, Any]

Look = Callable[[], dict[str, Any]]
"""Returns the document of `/v1/status`. Raises `ConsoleError`."""


def screen(document: Document) -> RenderableType:
    """Return the whole screen."""
    parts: list[RenderableType] = [_head(document), Text(), _models(document), *_alerts(document)]
    if document.get("requests"):
        parts += [Text(), _requests(document["requests"], several=len(document["models"]) > 1)]
    if (batches := document.get("batches")) and (batches["unfinished"] or batches["problem"]):
        parts += [Text(), *_batches(batches)]
    if ends := (document.get("recent") or {}).get("ends"):
        parts += [Text(), _ends(ends, document.get("time", 0.0))]
    return Group(*parts)


def _head(document: Document) -> Text:
    gateway, history = document["gateway"], document.get("history") or {}
    text = Text()
    text.append("roundhouse ", "bold").append(str(gateway["version"]))
    text.append(f"  up {duration(gateway['uptime_s'])}")
    text.append(f"  {gateway['in_flight']} in flight")
    if gateway["between_workers"]:
        text.append(f", {gateway['between_workers']} waiting for a worker", "yellow")
    if gateway["stopping"]:
        text.append("  stopping", "yellow")
    if rates := column(history, "tokens_per_s"):
        text.append("\n").append(spark(rates[-SPARK_WIDTH:]), "cyan").append(f" {rates[-1]:,.0f} tokens/s")
    lately = []
    if firsts := [value for value in column(history, "time_to_first_token_s") if value is not None]:
        lately.append(f"first token after {seconds(firsts[-1])}")
    if gaps := [value for value in column(history, "inter_token_s") if value is not None]:
        lately.append(f"{seconds(gaps[-1])} between tokens")
    if hits := [value for value in column(history, "cache_hit_rate") if value is not None]:
        lately.append(f"{hits[-1]:.0%} of prompt tokens from the prefix cache")
    if lately:
        text.append("\n" + ", ".join(lately))
    if writes := _disk_writes(document):
        text.append("\n" + writes)
    return text


def _disk_writes(document: Document) -> str:
    """Return what the prefix cache has written to the disk, and may write now; "" where it writes nothing."""
    found = [p for worker in document["workers"] if (p := worker.get("prefix")) and p.get("writes_limit")]
    if not found:
        return ""
    written, left = sum(p["written_bytes"] for p in found), max(p["writes_left"] for p in found)
    return f"{binary_size(written)} of prefixes written to disk, {binary_size(left)} may follow now"


def _models(document: Document) -> Table:
    table = _table("model", "state", "up", ">running", ">waiting", ">context", ">memory", ">cache", ">deaths")
    workers: dict[str, list[Document]] = {}
    for worker in document["workers"]:
        workers.setdefault(worker["model"], []).append(worker)
    for model in document["models"]:
        here: Sequence[Document | None] = workers.get(model["model"]) or [None]
        for worker in here:
            table.add_row(*_worker_cells(model, worker))
    return table


def _worker_cells(model: Document, worker: Document | None) -> list[RenderableType]:
    name = escape(model["model"])
    state = str(worker["state"] if worker else model["state"])
    shown: RenderableType = Text(state + _percent(worker), _STYLES.get(state, ""))
    if worker is None:
        return [name, shown, "", "", str(model["waiting"] or ""), "", "", "", _restarts(model)]
    memory = worker.get("memory") or {}
    held = max(
        memory.get("footprint_bytes") or memory.get("resident_bytes", 0), memory.get("device_bytes", 0)
    )
    context = worker.get("context_length")
    return [
        name,
        shown,
        duration(worker.get("uptime_s") or worker.get("connected_s") or 0.0),
        f"{worker['running']}/{worker.get('running_max') or '?'}",
        str(worker["waiting"] + model["waiting"]),
        f"{context:,}" if context else "",
        size(held) if held else "",
        size(worker["cache_bytes"]),
        _restarts(model),
    ]


def _batches(batches: Document) -> list[RenderableType]:
    """Return the table of unfinished batches, and why they wait."""
    table = _table("batch", "status", "endpoint", ">done", ">failed")
    for batch in batches["unfinished"]:
        done = batch["succeeded"] + batch["errored"]
        table.add_row(
            escape(batch["id"]),
            batch["status"],
            batch["endpoint"],
            f"{done:,}/{batch['total']:,}",
            str(batch["errored"] or ""),
        )
    problem = [Text(f"batches wait: {batches['problem']}", "red")] if batches["problem"] else []
    return [table, *problem]


def _alerts(document: Document) -> list[Text]:
    """Return a line for each model whose last start failed, and for the machines that are short of memory."""
    reported = [(worker["host"], worker.get("pressure") or {}) for worker in document["workers"]]
    relieved = {(host, _RELIEF.get(pressure.get("relief", ""), "")) for host, pressure in reported}
    pressures = [
        Text(f"memory pressure of {host or 'the machine'}: {relief}", "yellow")
        for host, relief in sorted(relieved)
        if relief
    ]
    return pressures + [
        Text(f"{model['model']}: {model['failure']}", "red")
        for model in document["models"]
        if model.get("failure")
    ]


def _percent(worker: Document | None) -> str:
    loading = (worker or {}).get("loading")
    return f" {loading['done'] / loading['total']:.0%}" if loading and loading["total"] else ""


def _restarts(model: Document) -> Text:
    """Return the number of unexpected exits of its processes."""
    count = model.get("restarts")
    if count is None:
        count = (model.get("losses") or {}).get("dead", 0)  # of the others, each is alive, or dead as well
    last = str(model.get("last_end_reason") or "").upper().replace("_", " ")
    return Text(f"{count} {last}".strip() if count else "", "yellow")


def _requests(requests: Sequence[Document], *, several: bool) -> Table:
    """Return the table of requests. `several`: with a column for the model."""
    models = ["model"] if several else []
    table = _table(
        "request", *models, "phase", "progress", ">tokens", ">tok/s", ">first", ">age", "cache", "~"
    )
    for request in requests[:REQUESTS_SHOWN_MAX]:
        cells = _request_cells(request)
        model: list[RenderableType] = [escape(request["model"])] if several else []
        table.add_row(short(request["id"]), *model, *cells)
    if len(requests) > REQUESTS_SHOWN_MAX:
        table.add_row(f"{len(requests) - REQUESTS_SHOWN_MAX} more", style="dim")
    return table


def _request_cells(request: Document) -> list[RenderableType]:
    speed, first = request["tokens_per_s"], request["time_to_first_token_s"]
    return [
        request["phase"],
        _progress(request),
        str(request["answered"]),
        f"{speed:.1f}" if speed else "",
        seconds(first) if first is not None else "",
        seconds(request["seconds"]),
        _reuse(request),
        _failover_counts(request),
    ]


def _progress(request: Document) -> str:
    total, done = request["prompt_tokens"], request["prefilled"]
    if request["phase"] == "decode" or not total:
        return f"{total:,} in" if total else ""
    return f"{spark_bar(done / total)} {done:,}/{total:,}"


def _reuse(request: Document) -> str:
    reuse = request["reuse"]
    if not reuse or not request["prompt_tokens"]:
        return ""
    if not reuse["tokens"]:
        return reuse["miss"] or "none"
    return f"{reuse['tokens'] / request['prompt_tokens']:.0%} {reuse['tier']}"


def _failover_counts(request: Document) -> Text:
    counts = [("resumed", request["resumes"]), ("preempted", request["preemptions"])]
    return Text(", ".join(f"{what} {count}x" for what, count in counts if count), "yellow")


def _ends(ends: Sequence[Document], now: float) -> Table:
    table = _table("lately", ">ago", "end", ">prompt", ">tokens", ">first", ">took")
    for end in ends[:ENDS_SHOWN_MAX]:
        well = end["code"] in ("stop", "length", "tool_calls")
        first = end["time_to_first_token_s"]
        table.add_row(
            short(end["id"]),
            duration(max(0.0, now - end["time"])),
            Text(end["code"], "" if well else "yellow" if end["code"] == "client_left" else "red"),
            f"{end['prompt_tokens']:,}",
            f"{end['answered']:,}",
            seconds(first) if first is not None else "",
            seconds(end["seconds"]),
        )
    return table


def _table(*columns: str) -> Table:
    """Return a table. `>` before a column name: aligned right; `~`: shrunk when the screen is narrow."""
    table = Table(box=None, pad_edge=False, header_style="bold dim", show_edge=False)
    for name in columns:
        justify: Any = "right" if name.startswith(">") else "left"
        gives_way = name.startswith("~")
        table.add_column(name.strip(">~"), justify=justify, no_wrap=not gives_way, overflow="ellipsis")
    return table


def short(id: str) -> str:
    """Return a shortened id that can still be recognized."""
    return escape(id if len(id) <= ID_CHARS + 1 else f"…{id[-ID_CHARS:]}")


# --- numbers -----------------------------------------------------------------------------------------


def column(history: Document, name: str) -> list[Any]:
    """Return a column of the history of the last minutes."""
    names = history.get("columns") or []
    return [row[names.index(name)] for row in history.get("rows") or ()] if name in names else []


def spark(values: Iterable[float | None]) -> str:
    """Return a sparkline; None becomes a space."""
    numbers = list(values)
    most = max((number for number in numbers if number is not None), default=0.0)
    return "".join(_bar(number, most) for number in numbers)


def _bar(number: float | None, most: float) -> str:
    if number is None or not most:
        return " " if number is None else _BARS[0]
    return _BARS[min(len(_BARS) - 1, int(number / most * len(_BARS)))]


def spark_bar(share: float, width: int = 8) -> str:
    """Return a progress bar of `width` characters."""
    full = min(width, max(0, round(share * width)))
    return "█" * full + "░" * (width - full)


def duration(seconds: float) -> str:
    """Format a duration in its two largest units."""
    whole = int(seconds)
    for unit, length, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= length:
            return f"{whole // length} {unit} {whole % length // part} {smaller}"
    return f"{whole} s"


def seconds(value: float) -> str:
    """Format seconds with suitable precision."""
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 60 else duration(value)


def size(count: float) -> str:
    """Format bytes in decimal units."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def binary_size(count: float) -> str:
    """Format bytes in binary units, in which limits of caches are set."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def show(console: Console, look: Look) -> None:
    """Print the status once. Raises `ConsoleError`."""
    console.print(screen(look()))


def watch(console: Console, look: Look, every_s: float, stop: Event) -> None:
    """Refresh the status until `stop`. An error is shown above the last status."""
    seen: RenderableType = Text()
    with Live(seen, console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                seen = screen(look())
                live.update(seen, refresh=True)
            except ConsoleError as error:
                message = Text(f"{time.strftime('%H:%M:%S')} {error}", "red")
                live.update(Group(message, Text(), seen), refresh=True)
            if stop.wait(every_s):
                return
