"""Pages of a run: its curves, checks and rounds; one stage; several runs side by side; and the report as a file."""
