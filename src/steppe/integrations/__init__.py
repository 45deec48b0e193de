"""Trainers: one module for each framework. Each needs its framework, and is imported by name.

`lightning`, `fabric`, `transformers`, `accelerate`, `timm`, `keras`. What they share is in `micro_batches` and
`bookkeeping`.
"""
