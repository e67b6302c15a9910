"""Which rollout code runs in."""
