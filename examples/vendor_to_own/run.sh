#!/usr/bin/env bash
# The whole way: agent and teacher → supervised training → the same agent on a model served here → reinforcement learning.
#
# examples/vendor_to_own/run.sh [MODEL_DIR]     from the repository's root; without a model, one with random weights is made
set -euo pipefail

python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("opentelemetry.instrumentation.openai") is None)' || {
  echo "the agent's conversations would not be recorded: pip install 'trainspan[messages]'" >&2
  exit 1
}
here=examples/vendor_to_own
config=$here/trainspan.toml
home=${TRAINSPAN_HOME:-.trainspan}
work=$home/shopping
teacher_port=${TEACHER_PORT:-8100}
mkdir -p "$work"
[ -f "$work/tasks.jsonl" ] || python $here/problems.py "$work/tasks.jsonl"
student=${1:-$work/student}
if [ $# = 0 ]; then # random weights need more passes and a higher rate than a pretrained model
  [ -d "$student" ] || python $here/student.py "$student"
  export TRAINSPAN_SFT__NUM_TRAIN_EPOCHS=${TRAINSPAN_SFT__NUM_TRAIN_EPOCHS:-12} TRAINSPAN_SFT__LEARNING_RATE=${TRAINSPAN_SFT__LEARNING_RATE:-2e-3}
fi
export TRAINSPAN_ROLLOUTS__TASKS=$work/tasks.jsonl TRAINSPAN_TRAIN__MODEL=$work/warm

started=()
trap 'for pid in "${started[@]}"; do kill "$pid" 2>/dev/null || true; done; wait' EXIT

echo "1. the agent talks to the teacher, traced and judged"
trainspan collector --config $config & started+=($!)
python $here/teacher.py --port "$teacher_port" & started+=($!)
until trainspan status | grep -q "^collector .*pid"; do sleep 0.5; done
trainspan rollout --config $config --run teacher --split train --limit "${DEMONSTRATIONS:-600}" --n 1 \
  --policy-url "http://127.0.0.1:$teacher_port/v1" $here/agent.py:solve

echo "2. supervised training on the rollouts that the judge accepted"
trainspan sft --config $config --store "$home/spans.duckdb" --run teacher --min-reward 1 --model "$student" --out "$work/warm"

echo "3. the same agent, on the model served here, gets better"
trainspan loop --config $config
