import contextlib
import re
from base64 import b64encode
from urllib.parse import quote_from_bytes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.dialects.data_urls import MediaError, is_elsewhere, read_data_url
from tests.broker.dialects.test_media_types import peak_bytes

PNG = b"\x89PNG\r\n\x1a\npixels"
BYTES_MAX = 1 << 20

KNOWN_ERRORS = re.compile(
    r"not a URL; send a data: URL"
    r"|not a valid data: URL: no comma before its data"
    r"|the data: URL has (invalid base64|an invalid percent-escape)"
    r"|fetching images from URLs is not enabled; send a data: URL"
    r"|[a-z][a-z0-9+.-]{0,31}: URLs are not supported; send a data: URL"
    r"|the file is too large: \d+ bytes, at most 30 are allowed"
)


def in_base64(data: bytes, header: str = "image/png;base64") -> str:
    return f"data:{header},{b64encode(data).decode()}"


def read(url: str) -> bytes:
    return read_data_url(url, bytes_max=BYTES_MAX)


def refusal(url: str, bytes_max: int = BYTES_MAX) -> str:
    with pytest.raises(MediaError) as caught:
        read_data_url(url, bytes_max=bytes_max)
    return str(caught.value)


def test_each_way_to_write_data_is_read() -> None:
    for header in (";base64", "image/png;name=a.png;BASE64", "image/png; base64 "):
        assert read(in_base64(PNG, header)) == PNG
    assert read(f"\n  {in_base64(PNG).replace('data:', 'DATA:')}\t\n") == PNG
    digits = b64encode(PNG).decode()
    escaped = digits.replace("=", "%3D").replace("+", "%2B").replace("/", "%2f")
    for payload in (digits.rstrip("="), escaped, f"{digits}%0A"):
        assert read(f"data:image/png;base64,{payload}") == PNG
    assert read("data:,GIF89a%20 =3D=\n=%253D%3D") == b"GIF89a  =3D==%3D="


BAD_BASE64, BAD_ESCAPE = (
    f"the data: URL has {what}" for what in ("invalid base64", "an invalid percent-escape")
)
NOT_ENABLED = "fetching images from URLs is not enabled; send a data: URL"


@pytest.mark.parametrize(
    ("url", "error"),
    [
        (" HTTPS://host/secret,x", NOT_ENABLED),
        ("FILE:///etc/secret", "file: URLs are not supported; send a data: URL"),
        *((url, "not a URL; send a data: URL") for url in ("", "//host/secret", "secret value: 1")),
        ("data:image/png;base64", "not a valid data: URL: no comma before its data"),
        *((f"data:;base64,{it}", BAD_BASE64) for it in ("A", "AA*A", "AA=AAAAA", "iVBOR_-w", "\ud800AAA")),
        *((f"data:;base64,{it}", BAD_ESCAPE) for it in ("%", "AB%3", "%4g")),
        ("data:,%4\n", BAD_ESCAPE),
    ],
)
def test_any_other_url_is_refused_by_what_it_is_alone(url: str, error: str) -> None:
    assert refusal(url) == error


def test_remote_url_is_accepted_only_when_fetching_is_enabled() -> None:
    assert is_elsewhere(" HTTPS://host/a", fetching=True)
    assert not is_elsewhere(" Data:,x", fetching=True)
    for url, fetching in (("https://host/a", False), ("file:///etc/passwd", True)):
        with pytest.raises(MediaError):
            is_elsewhere(url, fetching=fetching)


def test_the_limit_is_exact_and_both_numbers_are_named() -> None:
    for url in (in_base64(PNG), in_base64(PNG).rstrip("="), f"data:,{quote_from_bytes(PNG)}"):
        assert read_data_url(url, bytes_max=len(PNG)) == PNG
        expected = f"the file is too large: {len(PNG)} bytes, at most {len(PNG) - 1} are allowed"
        assert refusal(url, bytes_max=len(PNG) - 1) == expected


@pytest.mark.parametrize("payload", ["%", "%41", "A ", "A"])
@pytest.mark.parametrize("header", [";base64", ""])
def test_a_hostile_payload_takes_no_more_than_a_few_times_its_own_memory(payload: str, header: str) -> None:
    url = f"data:{header},{payload * (200_000 // len(payload))}"

    def act() -> None:
        with contextlib.suppress(MediaError):
            read(url)

    assert peak_bytes(act) < 6 * len(url)


@settings(max_examples=50)
@given(st.binary(max_size=80), st.booleans(), st.data())
def test_all_bytes_are_read_back_however_they_are_folded(
    image: bytes, base64: bool, data: st.DataObject
) -> None:
    url = in_base64(image) if base64 else f"data:,{quote_from_bytes(image)}"
    cuts = data.draw(st.lists(st.integers(url.index(",") + 1, len(url)), max_size=4).map(sorted))
    inside_escape = [cut for cut in cuts if "%" in url[max(0, cut - 2) : cut]]
    for cut in reversed([cut for cut in cuts if cut not in inside_escape]):
        url = f"{url[:cut]}\r\n{url[cut:]}"
    assert read(url) == image


PREFIXES = st.sampled_from(["", "data:", "data:,", "data:;base64,", "data:,GIF89a", "data:;base64,R0lGODlh"])


@given(PREFIXES, st.text("dataDf:;,%=+/-_.069 \n\0é😀\ud800", max_size=40))
def test_any_text_is_bytes_or_an_error_that_does_not_repeat_it(prefix: str, rest: str) -> None:
    try:
        data = read_data_url(prefix + rest, bytes_max=30)
    except MediaError as error:
        message = str(error)
    else:
        assert len(data) <= 30
        return
    assert KNOWN_ERRORS.fullmatch(message)
