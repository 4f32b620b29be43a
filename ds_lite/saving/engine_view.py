"""What a checkpoint needs of an engine; the engine imports this folder, not the other way round."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from ds_lite.gradients import Gradients
from ds_lite.grid import PipelineParallelGrid
from ds_lite.precision import LossScaler
from ds_lite.trace import Trace


class EngineView(Protocol):
    """The parts of an engine that are saved, loaded or asked."""

    module: nn.Module
    grid: PipelineParallelGrid
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any
    gradients: Gradients
    scaler: LossScaler
    trace: Trace
    device: torch.device
    global_rank: int
    world_size: int
    global_steps: int
    global_samples: int
    skipped_steps: int
    micro_steps: int

    def micro_batches_begun(self) -> int: ...
    def micro_steps_at_last_step(self) -> int: ...
    def forget_batch(self) -> None: ...
