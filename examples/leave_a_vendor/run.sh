#!/usr/bin/env bash
# Leaving a vendor's fine-tuning: its files and its model → supervised training → reinforcement learning → how much of it is reached.
#
# examples/leave_a_vendor/run.sh [MODEL_DIR]     from the repository's root; without a model, one with random weights is made
set -euo pipefail

python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("opentelemetry.instrumentation.openai") is None)' || {
  echo "the vendor's tokens would not be recorded: pip install 'trainspan[messages]'" >&2
  exit 1
}
here=examples/leave_a_vendor
config=$here/trainspan.toml
home=${TRAINSPAN_HOME:-.trainspan}
work=$home/shopping
vendor_port=${VENDOR_PORT:-8100}
mkdir -p "$work"
[ -f "$work/tasks.jsonl" ] || python $here/problems.py "$work"
student=${1:-$work/student}
if [ $# = 0 ]; then # random weights need more passes and a higher rate than a pretrained model
  [ -d "$student" ] || python $here/student.py "$student"
  export TRAINSPAN_SFT__NUM_TRAIN_EPOCHS=${TRAINSPAN_SFT__NUM_TRAIN_EPOCHS:-20} TRAINSPAN_SFT__LEARNING_RATE=${TRAINSPAN_SFT__LEARNING_RATE:-2e-3}
fi
export TRAINSPAN_ROLLOUTS__TASKS=$work/tasks.jsonl TRAINSPAN_TRAIN__MODEL=$work/warm

started=()
trap 'for pid in "${started[@]}"; do kill "$pid" 2>/dev/null || true; done; wait' EXIT
trainspan collector --config $config & started+=($!)
python $here/vendor.py --port "$vendor_port" & started+=($!)
until trainspan status | grep -q "^collector .*pid"; do sleep 0.5; done

echo "1. the agent on held-out tasks with the vendor's model: what is to be reached"
trainspan rollout --config $config --run vendor --split val --n 1 --policy-url "http://127.0.0.1:$vendor_port/v1" $here/agent.py:solve

echo "2. the fine-tuning file becomes rollouts, and these train a model"
trainspan import --config $config --reward 1 "$work/chat.jsonl"
trainspan sft --config $config --store "$home/spans.duckdb" --min-reward 1 --model "$student" --out "$work/warm"

echo "3. the same agent, on the model served here, gets better"
trainspan loop --config $config --name own

echo "4. how much of the vendor's success it reaches"
trainspan compare --config $config own --reference vendor --price vendor=2.5/10
