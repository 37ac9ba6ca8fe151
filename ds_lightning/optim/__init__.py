"""Optimizers on shards."""
