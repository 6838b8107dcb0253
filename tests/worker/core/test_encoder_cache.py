"""Encoder cache: keeps the most recently used images, and those that are needed longest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import Code, RequestError
from protocol.prefix_namespace import salt_in
from tests.factories import engine_request
from tests.worker.engines import Image, picture
from worker.core.encoder_cache import EncoderCache, images_of
from worker.core.rows import Chunk, Row
from worker.values import EncodedImage, EngineRequest, ImageInput


def request(*images: Image, tokens: int = 100, salt: str = "") -> EngineRequest:
    return engine_request("r", tokens, salt=salt, images=tuple(picture(*image) for image in images))


def row(*images: Image, prefilled: int = 0, salt: str = "") -> Row:
    asked = request(*images, salt=salt)
    return Row(
        request=asked,
        queue_key=(0, 0),
        prompt_group=0,
        digest=0,
        tokens=asked.tokens,
        length=len(asked.tokens),
        prefilled=prefilled,
        images=images_of(asked),
    )


def encode(encoder_cache: EncoderCache, row: Row) -> None:
    """Encode all images of a row."""
    while found := encoder_cache.missing(row, 0):
        encoder_cache.make_room(found.nbytes, [])
        add(encoder_cache, row, found)


def add(encoder_cache: EncoderCache, row: Row, image: ImageInput, swelling: int = 1) -> None:
    encoder_cache.add(row, image, EncodedImage(None, swelling * image.nbytes))


def has(encoder_cache: EncoderCache, name: str) -> bool:
    return encoder_cache.missing(row((name, 0, 4)), 0) is None


def run(encoder_cache: EncoderCache, row: Row, size: int) -> None:
    chunk = Chunk(row, row.tokens[row.prefilled :][:size], last=False)
    encoder_cache.ran(chunk)
    row.prefilled += size


def counts(encoder_cache: EncoderCache) -> tuple[int, int, int, int]:
    status = encoder_cache.status()
    return status.kept, status.bytes, status.encoded, status.hits


def test_a_row_is_run_up_to_the_first_image_that_is_not_kept() -> None:
    encoder_cache, asking = EncoderCache(None), row(("cat", 20, 5), ("dog", 30, 5))
    assert encoder_cache.reach(asking, 0) == 20
    add(encoder_cache, asking, asking.images[0])
    assert encoder_cache.reach(asking, 0) == encoder_cache.reach(asking, 22) == 30
    add(encoder_cache, asking, asking.images[1])
    assert encoder_cache.reach(asking, 0) == 99


def test_short_text_waits_for_the_image_behind_it_but_no_image_waits_for_another() -> None:
    encoder_cache, asking = EncoderCache(None), row(("cat", 15, 5), ("dog", 25, 5))
    assert encoder_cache.reach(asking, 0) == 0
    assert encoder_cache.missing(asking, 19) is asking.images[0]
    add(encoder_cache, asking, asking.images[0])
    assert encoder_cache.reach(asking, 0) == 25
    assert encoder_cache.reach(asking, 20) == 20


def test_the_one_that_was_used_longest_ago_makes_room() -> None:
    encoder_cache, first = EncoderCache(10), row(("cat", 0, 4), ("dog", 4, 4))
    encode(encoder_cache, first)
    run(encoder_cache, first, 20)
    run(encoder_cache, row(("cat", 0, 4)), 4)
    encode(encoder_cache, row(("cow", 0, 4)))
    assert not has(encoder_cache, "dog")
    assert counts(encoder_cache)[:2] == (2, 8)


def test_images_that_a_prefilling_row_still_needs_are_evicted_last() -> None:
    encoder_cache, asking = EncoderCache(10), row(("dog", 0, 4), ("cat", 4, 4), prefilled=4)
    encode(encoder_cache, row(("cat", 0, 4), ("dog", 4, 4)))
    encoder_cache.make_room(2, [asking])
    assert has(encoder_cache, "dog")
    encoder_cache.make_room(4, [asking])
    assert has(encoder_cache, "cat")
    assert not has(encoder_cache, "dog")
    encoder_cache.make_room(8, [asking])
    assert not has(encoder_cache, "cat")


def test_an_image_for_which_there_is_never_room_is_refused() -> None:
    encoder_cache = EncoderCache(10)
    encoder_cache.check(request(("cat", 0, 10)))
    words = "takes 11 bytes once it is encoded, and this server has 10"
    with pytest.raises(RequestError, match=words) as caught:
        encoder_cache.check(request(("cat", 0, 10), ("dog", 10, 11)))
    assert (caught.value.code, caught.value.param) == (Code.CONTEXT_LENGTH_EXCEEDED, "messages")


def test_clearing_leaves_what_is_needed() -> None:
    encoder_cache, asking = EncoderCache(None), row(("cat", 0, 4), ("dog", 4, 5))
    encode(encoder_cache, asking)
    asking.prefilled = 4
    assert encoder_cache.clear([asking]) == 4
    assert not has(encoder_cache, "cat")
    assert encoder_cache.clear([]) == 5


def test_salts_share_no_image_and_clearing_a_namespace_leaves_those_of_others() -> None:
    encoder_cache = EncoderCache(None)
    for namespace, salt in (("ann", ""), ("ann", "tenant"), ("bob", ""), ("", "")):
        asking = row(("cat", 0, 4), salt=salt_in(namespace, salt))
        assert encoder_cache.missing(asking, 0) is not None
        encode(encoder_cache, asking)
    assert (encoder_cache.clear([], "ann"), encoder_cache.bytes) == (8, 8)
    assert encoder_cache.missing(row(("cat", 0, 4), salt=salt_in("bob", "")), 0) is None
    assert encoder_cache.missing(row(("cat", 0, 4), salt=salt_in("ann", "")), 0) is not None


def test_an_image_is_a_hit_for_whoever_did_not_wait_for_it_and_once_whatever_the_chunks() -> None:
    encoder_cache, first = EncoderCache(None), row(("cat", 0, 8))
    encode(encoder_cache, first)
    for _ in range(4):
        run(encoder_cache, first, 3)
    assert counts(encoder_cache) == (1, 8, 1, 0)
    second = row(("cat", 5, 8))
    for _ in range(4):
        run(encoder_cache, second, 4)
    assert counts(encoder_cache) == (1, 8, 1, 1)


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 12), st.integers(1, 2)), max_size=60))
def test_encoder_cache_stays_within_its_limit(asked: list[tuple[str, int, int]]) -> None:
    encoder_cache = EncoderCache(16)
    for name, size, swelling in asked:
        asking = row((f"{name}{size}", 0, size))
        [image] = asking.images
        if encoder_cache.missing(asking, 0) is None:
            run(encoder_cache, asking, size)
            continue
        encoder_cache.make_room(image.nbytes, [])
        assert encoder_cache.bytes + image.nbytes <= 16
        add(encoder_cache, asking, image, swelling)
        status = encoder_cache.status()
        assert encoder_cache.missing(asking, 0) is None
        assert status.bytes <= 16 or status.kept == 1
