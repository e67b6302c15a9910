#!/usr/bin/env bash
# Asks two questions with curl.
set -euo pipefail
format=""
if [ "${1:-}" = --strict ]; then
    format=', "response_format": {"type": "json_schema", "json_schema": {"name": "box", "schema": {"enum": ["red", "green"]}}}'
fi
for box in heavy light; do
    curl -sS --fail "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
        -H "Content-Type: application/json" \
        -d '{"model": "policy", "messages": [{"role": "system", "content": "You are a clerk."}, {"role": "user", "content": "Find a '$box' box."}]'"$format"'}' >/dev/null
    echo "$box"
done
