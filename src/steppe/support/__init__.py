"""Small helpers for all packages: one-line errors, atomic file writes, devices, t quantiles. Imports no package."""
