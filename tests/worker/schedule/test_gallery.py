"""Which encoded images are kept: those that were used last, and those that are needed longest."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import Code, RequestError
from tests.worker.engines import Image, picture
from worker.contract import Draw, Prepared
from worker.schedule.gallery import Gallery, pictures_of
from worker.schedule.rows import Chunk, Row


def request(*images: Image, tokens: int = 100, salt: str = "") -> Prepared:
    return Prepared(
        id="r",
        tokens=tuple(range(tokens)),
        draw=Draw(),
        stop=(),
        max_tokens=9,
        end_tokens=frozenset(),
        salt=salt,
        pictures=tuple(picture(*image) for image in images),
    )


def row(*images: Image, prefilled: int = 0, salt: str = "") -> Row:
    asked = request(*images, salt=salt)
    return Row(
        request=asked,
        order=(0, 0),
        family=0,
        digest=0,
        tokens=asked.tokens,
        length=len(asked.tokens),
        prefilled=prefilled,
        pictures=pictures_of(asked),
    )


def encode(gallery: Gallery, row: Row) -> list[str]:
    """All of a row's images; what had to go."""
    gone: list[str] = []
    while found := gallery.missing(row, 0):
        gone += gallery.make_room(found.nbytes, [])
        gone += gallery.encoded(row, found, found.nbytes)
    return gone


def run(gallery: Gallery, row: Row, size: int) -> None:
    chunk = Chunk(row, row.tokens[row.prefilled :][:size], last=False)
    gallery.ran(chunk)
    row.prefilled += size


def digests(*names: str) -> list[str]:
    return [picture(name, 0, 1).digest for name in names]


def counts(gallery: Gallery) -> tuple[int, int, int, int]:
    status = gallery.status()
    return status.kept, status.bytes, status.encoded, status.hits


# --- how far a row can be run ------------------------------------------------------------------------


def test_a_row_is_run_up_to_the_first_image_that_is_not_kept() -> None:
    gallery, asking = Gallery(None), row(("cat", 10, 5), ("dog", 20, 5))
    assert gallery.reach(asking, 0) == 10
    gallery.encoded(asking, asking.pictures[0], 5)
    assert gallery.reach(asking, 0) == gallery.reach(asking, 12) == 20
    gallery.encoded(asking, asking.pictures[1], 5)
    assert gallery.reach(asking, 0) == 99


def test_who_begins_within_an_image_or_at_it_has_it_encoded_first() -> None:
    gallery, asking = Gallery(None), row(("cat", 10, 5))
    for begin in (10, 14):
        assert gallery.reach(asking, begin) == begin
        assert gallery.missing(asking, begin) is asking.pictures[0]


def test_an_image_wholly_behind_what_is_reused_is_not_missed() -> None:
    gallery, asking = Gallery(None), row(("cat", 10, 5))
    assert gallery.missing(asking, 15) is None
    assert gallery.reach(asking, 15) == 99


# --- what is forgotten -------------------------------------------------------------------------------


def test_the_one_that_was_used_longest_ago_makes_room() -> None:
    gallery, first = Gallery(10), row(("cat", 0, 4), ("dog", 4, 4))
    assert encode(gallery, first) == []
    run(gallery, first, 20)
    run(gallery, row(("cat", 0, 4)), 4)
    assert encode(gallery, row(("cow", 0, 4))) == digests("dog")
    assert counts(gallery)[:2] == (2, 8)


def test_what_a_row_in_prefill_has_yet_to_run_goes_last() -> None:
    gallery, asking = Gallery(10), row(("dog", 0, 4), ("cat", 4, 4), prefilled=4)
    encode(gallery, row(("cat", 0, 4), ("dog", 4, 4)))
    assert gallery.make_room(2, [asking]) == []
    assert gallery.make_room(4, [asking]) == digests("dog")
    assert gallery.make_room(8, [asking]) == digests("cat")


def test_an_image_that_is_larger_than_was_thought_drives_others_out_and_never_itself() -> None:
    gallery = Gallery(10)
    encode(gallery, row(("cat", 0, 4)))
    asking = row(("dog", 0, 4))
    assert gallery.encoded(asking, asking.pictures[0], 50) == digests("cat")
    assert counts(gallery)[:2] == (1, 50)


def test_an_image_for_which_there_is_never_room_is_refused() -> None:
    gallery = Gallery(10)
    gallery.check(request(("cat", 0, 10)))
    with pytest.raises(
        RequestError, match="takes 11 bytes once it is encoded, and this server has 10"
    ) as caught:
        gallery.check(request(("cat", 0, 10), ("dog", 10, 11)))
    assert (caught.value.code, caught.value.param) == (Code.CONTEXT_LENGTH_EXCEEDED, "messages")


def test_clearing_leaves_what_is_needed() -> None:
    gallery, asking = Gallery(None), row(("cat", 0, 4), ("dog", 4, 5))
    encode(gallery, asking)
    asking.prefilled = 4
    assert gallery.clear([asking]) == (digests("cat"), 4)
    assert gallery.clear([]) == (digests("dog"), 5)


# --- counts ------------------------------------------------------------------------------------------


def test_an_image_is_a_hit_for_whoever_did_not_wait_for_it_and_once_whatever_the_chunks() -> None:
    gallery, first = Gallery(None), row(("cat", 0, 8))
    encode(gallery, first)
    for _ in range(4):
        run(gallery, first, 3)
    assert counts(gallery) == (1, 8, 1, 0)
    second = row(("cat", 5, 8))
    for _ in range(4):
        run(gallery, second, 4)
    assert counts(gallery) == (1, 8, 1, 1)


def test_an_image_that_stands_twice_in_a_prompt_is_encoded_once_and_hit_once() -> None:
    gallery, asking = Gallery(None), row(("cat", 0, 4), ("cat", 6, 4))
    encode(gallery, asking)
    run(gallery, asking, 20)
    assert counts(gallery) == (1, 4, 1, 1)


def test_salts_share_no_image() -> None:
    gallery = Gallery(None)
    encode(gallery, row(("cat", 0, 4), salt="one"))
    assert gallery.missing(row(("cat", 0, 4), salt="one"), 0) is None
    assert gallery.missing(row(("cat", 0, 4), salt="other"), 0) is not None
    assert gallery.missing(row(("cat", 0, 4)), 0) is not None
    assert len(pictures_of(request(("cat", 0, 4), salt="one"))[0].digest) == 64


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 12), st.integers(1, 2)), max_size=60))
def test_what_is_kept_never_takes_more_than_it_may(asked: list[tuple[str, int, int]]) -> None:
    gallery, kept = Gallery(16), dict[str, int]()
    for name, size, swelling in asked:
        asking = row((f"{name}{size}", 0, size))
        [image] = asking.pictures
        missing = gallery.missing(asking, 0)
        assert (missing is None) == (image.digest in kept)
        if missing is None:
            run(gallery, asking, size)
            continue
        for digest in gallery.make_room(image.nbytes, []):
            del kept[digest]
        assert sum(kept.values()) + image.nbytes <= 16
        for digest in gallery.encoded(asking, replace(image), swelling * size):
            del kept[digest]
        kept[image.digest] = swelling * size
        assert gallery.bytes == sum(kept.values())
        assert gallery.bytes <= 16 or len(kept) == 1
