"""The model and the text of the quickstart; nothing has to be downloaded."""

from ds_lightning.demo.model import ByteGPT
from ds_lightning.demo.text import StdlibText

__all__ = ["ByteGPT", "StdlibText"]
