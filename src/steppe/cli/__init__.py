"""The command line: `commands/` has one file a command; beside it is what commands share."""
