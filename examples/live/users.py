"""Users of the web service: several at a time ask, read the answer, and click up or down a little later.

    python users.py http://127.0.0.1:8090 http://127.0.0.1:4317 --seconds 120

A click is sent by a service that holds the runner's token, as `trainspan reward --response ID --value 1` does: the web agent
itself cannot reward anything.
"""

import argparse
import json
import os
import random
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field

from trainspan_cli.clients.feedback import FeedbackScore, send_scores
from trainspan_schemas.errors import StoreError
from trainspan_schemas.store.senders import sender_headers, token_advice


def is_short(answer: str) -> bool:
    """These users like short answers."""
    return len(answer) <= 12


@dataclass
class Crowd:
    """`users` threads against a service; figures of what they saw."""

    service: str
    collector: str
    likes: Callable[[str], bool] = is_short
    users: int = 8
    think_s: float = 0.3
    waits_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    clicks: list[bool] = field(default_factory=list)
    lost_clicks: int = 0
    _left: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Crowd":
        self._threads = [threading.Thread(target=self._use, args=(number,)) for number in range(self.users)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        for thread in self._threads:
            thread.join()

    def _use(self, number: int) -> None:
        generator = random.Random(number)
        headers = sender_headers("runner", self.collector, os.environ)
        advice = token_advice("runner", self.collector, os.environ)
        while not self._left.is_set():
            text = urllib.parse.quote(f"What is {generator.randint(1, 99)} + {generator.randint(1, 99)}?")
            began = time.monotonic()
            try:
                with urllib.request.urlopen(f"{self.service}/ask?text={text}", timeout=120) as found:
                    answer = json.load(found)
            except OSError as error:
                self.failures.append(str(error))
                continue
            self.waits_s.append(time.monotonic() - began)
            time.sleep(self.think_s * generator.random())
            liked = self.likes(answer["answer"])
            self.clicks.append(liked)
            click = FeedbackScore(float(liked), "reward", "human", response_id=answer["id"])
            try:
                send_scores([click], self.collector, headers, token_advice=advice)
            except StoreError:  # the collector restarts
                self.lost_clicks += 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("service")
    parser.add_argument("collector")
    parser.add_argument("--seconds", type=float, default=120.0)
    options = parser.parse_args()
    with Crowd(options.service, options.collector) as crowd:
        while options.seconds > 0:
            time.sleep(min(10.0, options.seconds))
            options.seconds -= 10.0
            newest = crowd.clicks[-200:]
            print(f"{len(crowd.clicks)} clicks, {sum(newest) / max(1, len(newest)):.2f} of the newest are up")
