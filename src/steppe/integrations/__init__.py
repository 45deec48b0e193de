"""Trainers: each module needs the trainer it is named after, and is imported by name.

`lightning` (Lightning and Fabric), `transformers`, `accelerate`, `timm`.
"""
