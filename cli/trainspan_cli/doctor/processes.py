"""What `trainspan doctor` finds of the processes: collectors and policy servers."""

import socket
from dataclasses import replace
from urllib.parse import urlsplit

from trainspan_cli.doctor.finding import Finding
from trainspan_loop.addresses import foreign_collector, foreign_policy_server, policy_servers_of
from trainspan_loop.clients.policy_server import state_at
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.policy_server import ServerState

__all__ = ["process_findings"]


def process_findings(settings: Settings, policy_url: str | None = None) -> list[Finding]:
    """Whether collectors and policy servers answer; `policy_url` replaces the servers of the settings."""
    findings = []
    findings += [_collector_finding(settings, url) for url in settings.collector.endpoints]
    if not findings:
        findings.append(
            Finding(
                "problem", "collector", "none with OTLP/gRPC runs for this state folder", "start `trainspan collector`"
            )
        )
    urls = (policy_url,) if policy_url else policy_servers_of(settings)
    states = {url: state_at(url) for url in urls}
    if not urls:
        advice = "start `trainspan serve MODEL_DIR`"
        findings.append(Finding("problem", "policy server", "none has run for this state folder", advice))
    for url, policy in states.items():
        if policy is None:
            findings.append(
                Finding("problem", "policy server", f"no answer at {url}", "start `trainspan serve MODEL_DIR`")
            )
        elif trouble := foreign_policy_server(settings, url):
            findings.append(Finding("problem", "policy server", *_parted(trouble)))
        else:
            finding = _policy_finding(policy)
            findings.append(finding if len(urls) == 1 else replace(finding, detail=f"{finding.detail}, at {url}"))
    if len(served := {str(policy) for policy in states.values() if policy}) > 1:
        detail = f"the policy servers serve different versions: {'; '.join(sorted(served))}"
        advice = "restart those that are behind: with `checkpoints_url` they catch up"
        findings.append(Finding("problem", "policy server", detail, advice))
    return findings


def _collector_finding(settings: Settings, url: str) -> Finding:
    if trouble := foreign_collector(settings, url):
        return Finding("problem", "collector", *_parted(trouble))
    endpoint = urlsplit(url if "//" in url else f"//{url}")
    if _listens(endpoint.hostname or "127.0.0.1", endpoint.port or 4317):
        return Finding("ok", "collector", f"listens at {url}")
    detail = f"nothing listens at {url}; agents still run, but their spans are lost"
    return Finding("problem", "collector", detail, "start `trainspan collector`")


def _parted(trouble: str) -> tuple[str, str]:
    """Detail and advice of a refusal."""
    detail, _, advice = trouble.rpartition(": ")
    return detail, advice


def _policy_finding(state: ServerState) -> Finding:
    calls = state.calls
    detail = f"{state}, {calls.captured} calls captured, {calls.dropped} dropped, {calls.refused} refused, {calls.spooled} spooled"
    if state.export_trouble:
        advice = f"calls wait on disk: {state.export_trouble}"
    elif calls.refused:
        advice = "the collector refused calls; they are kept and retried when the server starts: see its log"
    elif calls.dropped:
        advice = "the spool was full while the collector was unreachable; those calls cannot be trained"
    else:
        return Finding("ok", "policy server", detail, "")
    return Finding("problem", "policy server", detail, advice)


def _listens(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, port)) == 0
