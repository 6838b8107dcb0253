"""Videos, as files and as frames, up to the answers: equal to upstream's on the same frames."""

from __future__ import annotations

import hashlib
import io
import random
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm import stream_generate
from mlx_vlm.utils import load_video
from PIL import Image

from protocol.errors import Code, RequestError
from protocol.types import Media
from tests.factories import request
from tests.worker.image_questions import draw_image, encoded, upstream
from tests.worker.input.media.test_multimodal_prompt import ids_of
from tests.worker.vision_models import loaded, preparer
from worker.input.media.video_frames import FRAMES_MAX
from worker.input.media.videos import open_video
from worker.values import EngineRequest, SamplingParams

MESSAGES = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "look "},
            {"type": "video"},
            {"type": "text", "text": " and "},
            {"type": "image"},
            {"type": "text", "text": " then tell"},
        ],
    }
]


def media(files: Sequence[bytes], mime: str = "image/png", first: int = 0) -> Media:
    digest = hashlib.sha256(b"".join(files)).hexdigest()
    return Media(frame=first, frames=len(files), mime=mime, sha256=digest, param="the video")


def film(folder: Path, frames: int, fps: float = 8.0, name: str = "film.mp4", codec: str = "mp4v") -> bytes:
    """Return a video file with changing colours."""
    rng, path = random.Random(1), folder / name
    library: Any = cv2
    writer = library.VideoWriter(str(path), library.VideoWriter_fourcc(*codec), fps, (64, 48))
    for _ in range(frames):
        image = Image.open(io.BytesIO(draw_image(rng, (64, 48))))
        writer.write(library.cvtColor(np.asarray(image), library.COLOR_RGB2BGR))
    writer.release()
    return path.read_bytes()


def engine_request(name: str, video: Sequence[bytes], mime: str, image: bytes) -> EngineRequest:
    own = [media(video, mime), media([image], first=len(video))]
    return preparer(name).prepare(request(messages=MESSAGES, media=own), [*video, image])


def answer(
    name: str, frames: np.ndarray, metadata: Any, image: bytes, tokens: int
) -> tuple[list[int], list[int]]:
    """Return upstream's prompt tokens and its answer."""
    network, processor = upstream(name)
    text = processor.tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    images = [Image.open(io.BytesIO(image))]
    said = processor(text=[text], images=images, videos=[frames], video_metadata=[metadata])
    given = {key: mx.array(np.array(value)) for key, value in said.items()}
    prompt = given["input_ids"][0].tolist()
    given["mask"] = given.pop("attention_mask")
    answers = stream_generate(network, processor, "", max_tokens=tokens, temperature=0.0, **given)
    return prompt, [each.token for each in answers][:tokens]


def said(name: str, request: EngineRequest, tokens: int) -> list[int]:
    engine = loaded(name).engine
    embeddings = {image.digest: engine.encode_image(image) for image in request.images}
    engine.set_images("a", request.tokens, request.images)
    engine.prefill({"a": request.tokens[: request.images[0].end - 1]}, embeddings=embeddings)
    engine.prefill({"a": request.tokens[request.images[0].end - 1 : -1]}, embeddings=embeddings)
    engine.start("a", request.tokens, len(request.tokens), SamplingParams())
    answered: list[int] = []
    while len(answered) < tokens:
        answered += engine.step().tokens.values()
    engine.drop("a")
    return answered


@pytest.mark.parametrize("is_file", [True, False])
def test_beside_an_image_it_says_what_upstream_says(tmp_path: Path, is_file: bool) -> None:
    # Only for this family does upstream encode an image and a video in one prompt.
    name, rng = "qwen3_vl-eyes", random.Random(1)
    image = draw_image(rng)
    if is_file:
        data = film(tmp_path, 20)
        frames, metadata = load_video(str(tmp_path / "film.mp4"))
        request = engine_request(name, [data], "video/mp4", image)
    else:
        files = [draw_image(rng, (64, 48)) for _ in range(6)]
        frames = np.stack([np.asarray(Image.open(io.BytesIO(file))).transpose(2, 0, 1) for file in files])
        metadata = {"frames_indices": range(6), "fps": 2.0}
        request = engine_request(name, files, "image/png", image)
    prompt, answered = answer(name, frames, metadata, image, 10)
    assert ids_of(request) == prompt
    assert said(name, request, 10) == answered


@pytest.mark.parametrize("name", ["gemma3-eyes", "smolvlm-eyes"])
def test_a_family_without_videos_says_so(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        engine_request(name, [draw_image(random.Random(1))] * 2, "image/png", draw_image(random.Random(2)))
    assert (caught.value.code, caught.value.param) == (Code.UNSUPPORTED_MEDIA, "the video")


def test_a_long_one_is_looked_at_in_places(tmp_path: Path) -> None:
    data = film(tmp_path, 400, fps=4.0)
    video = open_video([data], media([data], "video/mp4"))
    assert len(video.frames) == FRAMES_MAX
    assert (video.indices[0], video.indices[-1]) == (0, 399)
    files = [encoded(Image.new("RGB", (8, 8)))] * 100
    assert len(open_video(files, media(files)).frames) == FRAMES_MAX
    files = [encoded(Image.new("RGB", size)) for size in ((40, 20), (80, 40))]
    assert [frame.size for frame in open_video(files, media(files)).frames] == [(40, 20)] * 2


def wrong_headers(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield files of 20 frames at 8 a second whose headers say something else, or nothing."""
    webm = film(folder, 20, name="film.webm", codec="VP80")
    duration, rate = webm.index(b"\x44\x89\x88"), webm.index(b"\x23\xe3\x83\x84")
    no_rate = webm[:rate] + b"\xec\x86" + bytes(6) + webm[rate + 8 :]
    for name, data in (("no duration", webm), ("no duration, no rate", no_rate)):
        yield name, data[:duration] + b"\xec\x89" + bytes(9) + data[duration + 11 :]
    avi = film(folder, 20, name="film.avi", codec="MJPG")
    header = avi.index(b"strh") + 8
    for place, *values in ((32, 0), (32, 5), (32, 1000), (32, 2**32 - 1), (20, 0, 8), (20, 1, 0)):
        changed = bytearray(avi)
        struct.pack_into(f"<{len(values)}I", changed, header + place, *values)
        changed[48:52] = changed[header + 32 : header + 36]
        yield f"{values} at {place}", bytes(changed)


def test_headers_with_wrong_counts_and_rates_are_not_believed(tmp_path: Path) -> None:
    for wrong, data in wrong_headers(tmp_path):
        video = open_video([data], media([data], "video/webm"))
        assert (len(video.frames), video.indices[0], video.indices[-1]) == (4, 0, 19), wrong
        assert len({frame.tobytes() for frame in video.frames}) == 4, wrong


@pytest.mark.parametrize("data", [b"", b"no video", b"\x00\x00\x00\x20ftypisom" + bytes(200)])
def test_invalid_video_is_refused(data: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        open_video([data], media([data], "video/mp4"))
    assert (caught.value.code, caught.value.param) == (Code.INVALID_MEDIA, "the video")
    assert caught.value.message == "The video cannot be read: it has no frames that can be decoded."
