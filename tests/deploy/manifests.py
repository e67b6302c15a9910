"""The files of `deploy/`, read for the tests: containers of all kinds of manifests, and the commands that they run."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
_POD_TEMPLATE_IN = {
    "StatefulSet": ("spec", "template"),
    "Job": ("spec", "template"),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
}
_ENDS = ("--", "||", "&&", "&", ";", "then", "fi;")
"""Words that end a command of trainspan; after `--` there are flags of vLLM."""


@dataclass(frozen=True, slots=True)
class Container:
    """One container of a manifest or a Compose file."""

    where: str
    spec: Mapping[str, Any]
    pod: Mapping[str, Any]
    """The pod's spec; empty in a Compose file."""


@dataclass(frozen=True, slots=True)
class Command:
    """One use of `trainspan` in a file."""

    where: str
    name: str
    options: tuple[str, ...]


def kubernetes_objects() -> list[dict[str, Any]]:
    """All objects of the manifests, without the kustomization."""
    files = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    documents = [each for file in files for each in yaml.safe_load_all(file.read_text())]
    return [each for each in documents if each["kind"] != "Kustomization"]


def pod_templates(kind: dict[str, Any]) -> list[dict[str, Any]]:
    """The pod templates of an object."""
    if kind["kind"] == "RayCluster":
        groups = [kind["spec"]["headGroupSpec"], *kind["spec"]["workerGroupSpecs"]]
        return [group["template"] for group in groups]
    if kind["kind"] not in _POD_TEMPLATE_IN:
        return []
    template: Any = kind
    for key in _POD_TEMPLATE_IN[kind["kind"]]:
        template = template[key]
    return [template]


def kubernetes_containers() -> list[Container]:
    return [
        Container(f"{kind['kind']} {kind['metadata']['name']}: {each['name']}", each, template["spec"])
        for kind in kubernetes_objects()
        for template in pod_templates(kind)
        for each in (*template["spec"].get("initContainers", ()), *template["spec"]["containers"])
    ]


def compose() -> dict[str, Any]:
    """The Compose file with its variables replaced as Compose does; those without a default have the value `given`."""
    text = (DEPLOY / "compose.yaml").read_text()
    text = re.sub(
        r"\$\{\w+(?::-([^}]*)|:\?[^}]*)\}", lambda found: "given" if found[1] is None else found[1], text
    ).replace("$$", "$")
    read: dict[str, Any] = yaml.safe_load(text)
    return read


def compose_containers() -> list[Container]:
    return [Container(f"compose.yaml: {name}", service, {}) for name, service in compose()["services"].items()]


def dockerfile(name: str = "Dockerfile") -> list[str]:
    """The instructions of a Dockerfile, continuation lines joined."""
    text = "\n".join(line for line in (DEPLOY / "containers" / name).read_text().splitlines() if line[:1] != "#")
    return [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def shell_files() -> list[Path]:
    return sorted(file for pattern in ("*.sh", "*.sbatch") for file in DEPLOY.rglob(pattern))


def commands() -> list[Command]:
    """Every use of `trainspan` in images, manifests, the Compose file and scripts."""
    texts = {str(file.relative_to(ROOT)): file.read_text() for file in shell_files()}
    for each in (*kubernetes_containers(), *compose_containers()):
        words = [str(word) for key in ("command", "args") for word in each.spec.get(key, ())]
        texts[each.where] = words[2] if words[:2] == ["sh", "-c"] else shlex.join(words)
    for name in ("Dockerfile", "agent.Dockerfile"):
        run = [line.removeprefix("CMD ") for line in dockerfile(name) if line.startswith("CMD [")]
        texts[name] = "\n".join(shlex.join(yaml.safe_load(line)) for line in run)
    return [command for where, text in texts.items() for command in _commands_in(where, text)]


def _commands_in(where: str, text: str) -> Iterator[Command]:
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#")).replace("\\\n", " ")
    for line in re.sub(r"\S*serve_newest\.sh\S*", "trainspan serve", lines).splitlines():
        words = shlex.split(line)
        for at, word in enumerate(words[:-1]):
            if word in ("trainspan", "trainspan_cli") and words[at - 1] != "echo":
                rest = words[at + 2 :]
                end = next((place for place, each in enumerate(rest) if each in _ENDS), len(rest))
                yield Command(where, words[at + 1], tuple(each for each in rest[:end] if each.startswith("--")))
