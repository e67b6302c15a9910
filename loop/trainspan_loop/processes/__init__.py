"""The processes of a run, and the progress screen."""
