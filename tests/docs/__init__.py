"""The documentation: its code runs, it builds, it is complete, it works in a browser."""
