"""The one command `trainspan` and the loop; sub-commands import their part only when they run.

In reading order:

- `main`: finds the sub-command, and turns our errors into one line and an exit code.
- `commands/`: one module per sub-command.
- `loop/`: the supervised loop; `loop/rounds` goes through the rounds.
- `clients/`: what commands ask of running processes.
- `views/`: what commands print.
- `doctor/`: what `trainspan status` and `trainspan doctor` look at; `extras` is what is installed.
- `settings`, `setting_options`: the options that commands share.
"""
