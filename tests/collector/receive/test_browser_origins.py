"""Which requests a browser may have made for another site's page."""

import pytest

from trainspan_collector.receive.browser_origins import ForeignError, check_origin

HOSTS = frozenset({"localhost"})


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "http://a]b", "http://\u2100.example", "null", ""])
def test_an_origin_that_is_none_is_another_site(origin: str) -> None:
    with pytest.raises(ForeignError):
        check_origin({"host": "localhost:4318", "origin": origin}, HOSTS)


@pytest.mark.parametrize("headers", [{}, {"origin": "http://LOCALHOST:4318"}])
def test_its_own_pages_and_programs_are_served(headers: dict[str, str]) -> None:
    check_origin({"host": "localhost:4318", **headers}, HOSTS)
