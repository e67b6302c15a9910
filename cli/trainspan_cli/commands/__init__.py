"""One module per sub-command, each with a function of the command's name."""
