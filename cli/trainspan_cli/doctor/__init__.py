"""What `trainspan status` and `trainspan doctor` look at: installation, processes, capture, chat template."""
