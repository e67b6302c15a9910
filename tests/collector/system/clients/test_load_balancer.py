"""The example configuration of an OpenTelemetry Collector in front of several collectors, as far as it can be checked unrun."""

from typing import Any

import pytest
import yaml

from tests.support.places import ROOT
from trainspan_schemas.store.roles import Role

FILE = ROOT / "examples" / "several_machines" / "otelcol.yaml"
ROLES = (Role.AGENT, Role.SERVING, Role.RUNNER)


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return loaded


def test_pipelines_and_extensions_name_what_is_defined_and_nothing_is_left_over(config: dict[str, Any]) -> None:
    pipelines = config["service"]["pipelines"].values()
    for kind in ("receivers", "exporters"):
        assert {name for pipeline in pipelines for name in pipeline[kind]} == set(config[kind])
    assert set(config["service"]["extensions"]) == set(config["extensions"])


def test_each_role_keeps_its_own_token_from_listener_to_exporter(config: dict[str, Any]) -> None:
    """An agent that could reach the runner's exporter could give verdicts."""
    for name, pipeline in config["service"]["pipelines"].items():
        role = name.partition("/")[2]
        assert role in ROLES
        assert (pipeline["receivers"], pipeline["exporters"]) == ([f"otlp/{role}"], [f"load_balancing/{role}"])
        headers = config["exporters"][f"load_balancing/{role}"]["protocol"]["otlp"]["headers"]
        assert headers == {"authorization": f"Bearer ${{env:TRAINSPAN_{role.upper()}_TOKEN}}"}
        listener = config["receivers"][f"otlp/{role}"]["protocols"]["grpc"]
        guard = f"bearertokenauth/{role}"
        assert (listener.get("auth") == {"authenticator": guard}) == (role != Role.AGENT)
        if role != Role.AGENT:
            assert config["extensions"][guard]["token"] == f"${{env:TRAINSPAN_{role.upper()}_TOKEN}}"


def test_all_exporters_divide_traces_alike_and_keep_what_a_collector_does_not_take(config: dict[str, Any]) -> None:
    exporters = list(config["exporters"].values())
    assert all(one["resolver"] == exporters[0]["resolver"] for one in exporters)
    assert all(one["routing_key"] == "traceID" for one in exporters)
    for one in exporters:
        otlp = one["protocol"]["otlp"]
        assert otlp["retry_on_failure"] == {"enabled": True, "max_elapsed_time": "0s"}
        assert otlp["sending_queue"] == {"enabled": True, "storage": "file_storage"}
