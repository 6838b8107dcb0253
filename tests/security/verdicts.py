"""Limits of what an attack may cost others, and the verdict on what was measured. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

HI_S_MAX = 2.0
"""Longest time of another client's “hi” during an attack."""
HEALTH_S_MAX = 1.0
WORKER_BYTES_MAX = 200 * 2**20
"""Resident memory of the worker above its calm state."""
UNEXPLAINED_BYTES_MAX = {"worker": 32 * 2**20, "gateway": 16 * 2**20}
"""Growth of a process beyond its caches' own bytes, from the end of the first round of clients that leave."""

WRONG_SHOWN_MAX = 3
_MIB = 2**20


class Readings(Struct, frozen=True, kw_only=True):
    """What the probe measured beside an attack. Bytes are peaks of resident memory above the calm state.

    `unanswered`: requests of the probe that got no 200 at all.
    """

    hi_s: float = 0.0
    health_s: float = 0.0
    worker_bytes: int = 0
    gateway_bytes: int = 0
    answers: int = 0
    unanswered: int = 0


@dataclass(frozen=True, slots=True)
class Measurement:
    """The result of one attack. `wrong`: answers that are not as promised, a text for each. `load`: the
    machine's load average when the attack began."""

    attack: str
    requests: int
    readings: Readings
    wrong: Sequence[str] = ()
    load: float = 0.0


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Bytes of a process between two rounds of an attack. `cached`: the part that its caches account for."""

    resident: int
    cached: int = 0


def failures(measurement: Measurement) -> list[str]:
    """Return each limit that was exceeded, and each wrong answer."""
    readings = measurement.readings
    found = [*measurement.wrong]
    if readings.unanswered:
        found.append(f"{readings.unanswered} requests of the probe had no answer")
    if not readings.answers:
        found.append("the probe had no answer at all, so nothing was measured")
    if readings.hi_s > HI_S_MAX:
        found.append(f"a “hi” took {readings.hi_s:.2f} s (limit {HI_S_MAX:g})")
    if readings.health_s > HEALTH_S_MAX:
        found.append(f"/health took {readings.health_s:.2f} s (limit {HEALTH_S_MAX:g})")
    if readings.worker_bytes > WORKER_BYTES_MAX:
        above, limit = readings.worker_bytes / _MIB, WORKER_BYTES_MAX // _MIB
        found.append(f"the worker had {above:.0f} MiB above calm (limit {limit})")
    return [f"{measurement.attack}: {what}" for what in found]


def unexplained(samples: Sequence[MemorySample]) -> int:
    """Return the bytes that a process grew by beyond its caches, after the first sample.

    The later half's smallest value counts, because allocators return memory in steps: memory that is lost is
    missing in each sample.
    """
    beyond = [sample.resident - sample.cached for sample in samples]
    if len(beyond) < 2:
        return 0
    return min(beyond[(len(beyond) + 1) // 2 :]) - beyond[0]


def growth_failure(process: str, samples: Sequence[MemorySample]) -> str | None:
    """Return what is wrong with the growth of a process ("worker" or "gateway") over the rounds."""
    grown, limit = unexplained(samples), UNEXPLAINED_BYTES_MAX[process]
    if grown <= limit:
        return None
    return f"the {process} grew by {grown / _MIB:.1f} MiB beyond its caches (limit {limit // _MIB})"


HEADER = (
    f"{'attack':<18}{'requests':>9}{'hi s':>8}{'health s':>10}{'worker MiB':>12}{'gateway MiB':>13}"
    f"{'load':>6}  verdict"
)


def row(measurement: Measurement) -> str:
    """Return a line of the table under `HEADER`."""
    readings, wrong = measurement.readings, failures(measurement)
    verdict = "held" if not wrong else f"{len(wrong)} wrong"
    return (
        f"{measurement.attack:<18}{measurement.requests:>9}{readings.hi_s:>8.2f}{readings.health_s:>10.2f}"
        f"{readings.worker_bytes / _MIB:>12.0f}{readings.gateway_bytes / _MIB:>13.0f}"
        f"{measurement.load:>6.1f}  {verdict}"
    )


def report(measurement: Measurement) -> str:
    """Return the row of an attack, and below it the first things that are wrong."""
    return "\n    ".join([row(measurement), *failures(measurement)[:WRONG_SHOWN_MAX]])
