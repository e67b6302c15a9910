#!/bin/bash
# submit.sh AGENT_FOLDER [PARTS]: submits the services, the trainer and an array of rollouts.
# SHARED and MODEL name folders on the shared file system; $SHARED/venv is an environment with trainspan.
set -euo pipefail
agent=$(realpath "${1:?name the agent folder}")
parts=${2:-8}
DEPLOY=$(realpath "$(dirname "$0")/..")
export DEPLOY
# shellcheck source=deploy/slurm/settings.sh
source "$DEPLOY/slurm/settings.sh"

services=$(sbatch --parsable "$DEPLOY/slurm/services.sbatch")
trainer=$(sbatch --parsable --dependency="after:$services" "$DEPLOY/slurm/trainer.sbatch")
rollouts=$(sbatch --parsable --dependency="after:$services" --array="0-$((parts - 1))" "$DEPLOY/slurm/rollouts.sbatch" "$agent")
echo "services $services, trainer $trainer, rollouts $rollouts; when done: scancel $trainer $services"
