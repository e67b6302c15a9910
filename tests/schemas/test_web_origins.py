"""Which Host and Origin headers are a server's own."""

import socket

import pytest

from trainspan_schemas.web_origins import dialed_host, is_own_host, is_own_origin, own_hosts

HOSTS = own_hosts("Policy.Example", " one.example,, TWO.example ")


@pytest.mark.parametrize(
    "header",
    [
        *("127.0.0.1", "127.0.0.1:8000", "192.168.0.7:1", "[::1]", "[::1]:4318", "[2001:DB8::1]:80", "localhost:"),
        *("LOCALHOST:4318", "policy.example", "one.example:65535", "two.example", f"{socket.gethostname()}:80"),
    ],
)
def test_an_address_and_a_listed_name_are_ones_own_with_any_port(header: str) -> None:
    assert is_own_host(header, HOSTS)


@pytest.mark.parametrize(
    "header",
    [
        *("", ":", ":80", "evil.example", "one.example.evil", "evil.one.example", "localhost.", "localhost.evil"),
        *("x@127.0.0.1", "x@localhost", "evil.example@127.0.0.1:80", "evil.example\\@127.0.0.1", "localhost@evil.example"),
        *("127.0.0.1/x", "127.0.0.1?x", "127.0.0.1#x", "127.0.0.1, evil.example", "127.0.0.1 evil.example", " 127.0.0.1"),
        *("127.0.0.1\n", "127.0.0.1:80\n", "127.0.0.1:x", "127.0.0.1:80:80", "127.0.0.1.evil.example", "127.1", "2130706433"),
        *("::1", "[::1", "::1]", "[::1]x", "[127.0.0.1]x", "[localhost]", "[v1.x]", "[fe80::1%eth0]", "\u0661.0.0.1", "\xb9.0.0.1"),
    ],
)  # fmt: skip
def test_another_name_and_what_is_no_host_are_refused(header: str) -> None:
    assert not is_own_host(header, HOSTS)


@pytest.mark.parametrize("origin", ["http://localhost:4318", "HTTP://LOCALHOST:4318", "https://localhost:4318"])
def test_a_page_of_the_server_has_its_host_as_origin(origin: str) -> None:
    assert is_own_origin(origin, "LocalHost:4318")


@pytest.mark.parametrize(
    "origin",
    [
        *("null", "", "http://localhost", "http://localhost:4319", "http://x@localhost:4318", "http://localhost:4318@evil"),
        *("http://[", "http://[::1", "http://a]b", "http://\u2100.example", "localhost:4318"),
    ],
)  # fmt: skip
def test_any_other_origin_is_another_site(origin: str) -> None:
    assert not is_own_origin(origin, "localhost:4318")


@pytest.mark.parametrize(
    ("listened", "dialed"),
    [
        ("0.0.0.0", "127.0.0.1"),
        ("10.0.0.7", "10.0.0.7"),
        ("::", "[::1]"),
        ("[::]", "[::1]"),
        ("fe80::7", "[fe80::7]"),
        ("[fe80::7]", "[fe80::7]"),
        ("policy.example", "policy.example"),
    ],
)
def test_a_listener_on_all_addresses_is_dialed_at_loopback_and_any_other_at_its_own(listened: str, dialed: str) -> None:
    assert dialed_host(listened) == dialed
