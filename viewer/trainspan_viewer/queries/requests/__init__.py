"""What a page asks about a rollout, the address of that question, and how much would have to be read for the answer."""
