"""Checkpoints by parameter name and logical shape, whatever the stage and the world size."""
