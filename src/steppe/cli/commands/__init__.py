"""One file a command: its function `command` is the command of that name."""
