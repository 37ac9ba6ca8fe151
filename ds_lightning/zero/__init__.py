"""ZeRO stages 0-3 over flat units, under Lightning and in a bare loop alike.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv:1910.02054).
"""
