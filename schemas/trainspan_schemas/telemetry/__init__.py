"""What spans and requests carry: attribute keys, identity and its signature, tokens, constraints, statuses."""
