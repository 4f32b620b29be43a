"""The groups of a sequence, for scripts that form them themselves (§9.14)."""

from __future__ import annotations

from ds_lite import comm
from ds_lite.grid import PipelineParallelGrid
from ds_lite.topology import ProcessTopology


class SequenceGrid(PipelineParallelGrid):
    """A grid of replicas and sequence ranks that, given to `initialize` as `mpu`, spreads its sequences."""


def initialize_sequence_parallel(sequence_parallel_size: int) -> SequenceGrid:
    """The groups of `sequence_parallel_size` neighbours that share a sequence, and of their replicas.

    Communication: creates the process groups.
    Raises: ValueError for a degree that does not divide the number of processes.

    Source: §9.14; DeepSpeed `runtime/sequence_parallel/parallel_state_sp.py` @ 0.19.8.
    Differs: returns the groups; DeepSpeed keeps them in its module.
    """
    comm.init_distributed(verbose=False)
    world_size = comm.get_world_size()
    if sequence_parallel_size < 1 or world_size % sequence_parallel_size:
        fitting = [size for size in range(1, world_size + 1) if world_size % size == 0]
        raise ValueError(
            f"sequence_parallel_size={sequence_parallel_size} does not divide {world_size} processes; choose "
            f"from {fitting} (§9.14)"
        )
    sizes = [1, world_size // sequence_parallel_size, sequence_parallel_size, 1]
    return SequenceGrid(ProcessTopology(["pipe", "data", "seq", "model"], sizes))
