"""The documentation: its code runs, it builds, it is whole, it works in a browser."""
