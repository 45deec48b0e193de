"""One training run: its batches, base optimizer, loop, checkpoints, and the curvature measured at its end."""
