"""The way of labels from `trainspan view` to the collectors, with the runner's token."""

import os
import socket
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from trainspan_cli.clients.feedback import FeedbackScore, send_scores
from trainspan_loop.addresses import collectors_of
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import ConfigError, StoreError
from trainspan_schemas.store.access import running_collector
from trainspan_schemas.store.collectors import Collectors
from trainspan_schemas.store.labels import Label
from trainspan_schemas.store.roles import Role
from trainspan_schemas.store.senders import sender_headers, token_advice

__all__ = ["CollectorLabels"]

_DIAL_S: Final = 0.5
_KNOWN_S: Final = 3.0
"""How long the answer whether another machine's collector listens is kept."""


class CollectorLabels:
    """Sends each label to the collector of its rollout: the one that owns the store that the pages read, if that is a file, else
    those of the settings. Safe for threads."""

    def __init__(self, chosen: Settings, stores: Sequence[str]) -> None:
        self._chosen = chosen
        only = stores[0] if len(stores) == 1 and not stores[0].startswith(("grpc://", "grpc+tls://")) else None
        self._file = None if only is None else Path(only)
        self._known: tuple[float, str | None] = (0.0, None)

    def obstacle(self) -> str | None:
        """Why no label can be sent now."""
        asked_s, known = self._known
        if self._file is None and time.monotonic() - asked_s < _KNOWN_S:
            return known
        try:
            silent = [url for url in self._collectors().urls if not _listens(url)]
        except (StoreError, ConfigError) as error:
            known = str(error)
        else:
            known = f"no collector answers at {silent[0]}: start `trainspan collector`" if silent else None
        self._known = (time.monotonic(), known)
        return known

    def send(self, labels: Sequence[Label]) -> None:
        """Returns once the collectors have acknowledged them. Raises StoreError or ConfigError."""
        collectors = self._collectors()
        by_url: dict[str, list[Label]] = defaultdict(list)
        for label in labels:
            by_url[collectors.url_for(label.rollout_id)].append(label)
        token_file = self._chosen.rollouts.token_file
        store = str(self._file) if self._file else self._chosen.collector.store
        for url, some in by_url.items():
            headers = sender_headers(Role.RUNNER, url, os.environ, token_file=token_file, store=store)
            send_scores(
                [FeedbackScore.of_label(label) for label in some],
                url,
                headers or os.environ.get("OTEL_EXPORTER_OTLP_HEADERS"),
                os.environ.get("OTEL_EXPORTER_OTLP_CERTIFICATE"),
                token_advice=token_advice(Role.RUNNER, url, os.environ, token_file=token_file, store=store),
            )

    def _collectors(self) -> Collectors:
        """Raises StoreError if no collector owns the file."""
        if self._file is None:
            return Collectors.of(self._chosen.rollouts.collector)
        running = running_collector(self._file)
        if running is None or running.for_readers or running.grpc is None:
            raise StoreError(f"no collector takes telemetry for {self._file}: start `trainspan collector`")
        return Collectors.of(collectors_of(self._chosen, running))


def _listens(url: str) -> bool:
    parts = urlsplit(url)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=_DIAL_S):
            return True
    except OSError:
        return False
