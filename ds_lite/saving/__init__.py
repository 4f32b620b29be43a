"""Checkpoints that any layout can load (§9.1 §9.3).

A run saved by pp2 x dp2 with ZeRO-1 goes on as pp1 x tp2 with ZeRO-2, because nothing in a checkpoint depends
on the layout: tensors are whole and go by their state-dict names, and so does the optimizer's state.

    layer_03-model_states.pt   {name: tensor} of one layer; part_03 of a plain model (`state.py`)
    layer_03-optim_states.pt   {parameter name: its state} (`optimizer.py`)
    engine_states.pt           counters, schedule, loss scale, options of the parameter groups, generators,
                               and the client_state of rank 0
    manifest.json, latest      `files.py`, `publishing.py`

The first rank of a stage writes the stage's files, one layer after the other, and is the only one that ever
holds a whole layer. Experts live on several ranks and go by their global numbers: the first rank that holds
them writes them, into `layer_03-experts_01_of_02-…` (01 is its place on the data axis, 02 the ep_size).
Where replicas differ (buffers of a normalisation) its values are saved: data rank 0. Not saved: gradients
since the last optimizer step, and the place of a data iterator. The generators of Python, NumPy and torch
come back on a grid of the same shape only. All ranks see one file system.
"""

from ds_lite.saving.checks import LoadOptions
from ds_lite.saving.loading import load_checkpoint
from ds_lite.saving.writing import save_checkpoint, save_whole_model

__all__ = ["LoadOptions", "load_checkpoint", "save_checkpoint", "save_whole_model"]
