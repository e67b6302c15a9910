import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainspan_schemas.errors import ConfigError
from trainspan_schemas.store.collectors import Collectors

THREE = ("http://a:4317", "http://b:4317", "http://c:4317")
KEYS = [f"{number:032x}" for number in range(3000)]


def test_the_heaviest_collector_by_the_stated_hash_gets_the_rollout() -> None:
    """The page documents the hash, so that senders in other languages can choose the same collector."""

    def weight(address: str) -> bytes:
        return hashlib.sha256(f"{address} 0b8e4c7a".encode()).digest()[:8]

    heaviest = max(("a:4317", "b:4317", "c:4317"), key=weight)
    assert Collectors(THREE).url_for("0b8e4c7a") == f"http://{heaviest}"


@given(st.text(), st.permutations(THREE))
def test_the_order_and_the_scheme_of_the_urls_do_not_matter(key: str, order: list[str]) -> None:
    chosen = Collectors(tuple(order)).url_for(key)
    assert chosen == Collectors(THREE).url_for(key)
    secure = Collectors(tuple(url.replace("http:", "https:") for url in order)).url_for(key)
    assert secure.removeprefix("https:") == chosen.removeprefix("http:")


def test_each_of_three_collectors_gets_about_a_third() -> None:
    """A third of 3000 has a standard deviation of 26; the bound is five of them."""
    chosen = [Collectors(THREE).url_for(key) for key in KEYS]
    assert all(abs(chosen.count(url) - 1000) < 130 for url in THREE)


def test_a_further_collector_takes_its_share_and_nothing_else_moves() -> None:
    before, after = Collectors(THREE[:2]), Collectors(THREE)
    moved = [key for key in KEYS if before.url_for(key) != after.url_for(key)]
    assert {after.url_for(key) for key in moved} == {THREE[2]}
    assert abs(len(moved) - 1000) < 130


@pytest.mark.parametrize(
    "text", ["grpc://C0.example, c1.example:4327", "HTTP://c0.EXAMPLE:4317/, http://c1.example:4327/x"]
)
def test_every_spelling_gives_all_senders_the_same_urls(text: str) -> None:
    """OpenTelemetry's SDK uses TLS unless it reads `http`, and adds no port."""
    plain = Collectors.of("http://c0.example:4317,http://c1.example:4327")
    assert Collectors.of(text) == plain
    assert [Collectors.of(text).url_for(key) for key in KEYS] == [plain.url_for(key) for key in KEYS]


def test_tls_and_ipv6_addresses_stay() -> None:
    assert str(Collectors.of("HTTPS://[::1], https://C0:1")) == "https://[::1]:4317,https://c0:1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http://[::1", "collector 'http://[::1' is not a URL: write http://HOST:PORT"),
        ("grpcs://a", "collector 'grpcs://a' is not a URL: write http://HOST:PORT"),
        ("ftp://a", "collector 'ftp://a' is not a URL: write http://HOST:PORT"),
        ("http://a:4317, http://A", "a collector is named twice: http://a:4317, http://A"),
        (" , ", "no collector is named: start `trainspan collector`, or set [collector] endpoints"),
    ],
)
def test_a_list_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r".*") as refused:
        Collectors.of(text)
    assert str(refused.value) == message
