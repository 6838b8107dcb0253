"""Images and videos of a conversation -> the frames that go to a worker with it, and what is said of each.

An image is a frame, the file of a video another; a video that came as images is a frame for each, spread
evenly over it where there are more than are looked at. Pure: what a URL leads to is fetched elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from broker.dialects.formats import Frame, image_in, video_in
from broker.dialects.media import MediaError, check_size, is_elsewhere, read_data_url
from broker.dialects.parts import Attachment, Image, Video
from protocol.errors import Code, RequestError
from protocol.parts import Capabilities, Media
from protocol.wire import MEDIA_FRAMES_MAX

LOW_PIXELS_MAX = 512 * 512
"""Of an image with `detail: low`, as OpenAI documents it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`bytes_max`: of one frame. `pixels_max`: of an image as it comes. `image_pixels_max`: what it is made
    no larger than; None: as the model likes. `video_frames_max`: of a video that comes as images."""

    bytes_max: int
    pixels_max: int
    image_pixels_max: int | None
    video_frames_max: int


@dataclass(frozen=True, slots=True)
class Source:
    """Where a frame comes from. Two with one URL are one, wherever the client has put them."""

    url: str
    param: str = field(compare=False)
    is_video: bool = False


def sources(attachments: Sequence[Attachment], limits: Limits) -> list[list[Source]]:
    """The frames of each. Raises `RequestError` where there are too many of them, all together."""
    found = [_sources(attachment, limits.video_frames_max) for attachment in attachments]
    count = 0
    for attachment, each in zip(attachments, found, strict=True):
        count += len(each)
        if count > MEDIA_FRAMES_MAX:
            message = f"A request can have {MEDIA_FRAMES_MAX} images at the most, frames of videos included."
            raise RequestError(Code.INVALID_REQUEST, message, param=attachment.param)
    return found


def _sources(attachment: Attachment, video_frames_max: int) -> list[Source]:
    match attachment:
        case Image(url, param):
            return [Source(url, param)]
        case Video(urls, param, in_frames=False):
            return [Source(urls[0], param, is_video=True)]
        case Video(urls, param):
            shown = [
                Source(urls[place], f"{param}.video[{place}]")
                for place in spread(len(urls), video_frames_max)
            ]
            # What has one frame is an image on the wire. Models that look at pairs would double it anyway.
            return shown * 2 if len(shown) == 1 else shown


def spread(count: int, most: int) -> list[int]:
    """All places of a list of `count`, or `most` of them as evenly as can be, the first and the last among
    them. `most`: at least 2."""
    if count <= most:
        return list(range(count))
    return [place * (count - 1) // (most - 1) for place in range(most)]


def check_taken(attachments: Sequence[Attachment], capabilities: Capabilities, model: str) -> None:
    """Raises `RequestError` for the first that the model does not take."""
    for attachment in attachments:
        is_video = isinstance(attachment, Video)
        if not (capabilities.videos if is_video else capabilities.images):
            message = f"{model} does not take {'videos' if is_video else 'images'}."
            raise RequestError(Code.UNSUPPORTED_MEDIA, message, param=attachment.param)


def read(source: Source, limits: Limits, data: bytes | None = None) -> Frame:
    """A frame whose bytes are checked. `data`: what its URL has led to; None: it is a `data:` URL.

    Raises `RequestError`.
    """
    try:
        if data is None:
            data = read_data_url(source.url, bytes_max=limits.bytes_max)
        check_size(len(data), limits.bytes_max)
        return video_in(data) if source.is_video else image_in(data, pixels_max=limits.pixels_max)
    except MediaError as error:
        raise refused(source, error) from None


def refused(source: Source, error: MediaError) -> RequestError:
    """As the client is told."""
    return RequestError(Code.INVALID_MEDIA, str(error), param=source.param)


def is_fetched(source: Source, *, fetching: bool) -> bool:
    """Whether its bytes are elsewhere. `fetching`: whether such are taken. Raises `RequestError`."""
    try:
        return is_elsewhere(source.url, fetching=fetching)
    except MediaError as error:
        raise refused(source, error) from None


def described(
    attachments: Sequence[Attachment], frames: Sequence[Sequence[Frame]], limits: Limits
) -> list[Media]:
    """What the worker is told of each, whose `frames` follow each other."""
    told: list[Media] = []
    place = 0
    for attachment, each in zip(attachments, frames, strict=True):
        told.append(
            Media(
                frame=place,
                frames=len(each),
                mime=each[0].mime,
                sha256=_digest(each),
                pixels_max=_pixels_max(attachment, limits),
                param=attachment.param,
            )
        )
        place += len(each)
    return told


def _digest(frames: Sequence[Frame]) -> str:
    """Of their bytes in order."""
    if len(frames) == 1:
        return frames[0].sha256
    digest = sha256()
    for frame in frames:
        digest.update(frame.data)
    return digest.hexdigest()


def _pixels_max(attachment: Attachment, limits: Limits) -> int | None:
    if isinstance(attachment, Image) and attachment.detail == "low":
        return min(LOW_PIXELS_MAX, limits.image_pixels_max or LOW_PIXELS_MAX)
    return limits.image_pixels_max
