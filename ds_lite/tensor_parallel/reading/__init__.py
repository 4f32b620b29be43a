"""What linear layers are for, read from the code of a block without running it (§9.13)."""

from ds_lite.tensor_parallel.reading.block import Closing, Flow, Geometry, read_block

__all__ = ["Closing", "Flow", "Geometry", "read_block"]
