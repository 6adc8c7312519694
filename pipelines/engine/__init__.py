"""Variant to engine, and engine to endpoint: one module per target, one table."""
