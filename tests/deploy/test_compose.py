"""The Compose file: valid for the specification, restricted containers, secrets in files, ports of the product."""

import copy
import json
import re
from typing import Any

import pytest
from compose_spec import PyCompose

from tests.deploy.manifests import DEPLOY, Container, compose, compose_containers, dockerfile
from trainspan_schemas.config.load import load_settings

CONTAINERS = compose_containers()


def check(file: dict[str, Any]) -> None:
    """Raises ValueError for a key or value that the specification does not have, and for an undefined name."""
    PyCompose.from_json(json.dumps(file)).validate()


def test_the_file_is_valid_for_the_specification() -> None:
    check(compose())


def test_a_planted_mistake_is_not_valid() -> None:
    for key, value in (("healthchek", {}), ("mem_limit", "lots"), ("configs", [{"source": "nowhere"}])):
        wrong = copy.deepcopy(compose())
        wrong["services"]["policy"][key] = value
        with pytest.raises(ValueError, match=r"lots|nowhere|healthchek"):
            check(wrong)


@pytest.mark.parametrize("container", CONTAINERS, ids=lambda each: each.where)
def test_a_container_is_restricted(container: Container) -> None:
    service = container.spec
    assert (service["user"], service["read_only"], service["cap_drop"]) == ("10001:10001", True, ["ALL"])
    assert service["security_opt"] == ["no-new-privileges:true"]
    volumes = [each.split(":") for each in service["volumes"]]
    assert "/var/lib/trainspan" in {each[1] for each in volumes}
    for source, target, *mode in volumes:
        assert source.startswith(("./", "given")) or source in compose()["volumes"], source
        if "secrets" in source:
            assert mode == ["ro"]
            assert target in ("/run/secrets/trainspan", "/var/lib/trainspan/token")


@pytest.mark.parametrize("container", CONTAINERS, ids=lambda each: each.where)
def test_no_secret_is_in_the_environment_and_no_port_is_open_to_others(container: Container) -> None:
    assert not [name for name in container.spec.get("environment", {}) if re.search("TOKEN|KEY|SECRET|HEADERS", name)]
    assert all(each.startswith("127.0.0.1:") for each in container.spec.get("ports", ()))


def test_images_can_be_built_for_a_cpu_by_variables() -> None:
    """Their defaults are the Dockerfile's."""
    defaults = dict(line.removeprefix("ARG ").split("=", 1) for line in dockerfile() if line.startswith("ARG "))
    for container in CONTAINERS:
        if "build" in container.spec:
            args = container.spec["build"]["args"]
            assert set(args) == {"CONSTRAINTS", "SERVE", "TORCH_INDEX_URL"}
            assert {name: value or "" for name, value in args.items()} == {name: defaults[name] for name in args}


def test_each_container_has_the_secrets_of_its_own_process_only() -> None:
    found = {
        each.where.partition(": ")[2]: {
            volume.split(":")[0].removeprefix("./secrets/").partition("/")[0]
            for volume in each.spec["volumes"]
            if volume.startswith("./secrets/")
        }
        for each in CONTAINERS
    }
    trainer = {"trainer"}
    services = {"collector": {"collector"}, "policy": {"policy"}, "rollout": {"runner"}}
    assert found == {**services, "dataset": trainer, "trainer": trainer}


def test_ports_are_the_products() -> None:
    defaults = load_settings(None, {})
    services = compose()["services"]
    collector = [getattr(defaults.collector, name) for name in ("grpc", "http", "flight")]
    assert services["collector"]["ports"] == [f"{each}:{each.rpartition(':')[2]}" for each in collector]
    assert services["policy"]["ports"] == [f"127.0.0.1:{defaults.serving.port}:{defaults.serving.port}"]


def test_files_that_are_mounted_exist_or_are_made_by_the_script() -> None:
    assert (DEPLOY / compose()["configs"]["settings"]["file"]).exists()
    made = (DEPLOY / "make_secrets.sh").read_text()
    for container in CONTAINERS:
        for volume in container.spec["volumes"]:
            if volume.startswith("./secrets/"):
                assert volume.split(":")[0].removeprefix("./secrets/").partition("/")[0] in made
