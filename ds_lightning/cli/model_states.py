"""What the model states should take: bytes per parameter by stage, precision and world size."""

# Bytes per trainable parameter of (parameters, gradients, optimizer states of Adam with its fp32
# masters if any).
BYTES = {
    "32-true": (4, 4, 8),
    "64-true": (8, 8, 16),
    "bf16-mixed": (2, 4, 12),
    "16-mixed": (2, 4, 12),
    "bf16-true": (2, 2, 4),
    "16-true": (2, 2, 4),
}


def bytes_per_parameter(
    stage: int, world_size: int, precision: str, whole: float = 0.0, secondary: int = 0, carried: float = 0.0
) -> float | None:
    """Return what one rank holds at most per parameter under Adam; None without a formula.

    The ZeRO paper (arXiv:1910.02054), section 3: stage 1 divides the optimizer states by the world size, stage 2 the
    gradients too, stage 3 the parameters too. Gradients of 16-bit parameters are accumulated in fp32 here.

    Args:
        stage: 0 to 3.
        world_size: Number of ranks that share one copy of the model.
        precision: One of Lightning's names.
        whole: Share of the parameters too small to be divided at stage 3.
        secondary: Number of ranks that share a second copy of gathered parameters (hpZ); 0 without.
        carried: Bytes of errors of quantized gradients per parameter that is divided (LoCo).
    """
    if precision not in BYTES:
        return None
    parameters, gradients, optimizer = BYTES[precision]
    shared = 1 - whole if stage >= 3 else 0.0
    return (
        parameters * (shared / world_size + 1 - shared)
        + gradients / (world_size if stage >= 2 else 1)
        + optimizer / (world_size if stage >= 1 else 1)
        + (parameters * shared / secondary if secondary else 0.0)
        + carried * shared
    )
