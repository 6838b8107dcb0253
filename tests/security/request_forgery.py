"""URLs that would make the server connect to where only it can (SSRF). Pure."""

from __future__ import annotations

FORGED = (
    # spellings of loopback
    "http://127.0.0.1/secret", "http://127.0.0.1:80/secret", "http://localhost/secret", "http://LOCALHOST./secret",
    "http://127.1/secret", "http://127.0.1/secret", "http://0/secret", "http://0.0.0.0/secret",
    "http://2130706433/secret", "http://0x7f000001/secret", "http://0x7f.0.0.1/secret", "http://0177.0.0.1/secret",
    "http://017700000001/secret", "http://127.0.0.1.:80/secret", "http://127.000.000.001/secret",
    "http://①②⑦.⓪.⓪.①/secret", "http://127。0。0。1/secret", "http://ⓛⓞⓒⓐⓛⓗⓞⓢⓣ/secret",
    # IPv6
    "http://[::1]/secret", "http://[::]/secret", "http://[::ffff:127.0.0.1]/secret",
    "http://[::ffff:7f00:1]/secret", "http://[0:0:0:0:0:ffff:10.0.0.7]/secret", "http://[64:ff9b::7f00:1]/secret",
    "http://[2002:7f00:1::]/secret", "http://[fe80::1%25lo]/secret", "http://[fd00::1]/secret",
    "http://[::1%25lo]/secret", "http://[::1]]/secret",
    # private networks and metadata services
    "http://10.0.0.7/secret", "http://192.168.0.1/secret", "http://172.16.0.1/secret", "http://100.64.0.1/secret",
    "http://169.254.169.254/secret", "http://169.254.169.254/latest/meta-data/iam/security-credentials/",
    "http://metadata.google.internal/secret", "http://[fd00:ec2::254]/secret", "http://2852039166/secret",
    "http://224.0.0.1/secret", "http://255.255.255.255/secret",
    # names that lead inside
    "http://inside.test/secret", "http://both.test/secret", "http://zero.test/secret", "http://six.test/secret",
    # two parsers, two hosts
    "http://pictures.test@127.0.0.1/secret", "http://me:password@pictures.test/text",
    "http://127.0.0.1\\@pictures.test/secret", "http://pictures.test\\@127.0.0.1/secret",
    "http:\\\\127.0.0.1\\secret", "http:///127.0.0.1/secret", "http:127.0.0.1/secret", "//127.0.0.1/secret",
    "http://127.0.0.1%2f@pictures.test/secret", "http://127.0.0.1\t/secret",
    "http://127.0.0.1\r\nhost: a/secret",
    "http://pictures.test:80@127.0.0.1:80/secret", "http://pictures.test:0/secret",
    "http://pictures.test:99999/secret", "http://pictures.test:80:80/secret", "http://[pictures.test]/secret",
    # redirects
    "http://pictures.test/to-loopback", "http://pictures.test/to-metadata", "http://pictures.test/to-six",
    "http://pictures.test/to-decimal", "http://pictures.test/to-name", "http://pictures.test/to-file",
    "http://pictures.test/to-userinfo", "http://pictures.test/to-split", "http://pictures.test/loop",
    # other schemes
    "file:///etc/passwd", "file://localhost/etc/passwd", "ftp://127.0.0.1/secret", "gopher://127.0.0.1:80/_GET",
    "dict://127.0.0.1:80/info", "ws://127.0.0.1/secret", "unix:///run/secret", "jar:http://127.0.0.1/secret!/",
    "data:text/plain;base64,c2VjcmV0", "secret", "", "http://",
    # what is fetched is no image
    "http://pictures.test/text", "http://pictures.test/nowhere", "http://nowhere.test/secret",
)  # fmt: skip
"""None of them is an image. No request may reach a host other than `pictures.test`, and none `/secret`."""

ASKED_HOSTS = frozenset({"pictures.test"})
