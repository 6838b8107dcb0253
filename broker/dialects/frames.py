"""Binary frames for the worker from the images and videos of a conversation, with a description of each.

An image is one frame, and so is the file of a video. A video sent as images has a frame for each, sampled
evenly if there are more than the limit. Pure: URLs are fetched elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from broker.dialects.data_urls import MediaError, check_size, is_elsewhere, read_data_url
from broker.dialects.media_types import Frame, image_in, video_in
from broker.dialects.parts import Attachment, Image, Video
from protocol.errors import Code, RequestError
from protocol.types import Capabilities, Media
from protocol.wire import MEDIA_FRAMES_MAX

LOW_PIXELS_MAX = 512 * 512
"""Maximum pixels of an image with `detail: low`, as OpenAI documents."""


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits on media. `bytes_max`: of one frame. `image_pixels_max`: size to which images are reduced; None:
    the model's default. `video_frames_max`: of a video sent as images."""

    bytes_max: int
    image_pixels_max: int | None
    video_frames_max: int


@dataclass(frozen=True, slots=True)
class MediaSource:
    """Source of a frame. Sources with the same URL are equal, wherever they are in the body."""

    url: str
    param: str = field(compare=False)
    is_video: bool = False


def sources(attachments: Sequence[Attachment], limits: MediaLimits) -> list[list[MediaSource]]:
    """Return the frames of each attachment. Raises `RequestError` if there are too many in total."""
    found = [_sources(attachment, limits.video_frames_max) for attachment in attachments]
    count = 0
    for attachment, each in zip(attachments, found, strict=True):
        count += len(each)
        if count > MEDIA_FRAMES_MAX:
            message = f"A request can have at most {MEDIA_FRAMES_MAX} images, including the frames of videos."
            raise RequestError(Code.INVALID_REQUEST, message, param=attachment.param)
    return found


def _sources(attachment: Attachment, video_frames_max: int) -> list[MediaSource]:
    match attachment:
        case Image(url, param):
            return [MediaSource(url, param)]
        case Video(urls, param, in_frames=False):
            return [MediaSource(urls[0], param, is_video=True)]
        case Video(urls, param):
            shown = [
                MediaSource(urls[place], f"{param}.video[{place}]")
                for place in spread(len(urls), video_frames_max)
            ]
            # On the wire a single frame is an image. Models that process pairs double it anyway.
            return shown * 2 if len(shown) == 1 else shown


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` (2 or more) evenly spaced indices below `count`, with the first and last."""
    if count <= most:
        return list(range(count))
    return [place * (count - 1) // (most - 1) for place in range(most)]


def check_taken(attachments: Sequence[Attachment], capabilities: Capabilities, model: str) -> None:
    """Raise `RequestError` for the first attachment that the model does not accept."""
    for attachment in attachments:
        is_video = isinstance(attachment, Video)
        if not (capabilities.videos if is_video else capabilities.images):
            message = f"{model} does not accept {'videos' if is_video else 'images'}."
            raise RequestError(Code.UNSUPPORTED_MEDIA, message, param=attachment.param)


def read(source: MediaSource, limits: MediaLimits, data: bytes | None = None) -> Frame:
    """Read and check a frame. `data`: the bytes fetched from its URL; None for a `data:` URL.

    Raises `RequestError`.
    """
    try:
        if data is None:
            data = read_data_url(source.url, bytes_max=limits.bytes_max)
        check_size(len(data), limits.bytes_max)
        return video_in(data) if source.is_video else image_in(data)
    except MediaError as error:
        raise refused(source, error) from None


def refused(source: MediaSource, error: MediaError) -> RequestError:
    """Return the error for the client."""
    return RequestError(Code.INVALID_MEDIA, str(error), param=source.param)


def is_fetched(source: MediaSource, *, fetching: bool) -> bool:
    """Return whether the source must be fetched. `fetching`: whether it may be. Raises `RequestError`."""
    try:
        return is_elsewhere(source.url, fetching=fetching)
    except MediaError as error:
        raise refused(source, error) from None


def described(
    attachments: Sequence[Attachment], frames: Sequence[Sequence[Frame]], limits: MediaLimits
) -> list[Media]:
    """Return each attachment's description for the worker. Their `frames` are sent one after another."""
    descriptions: list[Media] = []
    place = 0
    for attachment, each in zip(attachments, frames, strict=True):
        descriptions.append(
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
    return descriptions


def _digest(frames: Sequence[Frame]) -> str:
    """Return the hex SHA-256 of all frames' bytes in order."""
    if len(frames) == 1:
        return frames[0].sha256
    digest = sha256()
    for frame in frames:
        digest.update(frame.data)
    return digest.hexdigest()


def _pixels_max(attachment: Attachment, limits: MediaLimits) -> int | None:
    if isinstance(attachment, Image) and attachment.detail == "low":
        return min(LOW_PIXELS_MAX, limits.image_pixels_max or LOW_PIXELS_MAX)
    return limits.image_pixels_max
