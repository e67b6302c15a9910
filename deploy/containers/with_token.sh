#!/bin/sh
# with_token.sh FILE COMMAND…: runs a command that reads a remote store, with the token in FILE (one line).
set -eu
token=$(cat "$1")
shift
OTEL_EXPORTER_OTLP_HEADERS="authorization=Bearer%20$token" exec "$@"
