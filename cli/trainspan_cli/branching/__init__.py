"""`trainspan branch`: chooses states of stored rollouts, runs branches from them, and reports and stores the values."""
