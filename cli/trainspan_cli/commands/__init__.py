"""One module per subcommand, each with a function of the command's name."""
