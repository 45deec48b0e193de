"""Whole steps, and functions of tensors, recorded as CUDA graphs and replayed."""
