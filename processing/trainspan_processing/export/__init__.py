"""`trainspan export`: stored rollouts as training files for supervised fine-tuning and preference optimization."""
