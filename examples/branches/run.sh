#!/usr/bin/env bash
# Which call made a rollout succeed? Runs the calculator agent, then branches its rollouts at every call.
#
# examples/branches/run.sh [MODEL_DIR]     from the repository's root; without a model, the calculator's is made
set -euo pipefail

config=examples/calculator/trainspan.toml
home=${TRAINSPAN_HOME:-.trainspan}
work=$home/calculator
model=${1:-$work/model}
mkdir -p "$work"
[ -f "$work/tasks.jsonl" ] || python examples/calculator/tasks.py "$work"
[ -d "$model" ] || python examples/calculator/policy.py "$model"
export TRAINSPAN_ROLLOUTS__TASKS=$work/tasks.jsonl
url=${TRAINSPAN_ROLLOUTS__POLICY_URL:-http://127.0.0.1:8000/v1}

started=()
trap 'for pid in "${started[@]}"; do kill "$pid" 2>/dev/null || true; done; wait' EXIT

trainspan collector --config $config & started+=($!)
trainspan serve "$model" --config $config & started+=($!)
until trainspan status | grep -q "^collector .*pid"; do sleep 0.5; done
until curl -sf "${url%/v1}/health" > /dev/null; do sleep 0.5; done

echo "1. the agent solves some tasks, traced and judged"
trainspan rollout --config $config --run first --split train --limit "${TASKS:-8}" --n "${N:-8}" examples/calculator/agent.py:solve

echo "2. every call of these rollouts is measured: agent, tasks and judge are those on record"
trainspan branch --config $config --run branches --of-run first --limit "${ROLLOUTS:-8}" --n "${BRANCHES:-8}"

echo "3. one rollout in numbers, with the measured values"
rollout=$(trainspan sql --format json "SELECT rollout_id FROM evaluations WHERE name = 'trainspan.value' LIMIT 1" | grep -o '[0-9a-f]\{32\}' | head -1)
trainspan explain "$rollout" --credit vine --baseline dr_grpo --config $config
