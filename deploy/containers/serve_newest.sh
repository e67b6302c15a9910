#!/bin/sh
# serve_newest.sh MODEL [OPTIONS…]: serves the newest checkpoint, or MODEL as long as there is none.
# A container that starts again thus continues with the policy that was trained last.
set -eu
model=$1
shift
if [ -e "${TRAINSPAN_SERVING__CHECKPOINTS:-$TRAINSPAN_HOME/checkpoints}/latest" ]; then
    exec trainspan serve "$@"
fi
exec trainspan serve "$model" "$@"
