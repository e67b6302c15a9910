"""What `trainspan doctor` says of a store that opens, but parts of which are not what DuckDB wrote."""

from pathlib import Path

import pytest

from tests.processing.support.traces import TestRollout, chain, send
from tests.support.collector.process import running
from trainspan_cli.doctor.capture_checks import stored_findings
from trainspan_schemas.config.settings import Settings


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a store whose tables take several blocks."""
    store = tmp_path_factory.mktemp("store") / "spans.duckdb"
    with running(store, "--http", "off") as collector:
        rollouts = [chain(TestRollout(f"r{number}"), 4, width=400).reward(1.0) for number in range(60)]
        send(str(collector.address.grpc), rollouts)
    return store.read_bytes()


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_a_damaged_store_is_named_with_what_to_do(whole: bytes, tmp_path: Path, damage: str) -> None:
    file = bytearray(whole)
    if damage == "cut":
        del file[len(file) // 2 :]
    else:
        for at in range(12_288 + 1_000, len(file), 262_144):  # in each block after DuckDB's headers
            file[at] ^= 0xFF
    store = tmp_path / "spans.duckdb"
    store.write_bytes(file)
    (finding,) = stored_findings(str(store), Settings())
    assert (finding.level, finding.subject) == ("problem", "store")
    assert "put back a copy of it" in finding.detail
    assert "gRPC" not in finding.detail
    assert len(finding.detail.splitlines()) == 1
