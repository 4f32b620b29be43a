"""What an engine is made of, beside its optimizer: the module, counters, generators (§9.1 §9.2)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ds_lite.pipe.module import PipelineModule
from ds_lite.saving.engine_view import EngineView
from ds_lite.saving.files import plain
from ds_lite.saving.optimizer import part_of
from ds_lite.tags import cut_of, tags_of, whole

AXES = ("pipe", "data", "seq", "model")
STAGE = AXES[1:]  # the ranks that hold the same layers; the first of them writes
_EXTRA = "_extra_state"


# ------------------------------------------------------------------------------------------ the module


def module_state(module: nn.Module) -> dict[str, Any]:
    """The state dict with the live parameters and buffers in it; a layer's extra state as plain values.

    Raises: ValueError for an entry that a hook made, since nothing would put it back.
    """
    live = {id(tensor) for tensor in [*module.parameters(), *module.buffers()]}
    state: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if name.rpartition(".")[2] == _EXTRA:
            state[name] = plain(value, f"the extra state {name!r}")
            continue
        if id(value) not in live:
            raise ValueError(
                f"{name!r} in the state dict is neither a parameter nor a buffer of the module; a state_dict "
                f"hook made it, remove the hook (§9.1)"
            )
        state[name] = value
    return state


def check_cuts(state: dict[str, Any], tensor_ranks: int) -> None:
    """Raises: ValueError for a part of a parameter of which nothing says how it was cut."""
    for name, value in state.items():
        if not isinstance(value, nn.Parameter) or cut_of(value) is not None:
            continue
        if tensor_ranks > 1 and tags_of(value).model == "sharded":
            raise ValueError(
                f"{name} is cut over {tensor_ranks} tensor-parallel ranks by another library, which does not "
                f"say how, so it cannot be made whole; save with that library, or use the layers of "
                f"ds_lite.tensor_parallel (§9.3)"
            )


def whole_part(state: dict[str, Any], names: Sequence[str], *, keep: bool) -> dict[str, Any]:
    """The tensors of a part as one process holds them, on the CPU; buffers are this rank's.

    Communication: one all-gather over the model axis per parameter that was cut, so all ranks of a stage call
    it, and those that `keep` get the result.
    """
    content: dict[str, Any] = {}
    copies: dict[int, Tensor | None] = {}  # a tensor with two names is one in the file too
    for name in names:
        value = state[name]
        if isinstance(value, Tensor):
            if id(value) not in copies:
                copies[id(value)] = _joined(value, keep=keep)
            value = copies[id(value)]
        if keep:
            content[name] = value
    return content


def _joined(value: Any, *, keep: bool) -> Tensor | None:
    if not keep and cut_of(value) is None:
        return None  # nobody asks this rank for anything
    joined = whole(value)
    return joined.cpu().contiguous() if keep else None


def whole_shape(value: Any) -> tuple[int, ...] | None:
    """The shape in one process; None for a layer's extra state."""
    if not isinstance(value, Tensor):
        return None
    how, shape = cut_of(value), value.shape  # type: ignore[arg-type]
    return tuple(shape) if how is None else how.whole_shape(shape)


@torch.no_grad()
def put(module: nn.Module, name: str, target: Any, value: Any) -> None:
    """Put a whole value where the state dict has this name; tensors keep their storage."""
    if isinstance(target, Tensor):
        target.copy_(part_of(target, value))
    else:
        module.get_submodule(name.rpartition(".")[0]).set_extra_state(value)


# ------------------------------------------------------------------------- counters, schedule, generators


def engine_state(engine: EngineView, client_state: dict[str, Any]) -> dict[str, Any]:
    """What the engine counts, and what the script wants to keep, as of the last optimizer step.

    Raises: ValueError, with the key, for what cannot be loaded again.
    """
    return {
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "micro_steps": engine.micro_steps_at_last_step(),
        "micro_offset": getattr(engine.module, "micro_offset", 0),
        "loss_scale": engine.scaler.state_dict() if engine.scaler.is_dynamic else None,
        "client_state": plain(dict(client_state), "client_state"),
    }


def set_engine_state(engine: EngineView, saved: dict[str, Any]) -> None:
    """Go on counting from a saved engine's numbers."""
    engine.global_steps, engine.global_samples = saved["global_steps"], saved["global_samples"]
    engine.skipped_steps, engine.micro_steps = saved["skipped_steps"], saved["micro_steps"]
    engine.trace.step = engine.global_steps
    if isinstance(engine.module, PipelineModule):
        engine.module.micro_offset = saved["micro_offset"]


def set_loss_scale(engine: EngineView, saved: dict[str, Any]) -> None:
    """Take over a dynamic loss scale where both runs have one."""
    if saved["loss_scale"] is not None and engine.scaler.is_dynamic:
        engine.scaler.load_state_dict(saved["loss_scale"])
        engine.gradients.loss_scale = engine.scaler.scale


def scheduler_state(scheduler: Any) -> dict[str, Any] | None:
    """Class and state of a learning-rate schedule; None if there is none.

    Raises: ValueError for a schedule without state_dict, or with a state that cannot be loaded again.
    """
    if scheduler is None:
        return None
    kind = type(scheduler).__name__
    if not hasattr(scheduler, "state_dict"):
        raise ValueError(f"lr_scheduler {kind} has no state_dict(), so it cannot be saved; add one (§9.2)")
    return {"class": kind, "state": plain(scheduler.state_dict(), "lr_scheduler.state_dict()")}


def generator_states(device: torch.device) -> dict[str, Any]:
    """Python's, NumPy's and torch's global generators, as tensors and numbers."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(words), gauss],
        "numpy": [
            name,
            torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            *plain(rest, "NumPy's generator"),
        ],
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_generator_states(states: dict[str, Any], device: torch.device) -> None:
    """Put the generators where they were."""
    torch.set_rng_state(states["torch"])
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
