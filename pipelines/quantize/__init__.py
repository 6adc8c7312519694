"""Base checkpoint to variant: one module per method library, one table."""
