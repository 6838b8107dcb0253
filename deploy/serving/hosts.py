"""Whether the hostfiles that `serve` is told of can be used, said before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from deploy.serving.settings import ServeSettings
from deploy.supervisor.models import ServedModel
from protocol.hosts import Backend, HostsError, read, wrong_with


def wrong_hosts(given: ServeSettings, served: Sequence[ServedModel]) -> list[str]:
    """A line for each that is wrong."""
    if given.hosts is not None and len(served) > 1:
        return ["hosts: of several models, say it of one, as [models.NAME] hosts"]
    return [line for path, backend in _named(given, served) if (line := _wrong(path, backend))]


def _named(given: ServeSettings, served: Sequence[ServedModel]) -> Iterator[tuple[Path, Backend | None]]:
    """Each hostfile, and the backend that is asked for."""
    for model in served:
        path = model.settings.get("hosts", given.hosts)
        backend = model.settings.get("backend", given.backend)
        if path is not None:
            yield Path(str(path)).expanduser(), cast("Backend | None", backend)


def _wrong(path: Path, backend: Backend | None) -> str | None:
    try:
        hosts = read(path)
    except HostsError as error:
        return f"hosts: {error}"
    wrong = wrong_with(hosts, backend or hosts.backend or "ring")
    return f"hosts: {path}: {wrong}" if wrong else None
