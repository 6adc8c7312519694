"""Latency and throughput of engines, measured under one schedule of arrivals."""
