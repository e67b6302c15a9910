"""The checks of `trainspan status` and `trainspan doctor`: installation, processes, capture, chat template."""
