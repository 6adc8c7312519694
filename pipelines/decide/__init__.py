"""Judgement: statistics, gates, Pareto front, decision. Pure: no I/O, no clock, no vendor import."""
