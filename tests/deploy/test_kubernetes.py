"""The manifests: valid for the API, restricted pods, secrets in files, ports and probes of the product."""

import copy
import re
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.manifests import DEPLOY, ROOT, Container, kubernetes_containers, kubernetes_objects, pod_templates
from trainspan_schemas.config.load import load_settings

API = "1.37"
OBJECTS = kubernetes_objects()
CONTAINERS = kubernetes_containers()
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def name_of(kind: dict[str, Any]) -> str:
    return f"{kind['kind']} {kind['metadata']['name']}"


def named(kind: str, name: str) -> dict[str, Any]:
    return next(each for each in OBJECTS if (each["kind"], each["metadata"]["name"]) == (kind, name))


@pytest.mark.parametrize("kind", [each for each in OBJECTS if each["kind"] != "RayCluster"], ids=name_of)
def test_an_object_is_valid_for_the_api(kind: dict[str, Any]) -> None:
    """The result is the version whose schemas were used: an older one if those of `API` are missing."""
    assert kubernetes_validate.validate(kind, API, strict=True) == API


def test_the_validation_refuses_a_field_that_the_api_lacks() -> None:
    service = named("Service", "collector")
    broken = {**service, "spec": {**service["spec"], "publishNotReady": True}}
    with pytest.raises(kubernetes_validate.ValidationError, match="publishNotReady"):
        kubernetes_validate.validate(broken, API, strict=True)


def test_the_pods_of_the_ray_cluster_are_valid_for_the_api() -> None:
    """The API's schemas do not have RayCluster itself."""
    cluster = named("RayCluster", "agents")
    assert set(cluster["spec"]) == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    assert f"ray=={cluster['spec']['rayVersion']}" in (ROOT / "constraints" / "gpu.txt").read_text().splitlines()
    for template in pod_templates(cluster):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray", **template["metadata"]}}
        assert kubernetes_validate.validate({**pod, "spec": template["spec"]}, API, strict=True) == API


def test_the_nodes_of_the_ray_cluster_have_probes_that_need_no_dashboard() -> None:
    """KubeRay adds its own where one is missing. tests/end_to_end/cluster/test_health.py asks these of real nodes."""
    spec = named("RayCluster", "agents")["spec"]
    worker = spec["workerGroupSpecs"][0]
    expected = ((spec["headGroupSpec"], 6379), (worker, int(worker["rayStartParams"]["node-manager-port"])))
    for group, port in expected:
        container = group["template"]["spec"]["containers"][0]
        assert port in [each["containerPort"] for each in container["ports"]]
        for probe in ("livenessProbe", "readinessProbe"):
            assert container[probe]["grpc"] == {"port": port}


def test_a_run_on_the_ray_cluster_asks_for_a_worker_on_each_cpu() -> None:
    """The Job may start before the nodes do."""
    group = named("RayCluster", "agents")["spec"]["workerGroupSpecs"][0]
    cpus = group["replicas"] * int(group["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"])
    script = named("Job", "rollouts-on-ray")["spec"]["template"]["spec"]["containers"][0]["args"][2]
    assert f"--workers {cpus} " in script


def test_a_planted_mistake_is_not_valid() -> None:
    wrong = copy.deepcopy(named("StatefulSet", "collector"))
    wrong["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, API, strict=True)


@pytest.mark.parametrize("container", CONTAINERS, ids=lambda each: each.where)
def test_a_container_is_restricted(container: Container) -> None:
    """Pod Security's profile `restricted`, and a root file system that cannot be written."""
    pod = container.pod["securityContext"]
    assert (pod["runAsNonRoot"], pod["runAsUser"], pod["fsGroup"]) == (True, 10001, 10001)
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container.pod["automountServiceAccountToken"] is False
    assert container.spec["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    written = {mount["mountPath"] for mount in container.spec["volumeMounts"] if not mount.get("readOnly")}
    assert {"/tmp", "/var/lib/trainspan"} <= written
    assert "memory" in container.spec["resources"]["limits"]


@pytest.mark.parametrize("container", CONTAINERS, ids=lambda each: each.where)
def test_no_secret_is_in_the_environment_or_on_the_command_line(container: Container) -> None:
    for variable in container.spec.get("env", ()):
        assert not re.search(r"TOKEN|KEY|SECRET|HEADERS|PASSWORD", variable["name"]), variable
    text = " ".join(container.spec.get("args", ()))
    assert not re.search(r"[0-9a-f]{32}", text)
    volumes = {volume["name"]: volume for volume in container.pod["volumes"]}
    for volume in volumes.values():
        if "secret" in volume:
            assert volume["secret"]["defaultMode"] == 0o440
    for mount in container.spec["volumeMounts"]:
        assert mount["name"] in {*volumes, "store", "state"}
        if "secret" in volumes.get(mount["name"], {}):
            assert mount["readOnly"] is True


def test_each_pod_mounts_the_secrets_of_its_own_process_only() -> None:
    secrets = {
        each.where.partition(":")[0].split()[1] + "/" + each.spec["name"]: sorted(
            volume["secret"]["secretName"] for volume in each.pod["volumes"] if "secret" in volume
        )
        for each in CONTAINERS
    }
    assert secrets == {
        "collector/collector": ["trainspan-collector"],
        "policy/policy": ["trainspan-policy"],
        "dataset/dataset": ["trainspan-trainer"],
        "trainer/trainer": ["trainspan-trainer"],
        "rollouts/runner": ["trainspan-runner"],
        "agents/ray-head": [],
        "agents/ray-worker": ["trainspan-agent"],
        "rollouts-on-ray/runner": ["trainspan-runner"],
    }


def test_ports_and_probes_are_the_products() -> None:
    defaults = load_settings(None, {})
    collector = {
        name: int(getattr(defaults.collector, key).rpartition(":")[2])
        for name, key in (("otlp-grpc", "grpc"), ("otlp-http", "http"), ("flight", "flight"))
    }
    expected = {"collector": collector, "policy": {"openai": defaults.serving.port}}
    for name, ports in expected.items():
        container = next(each.spec for each in CONTAINERS if each.spec["name"] == name)
        assert {each["name"]: each["containerPort"] for each in container["ports"]} == ports
        assert {each["name"]: each["port"] for each in named("Service", name)["spec"]["ports"]} == ports
        for probe in PROBES:
            if probe in container:
                asked = container[probe]["httpGet"]
                assert asked["scheme"] == "HTTPS"
                assert (name, asked["port"], asked["path"]) in {
                    ("collector", "otlp-http", "/healthz"),
                    ("collector", "otlp-http", "/readyz"),
                    ("policy", "openai", "/health"),
                }
    known = {*collector.values(), defaults.serving.port, 53}
    for kind in OBJECTS:
        if kind["kind"] == "NetworkPolicy":
            rules = [*kind["spec"].get("ingress", ()), *kind["spec"].get("egress", ())]
            assert {port["port"] for rule in rules for port in rule.get("ports", ())} <= known


def test_who_may_connect_to_whom_in_both_directions() -> None:
    """What one policy lets out, another lets in; everything else is denied."""
    deny = named("NetworkPolicy", "deny-all")["spec"]
    assert deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    sides: dict[str, set[tuple[str, str, int]]] = {"ingress": set(), "egress": set()}
    for policy in (each["spec"] for each in OBJECTS if each["kind"] == "NetworkPolicy"):
        own = str(policy["podSelector"].get("matchLabels"))
        for side, peers in (("ingress", "from"), ("egress", "to")):
            for rule in policy.get(side, ()):
                for peer in rule[peers]:
                    other = str(peer.get("podSelector", {}).get("matchLabels"))
                    ends = (other, own) if side == "ingress" else (own, other)
                    if "None" not in ends:
                        sides[side] |= {(*ends, port["port"]) for port in rule.get("ports", ({"port": 0},))}
    assert sides["ingress"] == sides["egress"]
    agents, ray = "{'trainspan/agents': 'true'}", "{'app': 'ray'}"
    collector, policy_server = "{'app': 'collector'}", "{'app': 'policy'}"
    assert sides["ingress"] == {
        (agents, collector, 4317),
        (agents, collector, 4318),
        (agents, policy_server, 8000),
        (policy_server, collector, 4317),
        ("{'app': 'dataset'}", collector, 4319),
        ("{'app': 'trainer'}", policy_server, 8000),
        (ray, ray, 0),
    }


def test_names_in_the_settings_are_those_of_services_and_pods() -> None:
    settings = load_settings(DEPLOY / "kubernetes" / "trainspan.toml", {})
    hosts = set(re.findall(r"([\w.-]+)\.trainspan\.svc", (DEPLOY / "kubernetes" / "trainspan.toml").read_text()))
    pods = {
        f"{each['metadata']['name']}-{number}.{each['spec']['serviceName']}"
        for each in OBJECTS
        if each["kind"] == "StatefulSet" and each["metadata"]["name"] != "trainer"  # nobody connects to it
        for number in range(each["spec"]["replicas"])
    }
    services = {each["metadata"]["name"] for each in OBJECTS if each["kind"] == "Service"}
    assert hosts <= pods | services
    assert pods <= hosts
    for pod in pods:
        service = named("Service", pod.partition(".")[2])["spec"]
        # A pod has its name while it is not ready: a collector with a full disk is read, a server that is behind is swapped.
        assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    servers = [f"policy-{number}.policy-servers.trainspan.svc" for number in range(2)]
    assert settings.serving.allowed_hosts.split(",") == servers


def test_each_replica_has_a_volume_of_its_own_and_a_disruption_budget() -> None:
    for name in ("collector", "policy"):
        sets = named("StatefulSet", name)["spec"]
        assert len(sets["volumeClaimTemplates"]) == 1
        budget = named("PodDisruptionBudget", name)["spec"]
        assert budget["selector"] == sets["selector"]
        assert sets["template"]["metadata"]["labels"] == sets["selector"]["matchLabels"]


def test_the_number_of_shards_is_the_number_of_pods() -> None:
    spec = named("Job", "rollouts")["spec"]
    assert (spec["completionMode"], spec["completions"]) == ("Indexed", spec["parallelism"])
    script = spec["template"]["spec"]["containers"][0]["args"][2]
    assert f'--shard "$JOB_COMPLETION_INDEX/{spec["completions"]}"' in script


def test_one_part_fails_alone_and_a_new_runner_waits_for_the_end_of_the_old_one() -> None:
    for name, limit in (("rollouts", "backoffLimitPerIndex"), ("rollouts-on-ray", "backoffLimit")):
        spec = named("Job", name)["spec"]
        assert spec[limit] == 10
        assert len({"backoffLimit", "backoffLimitPerIndex"} & set(spec)) == 1
        assert (spec["podReplacementPolicy"], spec["template"]["spec"]["restartPolicy"]) == ("Failed", "Never")


def test_a_runner_that_is_replaced_finds_its_progress_and_sees_no_other_folder() -> None:
    folders = {"rollouts": "runs/$(RUN)/$(JOB_COMPLETION_INDEX)", "rollouts-on-ray": "runs/$(RUN)"}
    for name, folder in folders.items():
        pod = named("Job", name)["spec"]["template"]["spec"]
        home = [each for each in pod["containers"][0]["volumeMounts"] if each["mountPath"] == "/var/lib/trainspan"]
        assert home == [{"name": "training", "mountPath": "/var/lib/trainspan", "subPathExpr": folder}]
        assert {"name": "training", "persistentVolumeClaim": {"claimName": "training"}} in pod["volumes"]


def test_the_kustomization_has_all_files_but_the_jobs_that_are_applied_by_hand() -> None:
    folder = DEPLOY / "kubernetes"
    found = yaml.safe_load((folder / "kustomization.yaml").read_text())
    by_hand = {"kustomization.yaml", "rollouts.yaml", "ray.yaml"}
    assert {*found["resources"], *by_hand} == {path.name for path in folder.glob("*.yaml")}
    assert found["configMapGenerator"] == [{"name": "trainspan-settings", "files": ["trainspan.toml"]}]
    assert {each["name"] for each in found["images"]} == {
        each.spec["image"].partition(":")[0] for each in CONTAINERS if each.spec["image"].startswith("trainspan-")
    }
