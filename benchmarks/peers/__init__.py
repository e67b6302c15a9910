"""Other projects on the same work, each run by an interpreter that has it."""
