"""The web server of `trainspan view`."""
