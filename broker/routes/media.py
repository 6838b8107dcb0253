"""The images and videos of a request, read and fetched: for every API that takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial

from starlette.requests import Request

from broker.config import GatewaySettings
from broker.dialects.formats import Frame
from broker.dialects.frames import (
    Limits,
    Source,
    check_taken,
    described,
    is_fetched,
    read,
    refused,
    sources,
)
from broker.dialects.media import MediaError
from broker.dialects.parts import Attachment
from broker.dispatch.fleet import Vacancy, Worker
from broker.http.media import Held
from broker.routes.gateway import Fetch, Gateway, gateway_of
from protocol.errors import Code, RequestError
from protocol.parts import Media

FETCHES_PER_REQUEST_MAX = 8
"""At once."""


async def read_media(
    request: Request, attachments: Sequence[Attachment], found: Worker | Vacancy
) -> tuple[list[Media], list[bytes]]:
    """What is said of each, and the bytes of all their frames, which the request holds until its end.

    Raises `RequestError`: 400, naming one that is bad or cannot be had, or 503 where there is no room for it.
    """
    if not attachments:
        return [], []
    gateway = gateway_of(request)
    check_taken(attachments, found.capabilities, found.model)
    limits = limits_of(gateway.settings)
    wanted = sources(attachments, limits)
    distinct = dict.fromkeys(source for each in wanted for source in each)
    frames = await _Reading(gateway, request.state.media, limits).read(distinct)
    read_frames = [[frames[source] for source in each] for each in wanted]
    every = [frame.data for each in read_frames for frame in each]
    describe = partial(described, attachments, read_frames, limits)
    return await gateway.aside.work(sum(map(len, every)), describe), every


def limits_of(settings: GatewaySettings) -> Limits:
    """What a gateway with these settings takes."""
    return Limits(
        bytes_max=settings.media_bytes_max,
        pixels_max=settings.media_pixels_max,
        image_pixels_max=settings.image_pixels_max,
        video_frames_max=settings.video_frames_max,
    )


class _Reading:
    """Of one request's sources, each once."""

    def __init__(self, gateway: Gateway, held: Held, limits: Limits) -> None:
        self._gateway = gateway
        self._held = held
        self._limits = limits
        self._slots = asyncio.Semaphore(FETCHES_PER_REQUEST_MAX)

    async def read(self, wanted: Iterable[Source]) -> dict[Source, Frame]:
        fetch = self._gateway.fetch
        here: list[Source] = []
        elsewhere: list[Source] = []
        for source in wanted:
            (elsewhere if is_fetched(source, fetching=fetch is not None) else here).append(source)
        frames = await self._decode(here)
        if fetch is not None and elsewhere:
            frames |= await self._fetch_all(fetch, elsewhere)
        return frames

    async def _decode(self, wanted: Sequence[Source]) -> dict[Source, Frame]:
        size = sum(len(source.url) for source in wanted)
        decoded = await self._gateway.aside.work(size, lambda: [read(each, self._limits) for each in wanted])
        return {source: self._keep(source, frame) for source, frame in zip(wanted, decoded, strict=True)}

    async def _fetch_all(self, fetch: Fetch, wanted: Sequence[Source]) -> dict[Source, Frame]:
        tasks: dict[Source, asyncio.Task[Frame]] = {}
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

    async def _fetch(self, fetch: Fetch, source: Source) -> Frame:
        try:
            async with self._slots:
                data = await fetch(source.url, partial(self._expect, source))
        except MediaError as error:
            raise refused(source, error) from None
        frame = await self._gateway.aside.work(len(data), partial(read, source, self._limits, data))
        return self._keep(source, frame, expected=len(data))

    def _expect(self, source: Source, count: int) -> None:
        if not self._held.expect(count):
            raise self._no_room(source, count)

    def _keep(self, source: Source, frame: Frame, *, expected: int = 0) -> Frame:
        kept = self._held.keep(frame, expected=expected)
        if kept is None:
            raise self._no_room(source, len(frame.data))
        return kept

    def _no_room(self, source: Source, count: int) -> RequestError:
        if not self._held.fits_alone(count):
            most = self._gateway.media.bytes_max
            message = f"The images of one request can have {most} bytes together at the most."
            return RequestError(Code.INVALID_REQUEST, message, param=source.param)
        dispatcher = self._gateway.dispatcher
        aboard = [flight for flight in dispatcher.flights if flight.terminal is None]
        return dispatcher.admission.busy(aboard, "The server holds as many bytes of images as it may")


def _is_late(task: asyncio.Task[Frame]) -> bool:
    return task.cancelled() or not task.done()
