"""Small helpers for every package: errors in one line, complete files, devices, t quantiles. Imports no package."""
