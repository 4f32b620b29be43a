"""A batch that all ranks finish or none: how one rank's failure reaches the others (§9.10).

A rank that fails tells its two neighbours, who find the error in place of a message, and its data peers, who
wait for it in a reduction (ZeRO-2). Ranks that heard nothing come to the agreement before the batch's first
collective, and raise there. Where experts exchange tokens, replicas wait for each other in the middle of the
batch and may never come there: then a rank that fails or hears of it raises at once, and leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ds_lite import trace
from ds_lite.agreement import raise_together
from ds_lite.gradients import Gradients
from ds_lite.pipe.stage import Stage


class SharedFate:
    """What one engine's batches have in common on the way down."""

    def __init__(self, stage: Stage, gradients: Gradients, *, exchanges_tokens: bool) -> None:
        self._stage, self._gradients = stage, gradients
        self._exchanges_tokens = exchanges_tokens
        self._has_agreed = False

    @contextmanager
    def batch(self) -> Iterator[None]:
        """A rank that fails before the batch's first collective stops its replica, and mostly all ranks."""
        self._has_agreed = False
        try:
            yield
            return
        except Exception as error:
            self._stage.failure = f"{type(error).__name__}: {error}"
            if self._has_agreed:
                raise
            self._has_agreed = True
            met, cause = error, self._stage.announce(error)
        if self._exchanges_tokens:
            raise cause
        with trace.current().limited(cause):  # another rank may be past hearing of it
            self._gradients.leave(cause)  # before the neighbours: each may wait for the other
            self._stage.drain(met)
            raise_together(cause)

    def agree(self) -> None:
        """Once a batch, before its first collective: every rank came this far, or all of them raise.

        A failure on one replica, or in a stage's last backward, finds its peers on the way to a collective.
        In training some micro-batch's loss must have led to a gradient, as one process demands too.
        """
        if self._has_agreed:
            return
        self._has_agreed = True
        has_trained = raise_together(None, anyone=self._stage.has_trained)
        if torch.is_grad_enabled() and not has_trained:
            raise ValueError(
                "the loss of no micro-batch needs a gradient, so nothing would be trained; do not detach the "
                "outputs or the loss, and leave some parameter trainable (§9.2)"
            )
