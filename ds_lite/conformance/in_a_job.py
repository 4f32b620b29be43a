"""The suite in a job that runs already: `torchrun --nnodes 2 --nproc-per-node 8 -m ds_lite conformance`.

Rank 0 runs the tests and reports. The others serve it with `tests/world_job.py`, which says how; so the ranks
of a test are processes of the job, on all its nodes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def ranks(environment: Mapping[str, str] = os.environ) -> int:
    """How many processes the job has that this one belongs to; 1 outside a job.

    >>> ranks({"WORLD_SIZE": "16", "RANK": "3"}), ranks({})
    (16, 1)
    """
    return int(environment.get("WORLD_SIZE", "1"))


def nodes(environment: Mapping[str, str] = os.environ) -> int:
    """How many nodes they are on, as far as the launcher says."""
    return int(environment.get("GROUP_WORLD_SIZE", environment.get("SLURM_NNODES", "1")))


def serves() -> bool:
    """Whether this process is to be a rank of the tests, not to run them."""
    return ranks() > 1 and os.environ.get("RANK", "0") != "0"


def serve(root: Path) -> int:
    """Be a rank of the tests until rank 0 says that they are over; the exit status."""
    return subprocess.call([sys.executable, str(root / "tests" / "world_job.py")], cwd=root)
