"""How the C library treats freed memory: kept for the next allocation, or given back."""

from ds_lightning.ops import native


def keep_freed_memory(mmap_threshold_bytes: int = 1 << 40, trim_threshold_bytes: int = 1 << 40) -> bool:
    """Makes glibc keep freed blocks, so that buffers that come and go are not faulted in again.

    By default glibc maps each large block afresh and unmaps it when freed; the kernel then zeroes
    every page again, which costs more than many a collective. The price is that the process's
    resident memory does not shrink by itself; see `release_free_memory`.

    Args:
        mmap_threshold_bytes: Blocks from this size on are mapped on their own, hence given back
            when freed. Above 32 MiB, where glibc's own limit lies, nothing is mapped on its own.
        trim_threshold_bytes: Free memory at the end of the heap that is kept.

    Returns:
        Whether the setting was made. False on other C libraries and without native code: then
        nothing has changed, and only speed differs.
    """
    module = native.find("_native").module
    if module is None:
        return False
    return bool(module.keep_freed_memory(mmap_threshold_bytes, trim_threshold_bytes))


def return_freed_memory() -> bool:
    """Makes glibc give blocks of 128 KiB and more back as soon as they are freed; undoes `keep_freed_memory`.

    By default it keeps blocks of up to 32 MiB once some of that size were freed, and what lies
    between them is lost to fragmentation: memory that is scarce should not pay for that. The price
    is that pages of each block are faulted in anew.

    Returns:
        As `keep_freed_memory`.
    """
    return keep_freed_memory(128 << 10, 1 << 20)


def release_free_memory() -> bool:
    """Gives free heap memory back to the system; False where nothing was or could be released."""
    module = native.find("_native").module
    return False if module is None else bool(module.release_free_memory())
