"""What linear layers are for, read from the code of a block without running it (§9.13)."""

from ds_lite.tensor_parallel.reading.block import Geometry, read_block
from ds_lite.tensor_parallel.reading.flow import Closing, Flow

__all__ = ["Closing", "Flow", "Geometry", "read_block"]
