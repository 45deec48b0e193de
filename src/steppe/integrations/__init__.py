"""Integrations with trainers: one module per framework, which needs that framework and is imported by name.

`lightning`, `fabric`, `transformers`, `accelerate`, `timm`, `keras`. What they share is in `micro_batches` and
`bookkeeping`.
"""
