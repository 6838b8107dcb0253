"""Hosts from which the gateway fetches images, for any spelling of a URL or an address."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.dialects.data_urls import MediaError
from broker.dialects.media_hosts import PORTS, AllowedHosts, is_public, read_url


def refused(url: str) -> str:
    with pytest.raises(MediaError) as caught:
        read_url(url)
    return str(caught.value)


@pytest.mark.parametrize(
    ("url", "authority", "target"),
    [
        ("https://Example.COM.:443/a/b?c=d#e", "example.com", "/a/b?c=d"),
        (" https://example.com:80 \n", "example.com:80", "/"),
        ("http://a_b.example.com/ä%20b%20c", "a_b.example.com", "/%C3%A4%20b%20c"),
        ("https://bücher.example/", "xn--bcher-kva.example", "/"),
        ("http://93.184.216.34:81/x", "93.184.216.34:81", "/x"),
        ("http://[2606:4700:4700:0::1111]:81/x", "[2606:4700:4700::1111]:81", "/x"),
    ],
)
def test_a_url_is_read_to_what_is_asked(url: str, authority: str, target: str) -> None:
    place = read_url(url)
    assert (place.authority, place.target) == (authority, target)
    assert place.url == f"{url.strip().partition(':')[0]}://{authority}{target}"
    assert read_url(place.url) == place


@pytest.mark.parametrize(
    "url",
    [
        "http://me@example.com/", "http://me:secret@example.com/", "http://@example.com/", "http://",
        "http:///etc/passwd", "http://exa mple.com/", "http://example.com/a b", "http://example.com\\@inside/",
        "http://example.com/\x00", "http://example.com:0/", "http://example.com:65536/", "http://example.com:x/",
        "http://example..com/", "http://-example.com/", "http://exam%70le.com/", "http://example.com%2f@x/",
        "http://[::1/", "http://[::1%25eth0]/", "http://[fe80::1%eth0]/", "http://[1.2.3.4]/", "http://[x]/",
        "http://2130706433/", "http://0x7f000001/", "http://0x7f.1/", "http://0177.0.0.1/", "http://127.1/",
        "http://127.0.0.1.5/", "http://127.0.0.01/", "http://1.2.3.0x4/", "http://example.5/", "http://0/",
        "http://" + "a" * 64 + ".com/", "http://" + "a." * 127 + "com/", "http://\u2025/", "http://\ud800.com/",
    ],
)  # fmt: skip
def test_ambiguous_url_is_refused(url: str) -> None:
    assert refused(url) == "not a URL that can be fetched"


def test_a_url_has_a_limit() -> None:
    assert refused("http://example.com/" + "a" * 8192) == "the URL is too long"
    for location in ("/" + "a" * 8192, "http://[::1"):
        with pytest.raises(MediaError):
            read_url("http://example.com/").redirected(location)


@pytest.mark.parametrize(
    ("location", "url"),
    [
        ("/b", "https://example.com:8443/b"),
        ("//other.example/b", "https://other.example/b"),
        ("http://other.example", "http://other.example/"),
    ],
)
def test_a_redirect_leads_from_where_it_was_met(location: str, url: str) -> None:
    assert read_url("https://example.com:8443/a/x").redirected(location) == read_url(url)


@given(st.text("htps:/.@[]%#?\\0123456789abxl ßé\u3002\ud800\n", max_size=30))
def test_any_text_is_a_place_whose_own_spelling_leads_there_again(rest: str) -> None:
    for scheme in PORTS:
        try:
            place = read_url(f"{scheme}://{rest}")
        except MediaError:
            continue
        assert place.url.isascii()
        assert read_url(place.url) == place
        assert "@" not in place.authority


@given(st.integers(0, 2**32 - 1))
def test_only_the_plain_spelling_of_an_address_is_one(number: int) -> None:
    plain = IPv4Address(number)
    assert read_url(f"http://{plain}/").address == plain
    first, second, third, fourth = plain.packed
    for spelt in (
        f"{number}", f"0x{number:x}", f"{first}.{number & 0xFFFFFF}", f"0{first:o}.{second}.{third}.{fourth}",
        f"{first}.{second}.{third << 8 | fourth}", f"0x{first:x}.0x{second:x}.0x{third:x}.0x{fourth:x}",
    ):  # fmt: skip
        assert socket.inet_aton(spelt) == plain.packed, "a resolver would read this as an address"
        refused(f"http://{spelt}/")


def allows(patterns: list[str], url: str) -> bool:
    try:
        AllowedHosts(patterns).check(read_url(url))
    except MediaError:
        return False
    return True


def test_hosts_are_exact_unless_they_say_otherwise() -> None:
    patterns = ["Example.com", "*.Pictures.example.", "203.0.113.7", "[2001:DB8::0:1]"]
    for url in ("http://example.com", "https://EXAMPLE.com.:8443", "http://a.pictures.example",
                "http://a.b.pictures.example", "http://203.0.113.7", "http://[2001:db8::1]"):  # fmt: skip
        assert allows(patterns, url)
    for url in ("http://www.example.com", "http://example.com.evil.test", "http://pictures.example",
                "http://evilpictures.example", "http://203.0.113.8", "http://[2001:db8::2]"):  # fmt: skip
        assert not allows(patterns, url)
    assert allows(["*"], "http://anything.example")
    assert not allows([], "http://anything.example")
    assert not allows(["*.0.0.1"], "http://127.0.0.1"), "a domain pattern must not match an address"


@pytest.mark.parametrize("pattern", ["", "*.", "a*b", "*.*.com", "https://example.com", "example.com:80"])
def test_invalid_host_pattern_is_refused_at_startup(pattern: str) -> None:
    with pytest.raises(ValueError, match="expected a host"):
        AllowedHosts([pattern])


INSIDE = [
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
    "192.0.2.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
    "224.0.0.0/4", "240.0.0.0/4", "255.255.255.255/32",
    "::/128", "::1/128", "::ffff:0:0/96", "::/96", "64:ff9b:1::/48", "100::/64", "2001::/32", "2001:db8::/32",
    "2002::/16", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8",
]  # fmt: skip
NETWORKS = [IPv6Network(text) if ":" in text else IPv4Network(text) for text in INSIDE]


@given(st.sampled_from(NETWORKS), st.data())
def test_no_address_of_these_networks_is_public(
    network: IPv4Network | IPv6Network, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, network.num_addresses - 1))
    assert not is_public(network[place])


@given(st.integers(0, 2**32 - 1))
def test_ipv6_embedding_of_ipv4_is_public_only_if_the_ipv4_address_is(number: int) -> None:
    plain = IPv4Address(number)
    assert is_public(IPv6Address(int(IPv6Address("64:ff9b::")) + number)) == is_public(plain)
    assert not is_public(IPv6Address(f"::ffff:{plain}"))
    assert not is_public(IPv6Address(int(IPv6Address("2002::")) + (number << 80)))
