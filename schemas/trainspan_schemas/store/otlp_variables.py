"""`OTEL_EXPORTER_OTLP_*` of a program that has a backend of its own.

OpenTelemetry has one set of these variables for all exporters of a process. trainspan's, which the SDK sets up from them before
the program begins, send to the collector; what the program sets up later sends to its backend. So one set is in the
environment at a time, and the other one beside it, as JSON in a variable of ours.
"""

import json
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Final

from trainspan_schemas.errors import ConfigError

__all__ = ["ENDPOINT", "ENV_COLLECTOR", "ENV_PROGRAM", "exchange", "own_variables", "set_aside"]

ENV_PROGRAM: Final = "TRAINSPAN_PROGRAM_OTLP"
"""The program's variables, while those in the environment are the collector's."""
ENV_COLLECTOR: Final = "TRAINSPAN_COLLECTOR_OTLP"
"""The collector's variables, while those in the environment are the program's."""
ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
_PREFIX: Final = "OTEL_EXPORTER_OTLP_"
_SIGNALS: Final = ("TRACES", "LOGS", "METRICS")


def own_variables(environ: Mapping[str, str], collectors: Iterable[str]) -> dict[str, str]:
    """The variables of a backend that is none of the `collectors` (URLs or HOST:PORT); empty if none is named.

    All of them if the common endpoint is such a backend, else those of the signals that have such an endpoint.
    """
    known = {_address(url) for url in collectors}
    common = environ.get(ENDPOINT)
    prefixes = [_PREFIX] if common and _address(common) not in known else []
    for signal in () if prefixes else _SIGNALS:
        endpoint = environ.get(f"{_PREFIX}{signal}_ENDPOINT")
        if endpoint and _address(endpoint) not in known:
            prefixes.append(f"{_PREFIX}{signal}_")
    return {name: value for name, value in environ.items() if name.startswith(tuple(prefixes))}


def set_aside(environ: MutableMapping[str, str], own: Mapping[str, str]) -> None:
    """Takes the program's own variables, which may be none, out of the environment; `exchange` puts them back.

    Certificates stay, too: they are those of authorities, possibly the collector's.
    """
    environ.pop(ENV_COLLECTOR, None)
    for name in own:
        if not name.endswith("_CERTIFICATE"):
            environ.pop(name, None)
    environ[ENV_PROGRAM] = json.dumps(own)


def exchange(environ: MutableMapping[str, str], inward: str, outward: str) -> bool:
    """Puts the variables that `inward` has in place of those in the environment, which go to `outward`; returns False if it has none."""
    variables = json.loads(environ.get(inward, "{}"))
    if not variables:
        return False
    present = {name: value for name, value in environ.items() if name.startswith(_PREFIX)}
    for name in (inward, *present):
        del environ[name]
    environ.update({**variables, outward: json.dumps(present)})
    return True


def _address(url: str) -> str:
    from trainspan_schemas.store.collectors import address_of
    from trainspan_schemas.store.endpoint import is_loopback

    try:
        address = address_of(url)
    except ConfigError:
        return url
    return f"localhost:{address.rpartition(':')[2]}" if is_loopback(address) else address
