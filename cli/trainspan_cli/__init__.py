"""The command `trainspan`; subcommands import their package only when they run.

In reading order:

- `main`: dispatches to the subcommand and turns trainspan's errors into one line and an exit code.
- `commands/`: one module per subcommand.
- `clients/`: requests to running processes.
- `views/`: terminal output.
- `doctor/`: the checks of `trainspan status` and `trainspan doctor`; `extras` checks the installation.
- `settings`, `setting_options`: options shared by commands.
"""
