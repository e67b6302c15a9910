"""Web agents on common frameworks and servers: each request is a rollout, with everything that it starts."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.exporters.rollout.test_boundaries import APP, requests_of, rollouts_by_text, wait_for
from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import write
from tests.support.agents.web_agent import AGENTS, web_agent
from tests.support.otlp.recorder import OtlpRecorder
from trainspan_schemas.telemetry import keys

ASK = """
import concurrent.futures, threading
from openai import OpenAI

pool = concurrent.futures.ThreadPoolExecutor(4)
client = OpenAI()

def ask(text):
    client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}])

def ask_everywhere(text):
    ask(text)
    list(pool.map(ask, [text] * 2))
    threading.Thread(target=ask, args=(text,)).start()
"""
FLASK = f"""{ASK}
from flask import Flask

app = Flask(__name__)

@app.get("/everywhere/<text>")
def everywhere(text):
    ask_everywhere(text)
    return "done"

@app.get("/fail/<text>")
def fail(text):
    ask(text)
    raise KeyError(text)

@app.get("/idle")
def idle():
    return "idle"
"""
DJANGO = f"""{ASK}
import sys
from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.http import HttpResponse
from django.urls import path

def everywhere(request, text):
    ask_everywhere(text)
    return HttpResponse("done")

def fail(request, text):
    ask(text)
    raise KeyError(text)

urlpatterns = [
    path("everywhere/<text>", everywhere),
    path("fail/<text>", fail),
    path("idle", lambda request: HttpResponse("idle")),
]
app = get_wsgi_application()
asgi = get_asgi_application()

if __name__ == "__main__":
    from django.core.management import execute_from_command_line
    execute_from_command_line(["app.py", "runserver", "--noreload", sys.argv[1]])
"""
DJANGO_SETTINGS = """
ROOT_URLCONF, ALLOWED_HOSTS, SECRET_KEY, LOGGING_CONFIG = "app", ["*"], "x", None
"""
AIOHTTP = """
import asyncio, sys
from aiohttp import web
from openai import AsyncOpenAI

client = AsyncOpenAI()
kept = set()

async def ask(text, delay=0.0):
    await asyncio.sleep(delay)
    await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}])

async def everywhere(request):
    text = request.match_info["text"]
    await asyncio.gather(*(ask(text) for _ in range(3)))
    kept.add(asyncio.create_task(ask(text, 0.2)))
    return web.Response(text="done")

async def fail(request):
    await ask(request.match_info["text"])
    raise KeyError("gone")

async def idle(request):
    return web.Response(text="idle")

def app():
    application = web.Application()
    application.add_routes(
        [web.get("/everywhere/{text}", everywhere), web.get("/fail/{text}", fail), web.get("/idle", idle)]
    )
    return application

async def make():
    return app()

if __name__ == "__main__":
    web.run_app(app(), host="127.0.0.1", port=int(sys.argv[1]))
"""
GUNICORN = ("gunicorn", "-w", "2", "-b", "127.0.0.1:{port}")


@dataclass(frozen=True, slots=True)
class Server:
    """An application and the command that serves it; `calls` are those of `/everywhere`."""

    app: str
    command: Sequence[str]
    calls: int = 4
    boundary: str = ""


WORKERS = ("uvicorn", "app:app", "--port", "{port}", "--workers", "2", "--timeout-worker-healthcheck", "60")


SERVERS = {
    "FastAPI, uvicorn --workers": Server(APP, WORKERS, 6),
    "Flask, its own server": Server(FLASK, ("python", "-m", "flask", "--app", "app:app", "run", "--port", "{port}")),
    "Flask, gunicorn": Server(FLASK, (*GUNICORN, "app:app")),
    "Flask, gunicorn with threads": Server(FLASK, (*GUNICORN, "--threads", "4", "app:app")),
    "Django, runserver": Server(DJANGO, ("python", "app.py", "127.0.0.1:{port}")),
    "Django, gunicorn": Server(DJANGO, (*GUNICORN, "app:app")),
    "Django, uvicorn": Server(DJANGO, ("uvicorn", "app:asgi", "--port", "{port}")),
    "aiohttp": Server(AIOHTTP, ("python", "app.py", "{port}")),
    "aiohttp, gunicorn": Server(AIOHTTP, (*GUNICORN, "-k", "aiohttp.GunicornWebWorker", "app:make")),
    # Servers without specific support.
    "Flask, waitress": Server(FLASK, ("python", "-m", "waitress", "--port", "{port}", "app:app"), boundary="request"),
    "FastAPI, hypercorn": Server(
        APP, ("python", "-m", "hypercorn", "-b", "127.0.0.1:{port}", "app:app"), 6, boundary="request"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVERS)
def test_each_request_is_a_rollout_on_every_framework_and_server(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str], name: str
) -> None:
    server = SERVERS[name]
    write(tmp_path, server.app, "app.py")
    write(tmp_path, DJANGO_SETTINGS, "django_settings.py")
    extra = {"PYTHONPATH": str(AGENTS / "web"), "DJANGO_SETTINGS_MODULE": "django_settings"}
    extra["TRAINSPAN_BOUNDARY"] = server.boundary
    texts = [f"question {number}" for number in range(6)]
    with web_agent(tmp_path, list(server.command), {**wired, **extra}) as agent:
        with ThreadPoolExecutor(6) as pool:
            paths = [f"/everywhere/{quote(text)}" for text in texts]
            assert list(pool.map(agent.get, [*paths, "/fail/broken", "/idle"])) == [200] * 6 + [500, 200]
        wait_for(policy, 6 * server.calls + 1)
        recorder.wait_for(lambda seen: len(seen.named("openai.chat")) == 6 * server.calls + 1)
    asked = rollouts_by_text(policy)
    assert {text: len(ids) for text, ids in asked.items()} == {**dict.fromkeys(texts, server.calls), "broken": 1}
    ids = {text: set(found) for text, found in asked.items()}
    assert all(len(one) == 1 for one in ids.values()), ids
    requests = requests_of(recorder)
    assert set(requests) == set().union(*ids.values())
    assert len(requests) == 7
    (broken,) = ids["broken"]
    statuses = {rollout_id: span.attributes[keys.ROLLOUT_STATUS] for rollout_id, span in requests.items()}
    assert statuses == {**dict.fromkeys(requests, "ok"), broken: "agent_error"}
    assert all(keys.NO_BOUNDARY not in request.baggage for request in policy.requests)
    processes = [span for span in recorder.named("trainspan.rollout") if keys.ROLLOUT_STATUS in span.attributes]
    assert not processes, json.dumps([span.attributes for span in processes])
