"""Asynchronous file I/O: tensors to and from files while the program goes on.

`AsyncIO` is what this package swaps with; `aio_handle` has the methods of DeepSpeed's handle of that name.
"""

from ds_lightning.ops.aio.async_io import AsyncIO
from ds_lightning.ops.aio.file import File
from ds_lightning.ops.aio.handle import AioHandle, aio_handle
from ds_lightning.ops.aio.transfer import Transfer

__all__ = ["AioHandle", "AsyncIO", "File", "Transfer", "aio_handle"]
