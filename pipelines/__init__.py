"""quantgate: take a base checkpoint to an engine that may be promoted, and prove why."""

__version__ = "0.1.0"
