"""Eval sets run against an endpoint, one row of evidence per item."""
