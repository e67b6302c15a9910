#!/usr/bin/env bash
# Measures trainspan on a machine with one GPU and no network. Run it in the project's root; see README.md.
#   OUT=FOLDER bash benchmarks/gpu/on_gpu.sh              what the trainer can do: at most seven minutes
#   OUT=FOLDER bash benchmarks/gpu/on_gpu.sh facts exact  some steps
#   OUT=FOLDER bash benchmarks/gpu/on_gpu.sh demo policy  the whole loop; needs all of .gpu/carry-*
#   GPU_KIT_TINY=1 …                                      the same steps with tiny sizes, also without a GPU
# A step that fails or exceeds its limit is recorded, and the next one runs.
set -uo pipefail
root="$PWD"
[ -f pyproject.toml ] || { echo "run this in the project's root" >&2; exit 1; }
kit="${GPU_KIT:-$root/.gpu}"
export OUT="${OUT:-$kit/out}" GPU_KIT_SCRATCH="${GPU_KIT_SCRATCH:-/tmp/trainspan-gpu}"
python="${PYTHON:-python3}"
mkdir -p "$OUT" "$GPU_KIT_SCRATCH"
# Bytecode of the image's packages goes where this user can write: importing them takes 17 s without.
export PYTHONPYCACHEPREFIX="${PYTHONPYCACHEPREFIX:-$GPU_KIT_SCRATCH/bytecode}"
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export TRAINSPAN_HOME="${TRAINSPAN_HOME:-$GPU_KIT_SCRATCH/home}"
# Compiled kernels are kept between calls on the same machine.
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$GPU_KIT_SCRATCH/inductor}"
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$GPU_KIT_SCRATCH/triton}" VLLM_CACHE_ROOT="${VLLM_CACHE_ROOT:-$GPU_KIT_SCRATCH/vllm}"
began=$(date +%s)
budget="${GPU_KIT_SECONDS:-420}"
[ "${GPU_KIT_TINY:-0}" = 1 ] && slow=10 || slow=1 # a rehearsal may run on a busy machine
: >"$OUT/steps.tsv"

left() { echo $((began + budget - $(date +%s))); }

# limited LIMIT COMMAND…: runs it within its own limit and what is left of the whole.
limited() {
    local limit="$(($1 * slow))"
    shift
    [ "$limit" -gt "$(left)" ] && limit="$(left)"
    timeout -s ABRT -k 10 "$limit" "$@" # a step that exceeds its limit prints where it was
}

# step NAME LIMIT COMMAND…: one step; its output goes to log.txt, code and seconds to steps.tsv.
step() {
    local name="$1" limit="$2" start code
    shift 2
    if [ "$(left)" -lt 15 ]; then
        printf '%s\tskipped\t0\n' "$name" >>"$OUT/steps.tsv"
        echo "== $name: skipped, $(left) s left"
        return
    fi
    start=$(date +%s)
    echo "== $name ($(left) s left)"
    limited "$limit" "$@" >"$GPU_KIT_SCRATCH/$name.log" 2>&1
    code=$?
    printf '%s\t%s\t%s\n' "$name" "$code" $(($(date +%s) - start)) >>"$OUT/steps.tsv"
    { echo "== $name: code $code"; cat "$GPU_KIT_SCRATCH/$name.log"; } >>"$OUT/log.txt"
    echo "== $name: code $code, $(($(date +%s) - start)) s"
    grep -E '^(RESULT|FAIL)|(passed|failed|skipped|error).* in |unpacked|arrived' "$GPU_KIT_SCRATCH/$name.log" | cut -c1-400 | tail -n 25
    [ "$code" -ne 0 ] && tail -n 6 "$GPU_KIT_SCRATCH/$name.log" | cut -c1-600
    return 0
}

wanted=("$@")
[ "$#" -gt 0 ] || wanted=(facts tests exact bench stock rounds)
wants() {
    local one
    for one in "${wanted[@]}"; do [ "$one" = "$1" ] && return 0; done
    return 1
}

step unpack 90 "$python" benchmarks/gpu/unpack.py "$kit" "$GPU_KIT_SCRATCH"
path="$GPU_KIT_SCRATCH/site:$root"
for folder in schemas exporters importers rollouts serving collector processing viewer training loop cli; do path="$path:$root/$folder"; done
export PYTHONPATH="$path${PYTHONPATH:+:$PYTHONPATH}"
if [ -f "$GPU_KIT_SCRATCH/commit" ]; then
    GPU_KIT_COMMIT="$(cat "$GPU_KIT_SCRATCH/commit")"
    export GPU_KIT_COMMIT
fi

wants facts && step facts 60 "$python" -m benchmarks.gpu.facts
# The tests and the exactness check spend their time on compilation, so they run side by side.
if wants tests; then
    step tests 200 "$python" -m pytest -p no:cacheprovider -m gpu -rA -q --durations=0 --junitxml="$OUT/gpu-tests.xml" \
        tests/training/system/test_gpu.py &
    tests=$!
fi
wants exact && step exact 150 "$python" -m benchmarks.gpu.exact
[ -n "${tests:-}" ] && wait "$tests"
# shellcheck disable=SC2086 # names of cases
wants bench && step bench "$((${GPU_KIT_BENCH_SECONDS:-145} + 25))" "$python" -m benchmarks.gpu.bench ${GPU_KIT_CASES:-}
wants stock && step stock 80 "$python" -m benchmarks.gpu.stock
wants rounds && step rounds 110 "$python" -m benchmarks.gpu.rounds
wants demo && step demo 420 "$python" -m benchmarks.gpu.policy demo
wants policy && step policy 220 "$python" -m benchmarks.gpu.policy large
"$python" -m benchmarks.gpu.summary
echo "== whole: $(($(date +%s) - began)) s"
