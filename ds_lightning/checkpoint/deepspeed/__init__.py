"""Checkpoints of DeepSpeed, read without deepspeed; and its universal layout, written."""
