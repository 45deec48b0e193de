"""The papers, run again: recipes for their tables and figures, their numbers, ours, and whether they agree."""
