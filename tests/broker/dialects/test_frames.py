"""Frames of images and videos, and their description to the worker."""

from __future__ import annotations

from hashlib import sha256
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.dialects.frames import (
    LOW_PIXELS_MAX,
    MediaLimits,
    MediaSource,
    check_taken,
    described,
    read,
    sources,
    spread,
)
from broker.dialects.media_types import Frame, image_in, video_in
from broker.dialects.parts import Attachment, Image, Video
from protocol.errors import Code, RequestError
from protocol.types import Capabilities, Media
from protocol.wire import MEDIA_FRAMES_MAX, decode_to_worker, encode
from tests.factories import request
from tests.images import MP4, data_url, picture

LIMITS = MediaLimits(bytes_max=1000, image_pixels_max=None, video_frames_max=4)
RED, BLUE = picture("red"), picture("blue")


def urls(found: list[list[MediaSource]]) -> list[list[str]]:
    return [[source.url for source in each] for each in found]


def video(count: int, param: str = "v") -> Video:
    return Video(tuple(f"data:,{n}" for n in range(count)), param, in_frames=True)


def test_an_image_and_a_file_are_a_frame_each_and_a_list_one_for_each_image() -> None:
    found = sources([Image("data:,a", "i"), Video(("data:,b",), "f"), video(3)], LIMITS)
    assert urls(found) == [["data:,a"], ["data:,b"], ["data:,0", "data:,1", "data:,2"]]
    assert [source.is_video for each in found for source in each] == [False, True, False, False, False]
    assert [source.param for source in found[2]] == ["v.video[0]", "v.video[1]", "v.video[2]"]
    assert urls(sources([video(10)], LIMITS)) == [["data:,0", "data:,3", "data:,6", "data:,9"]]
    assert urls(sources([video(1)], LIMITS)) == [["data:,0"] * 2]


@given(st.integers(1, 500), st.integers(2, 64))
def test_frames_are_spread_evenly(count: int, most: int) -> None:
    places = spread(count, most)
    assert len(places) == min(count, most)
    assert (places[0], places[-1]) == (0, count - 1)
    gaps = [after - before for before, after in pairwise(places)]
    assert all(gap >= 1 for gap in gaps)
    assert max(gaps, default=0) - min(gaps, default=0) <= 1


def test_there_are_only_so_many_frames_all_together() -> None:
    images: list[Attachment] = [Image("data:,", f"i{n}") for n in range(MEDIA_FRAMES_MAX - 4)]
    assert len(sources([*images, video(4)], LIMITS)) == len(images) + 1
    with pytest.raises(RequestError) as caught:
        sources([Image("data:,", "more"), *images, video(4, "last")], LIMITS)
    assert (caught.value.code, caught.value.param) == (Code.INVALID_REQUEST, "last")
    assert str(MEDIA_FRAMES_MAX) in caught.value.message


def test_unsupported_media_error_names_the_attachment() -> None:
    attachments = [Image("data:,", "i"), video(2)]
    check_taken(attachments, Capabilities(images=True, videos=True), "m")
    for capabilities, refused in ((Capabilities(images=True), "v"), (Capabilities(videos=True), "i")):
        with pytest.raises(RequestError) as caught:
            check_taken(attachments, capabilities, "m")
        assert (caught.value.code, caught.value.param) == (Code.UNSUPPORTED_MEDIA, refused)


def assert_refused(source: MediaSource, data: bytes | None = None) -> None:
    with pytest.raises(RequestError) as caught:
        read(source, LIMITS, data)
    assert (caught.value.code, caught.value.param) == (Code.INVALID_MEDIA, "p")


def test_a_frame_is_read_from_its_url_or_from_what_that_has_led_to() -> None:
    assert read(MediaSource(data_url(RED), "p"), LIMITS) == image_in(RED)
    assert read(MediaSource("https://elsewhere", "p"), LIMITS, RED) == image_in(RED)
    assert read(MediaSource(data_url(MP4), "p", is_video=True), LIMITS) == video_in(MP4)


@pytest.mark.parametrize("data", [None, MP4, RED + bytes(1000)])
def test_a_bad_one_is_named(data: bytes | None) -> None:
    assert_refused(MediaSource("data:image/png;base64,*" if data is None else data_url(data), "p"))
    if data is not None:
        assert_refused(MediaSource("https://elsewhere", "p"), data)
        assert_refused(MediaSource("https://elsewhere", "p", is_video=data != MP4), data)


FRAMES = [image_in(picture(colour)) for colour in ("red", "green", "blue")]


def tell(*attachments: Attachment, limits: MediaLimits = LIMITS) -> list[Media]:
    """Describe attachments that have one frame per URL."""
    counts = [1 if isinstance(each, Image) else len(each.urls) for each in attachments]
    return described(attachments, [FRAMES[:count] for count in counts], limits)


def test_frames_are_numbered_through_and_a_list_is_known_by_all_of_its_bytes() -> None:
    told = tell(Image("a", "i"), video(2), Image("b", "j"))
    numbered = [(media.frame, media.frames, media.param) for media in told]
    assert numbered == [(0, 1, "i"), (1, 2, "v"), (3, 1, "j")]
    assert told[0].sha256 == sha256(FRAMES[0].data).hexdigest()
    assert told[1].sha256 == sha256(FRAMES[0].data + FRAMES[1].data).hexdigest()
    [file] = described([Video(("a",), "v")], [[Frame("video/mp4", MP4, "00")]], LIMITS)
    assert (file.mime, file.frames, file.sha256) == ("video/mp4", 1, "00")
    message = request(media=told)
    frames = [frame.data for count in (1, 2, 1) for frame in FRAMES[:count]]
    assert decode_to_worker(encode(message, frames)) == (message, frames)


def test_how_finely_an_image_is_looked_at() -> None:
    for detail, limit, pixels in (
        ("high", None, None), ("", 10**6, 10**6), ("low", None, LOW_PIXELS_MAX),
        ("low", 10**6, LOW_PIXELS_MAX), ("low", 1000, 1000),
    ):  # fmt: skip
        limits = MediaLimits(bytes_max=1, image_pixels_max=limit, video_frames_max=2)
        assert tell(Image("a", "i", detail), limits=limits)[0].pixels_max == pixels
        assert tell(video(2), limits=limits)[0].pixels_max == limit
