"""Activation memory: results of a forward are computed again in backward instead of being kept."""
