"""Reads and fetches the images and videos of a request, for every API that accepts them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial

from broker.dialects.data_urls import MediaError
from broker.dialects.frames import (
    MediaLimits,
    MediaSource,
    check_taken,
    described,
    is_fetched,
    read,
    refused,
    sources,
)
from broker.dialects.media_types import Frame
from broker.dialects.parts import Attachment
from broker.dispatch.fleet import Target
from broker.middleware.media_memory import MediaLease
from broker.state import Fetch, GatewayState
from protocol.errors import Code, RequestError
from protocol.settings.gateway import GatewaySettings
from protocol.types import Media

FETCHES_PER_REQUEST_MAX = 8
"""Maximum number of concurrent fetches of one request."""


async def read_media(
    gateway: GatewayState, lease: MediaLease, attachments: Sequence[Attachment], target: Target
) -> tuple[list[Media], list[bytes]]:
    """Return descriptions of the media and the bytes of their frames, which `lease` holds.

    Raises `RequestError`: 400 that names an invalid or unavailable one, or 503 if the memory budget is
    exhausted.
    """
    if not attachments:
        return [], []
    check_taken(attachments, target.capabilities, target.model)
    limits = limits_of(gateway.settings)
    wanted = sources(attachments, limits)
    distinct = dict.fromkeys(source for each in wanted for source in each)
    frames = await _Reading(gateway, lease, limits).read(distinct)
    read_frames = [[frames[source] for source in each] for each in wanted]
    every = [frame.data for each in read_frames for frame in each]
    describe = partial(described, attachments, read_frames, limits)
    return await gateway.offload.work(sum(map(len, every)), describe), every


def limits_of(settings: GatewaySettings) -> MediaLimits:
    """Return the media limits of a gateway with these settings."""
    return MediaLimits(
        bytes_max=settings.media_bytes_max,
        image_pixels_max=settings.image_pixels_max,
        video_frames_max=settings.video_frames_max,
    )


class _Reading:
    """Reader of one request's media sources, each only once."""

    def __init__(self, gateway: GatewayState, lease: MediaLease, limits: MediaLimits) -> None:
        self._gateway = gateway
        self._lease = lease
        self._limits = limits
        self._slots = asyncio.Semaphore(FETCHES_PER_REQUEST_MAX)

    async def read(self, wanted: Iterable[MediaSource]) -> dict[MediaSource, Frame]:
        fetch = self._gateway.fetch
        here: list[MediaSource] = []
        elsewhere: list[MediaSource] = []
        for source in wanted:
            (elsewhere if is_fetched(source, fetching=fetch is not None) else here).append(source)
        frames = await self._decode(here)
        if fetch is not None and elsewhere:
            frames |= await self._fetch_all(fetch, elsewhere)
        return frames

    async def _decode(self, wanted: Sequence[MediaSource]) -> dict[MediaSource, Frame]:
        size = sum(len(source.url) for source in wanted)
        decoded = await self._gateway.offload.work(
            size, lambda: [read(each, self._limits) for each in wanted]
        )
        return {source: self._keep(source, frame) for source, frame in zip(wanted, decoded, strict=True)}

    async def _fetch_all(self, fetch: Fetch, wanted: Sequence[MediaSource]) -> dict[MediaSource, Frame]:
        tasks: dict[MediaSource, asyncio.Task[Frame]] = {}
        limit_s = self._gateway.settings.media_timeout_s
        try:
            async with asyncio.timeout(limit_s), asyncio.TaskGroup() as group:
                for source in wanted:
                    tasks[source] = group.create_task(self._fetch(fetch, source))
        except TimeoutError:
            late = next((source for source in wanted if _is_late(tasks[source])), wanted[0])
            raise refused(late, MediaError(f"it could not be fetched within {limit_s:g} s")) from None
        except ExceptionGroup as errors:
            refusals, others = errors.split(RequestError)
            if others or refusals is None:
                raise
            raise refusals.exceptions[0] from None
        return {source: task.result() for source, task in tasks.items()}

    async def _fetch(self, fetch: Fetch, source: MediaSource) -> Frame:
        try:
            async with self._slots:
                data = await fetch(source.url, partial(self._expect, source))
        except MediaError as error:
            raise refused(source, error) from None
        frame = await self._gateway.offload.work(len(data), partial(read, source, self._limits, data))
        return self._keep(source, frame, expected=len(data))

    def _expect(self, source: MediaSource, count: int) -> None:
        if not self._lease.expect(count):
            raise self._no_room(source, count)

    def _keep(self, source: MediaSource, frame: Frame, *, expected: int = 0) -> Frame:
        kept = self._lease.keep(frame, expected=expected)
        if kept is None:
            raise self._no_room(source, len(frame.data))
        return kept

    def _no_room(self, source: MediaSource, count: int) -> RequestError:
        if not self._lease.fits_alone(count):
            most = self._gateway.media.bytes_max
            message = f"The images of one request may have at most {most} bytes in total."
            return RequestError(Code.INVALID_REQUEST, message, param=source.param)
        dispatcher = self._gateway.dispatcher
        assigned = [flight for flight in dispatcher.flights if flight.terminal is None]
        return dispatcher.admission.busy(assigned, "The server's memory for images is full")


def _is_late(task: asyncio.Task[Frame]) -> bool:
    return task.cancelled() or not task.done()
