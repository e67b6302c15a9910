"""The runner's key and its signatures."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainspan_schemas.errors import ConfigError
from trainspan_schemas.telemetry.identity import Identity, TraceParent, parse_baggage, strip_identity
from trainspan_schemas.telemetry.prefix import is_request_signed, signed_request
from trainspan_schemas.telemetry.signing import sign, signing_key, verify


def test_the_key_is_made_once_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path / "home"))
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: signing_key(), range(32)))
    assert len(keys) == 1
    (file,) = (tmp_path / "home").iterdir()
    assert (file.name, file.stat().st_mode & 0o777, len(keys.pop())) == ("signing-key", 0o600, 64)


def test_a_key_that_others_can_read_or_that_is_missing_or_short_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "key"
    with pytest.raises(ConfigError, match="does not exist: copy the other machine's key there"):
        signing_key(str(file))
    file.write_text("k" * 64)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others: chmod 600"):
        signing_key(str(file))
    file.chmod(0o600)
    assert signing_key(str(file)) == b"k" * 64
    file.write_text("short\n")
    with pytest.raises(ConfigError, match="shorter than 32 characters"):
        signing_key(str(file))


def test_a_signature_is_of_one_text_and_one_key() -> None:
    signature = sign(b"a", "text")
    assert len(signature) == 32
    assert verify(b"a", "text", signature)
    assert not any((verify(b"b", "text", signature), verify(b"a", "texts", signature), verify(b"a", "text", None)))


def test_the_signature_travels_in_the_baggage_but_on_no_span_and_to_no_other_host() -> None:
    trace = TraceParent("ab" * 16, "cd" * 8)
    signed = Identity("r", "run", "t", 1, 2).signed(b"key", trace)
    assert trace.is_signed(b"key", signed.url_signature)
    assert Identity.from_attributes(parse_baggage(signed.to_baggage())) == signed
    assert signed.is_signed(b"key")
    assert signed.signature not in map(str, signed.attributes().values())
    assert strip_identity(f"a=b,{signed.to_baggage()}") == "a=b"


@pytest.mark.parametrize(("ago_s", "admitted"), [(3590, True), (-3590, True), (3610, False), (-3610, False)])
def test_a_signed_request_holds_for_an_hour_by_either_clock(
    ago_s: int, admitted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was recorded on the way cannot be sent again the next day."""
    now = time.time()
    with monkeypatch.context() as then:
        then.setattr(time, "time", lambda: now - ago_s)
        headers = signed_request(b"key", "/path", b"body")
    assert is_request_signed(b"key", "/path", headers, b"body") is admitted
    assert is_request_signed(b"key", "/path", headers) is admitted
    assert not is_request_signed(b"key", "/path", headers, b"another body")
    assert not is_request_signed(b"other key", "/path", headers, b"body")
    assert not is_request_signed(b"key", "/other", headers, b"body")
    assert not is_request_signed(b"key", "/path", {}, b"body")
