"""The processes of a run, and the screen that shows them."""
