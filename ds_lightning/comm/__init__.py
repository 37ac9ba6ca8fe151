"""Collectives on flat buffers; the only place that knows backends."""
