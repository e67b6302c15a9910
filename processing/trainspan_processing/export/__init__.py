"""`trainspan export`: writes stored rollouts as training files for supervised fine-tuning and preference optimization."""
