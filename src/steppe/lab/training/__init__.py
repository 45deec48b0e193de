"""One training run: its batches, its base optimizer, its loop, what is measured at its end."""
