"""`sequence_parallel_size` in the config, and nothing else: a model on sequences that are spread over ranks
(§9.14).

Every rank of a seq group calls the engine with the same whole batch. Each takes its tokens, the attention
exchanges (`routes.py`), everything else works on tokens one by one. Where the sequence is cut depends on
the model:

    tokens   models of tokens, at the batch; the loss is computed here, from each rank's logits
    blocks   models that make their own tokens (images), or look at some tokens only (a pooler, a classifier):
             whole before the first block and after the last

What comes back is what one process has: the loss of all tokens, or whole outputs.

Legend: B micro-batch, T tokens, V vocabulary; sp ranks in the group.

Source: §9.5 §9.14; DeepSpeed `sequence/auto_sp.py`, `runtime/sequence_parallel/ulysses_sp.py` @ 0.19.8.
Differs: DeepSpeed's key wraps nothing; its `auto_wrap_model_for_sp` skips language models.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ds_lite import comm
from ds_lite.agreement import raise_together
from ds_lite.comm import ProcessGroup
from ds_lite.data import different_data
from ds_lite.sequence.batches import Cut, cut_batch
from ds_lite.sequence.blocks import CutAtBlocks
from ds_lite.sequence.context import Context, as_one_process
from ds_lite.sequence.data import Part, sequence_loss
from ds_lite.sequence.models import Kind, kind_of
from ds_lite.sequence.probe import evaluating, fault_of, few_tokens, few_tokens_of_all, tensors_of
from ds_lite.sequence.routes import rerouted_sdpa
from ds_lite.sequence.whole import gather_tokens


class SequenceParallel:
    """One model on one seq group: the forward of whole batches, and what backward needs around it.

    Raises: ValueError for a model whose attention cannot be reached.
    """

    def __init__(self, model: nn.Module, group: ProcessGroup, kind: Kind | None = None) -> None:
        self.model, self.group = model, group
        self.kind = kind or kind_of(model)
        self.context = Context(group)
        self._blocks = CutAtBlocks(model, self.context) if self.kind.cut == "blocks" else None
        self._has_compared = self._has_probed = False
        self._hits: dict[bool, int] = {}  # attentions of a forward, by the model's mode, as first seen
        self._recomputed = 0  # attentions of a backward, as first seen
        self._late = ExitStack()  # the routes, in a backward that nobody announced
        self._needs_positions = False  # the model counts them by the mask
        self._parts: list[bool] | None = None  # which outputs have a rank's tokens, in order

    def __str__(self) -> str:
        where = "at the batch" if self.kind.cut == "tokens" else "before the first block"
        ranks = comm.get_world_size(self.group)
        return (
            f"sequences of {type(self.model).__name__} are cut over {ranks} ranks {where}; its attention is "
            f"reached through {self.kind.route}"
        )

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The model on a whole batch.

        Returns what the model returns. With `labels` for each token, its `loss` is that of all tokens, and
        its logits are this rank's (B, T/sp, V); without them outputs (B, T/sp, ...) come back whole.

        Communication: one all-reduce of a few numbers; two exchanges for each attention, and where it is
        torch's, not transformers', one all-reduce of a few numbers before them; with labels one all-reduce
        of the loss, else all-gathers of the outputs. The first call also runs a few tokens twice.
        Raises: ValueError, on every rank, for what cannot be cut, and for ranks with different batches.
        """
        self._close_what_failed()
        given = by_name(self.model, inputs, named)
        batch = self._agreed(given)
        if not self._has_probed:
            self._probe(given, batch)
        if batch.moves_positions and self._needs_positions:
            raise ValueError(
                f"{type(self.model).__name__} counts positions by its attention mask, of which a rank has a "
                "part; give position_ids with a batch that is padded (§9.14)"
            )
        self.context.set_micro_batch(batch.part, batch.padding, batch.positions)
        with self._running(is_backward=False):
            outputs = self.model(**batch.inputs)
        if batch.part is None:
            return self._resumed_in_backward(outputs, batch)
        if batch.labels is None:
            return self._resumed_in_backward(self._whole(outputs, batch.part), batch)
        loss = sequence_loss(outputs.logits, batch.labels, self.group, num_valid=batch.num_valid)
        return self._resumed_in_backward(_with_loss(outputs, loss), batch)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward of what this made: recomputed attentions exchange too."""
        self._close_what_failed()
        with self._running(is_backward=True):
            yield

    def _resumed_in_backward(self, outputs: Any, batch: Cut) -> Any:
        """The outputs; a backward from them finds the micro-batch that they were made of.

        Forwards of other lengths may have run since. Where the backward is the caller's own, outside
        `backward()`, the routes open when it comes by here and close when it ends.
        """
        context = self.context
        part = batch.part if self._blocks is None else self._blocks.part
        state = part, batch.padding, batch.positions

        def resume(_: Tensor) -> None:
            if not context.is_open:
                self._late.enter_context(self._running(is_backward=True))
                torch.autograd.Variable._execution_engine.queue_callback(self._late.close)
            context.set_micro_batch(*state)

        for x in tensors_of(outputs, is_strict=False):
            if x.requires_grad and not x.is_leaf:
                x.register_hook(resume)
        return outputs

    @property
    def _is_strict(self) -> bool:
        """Whether outputs may hold nothing but tensors; transformers' hold caches, too."""
        return self.kind.cut == "tokens" and not self.kind.is_transformers

    def _close_what_failed(self) -> None:
        """A caller's own backward that raised has left the routes open."""
        self._late.close()

    @contextmanager
    def _running(self, *, is_backward: bool) -> Iterator[None]:
        before = self.context.part
        try:
            with self.context.open(is_backward=is_backward), rerouted_sdpa(self.context):
                yield
        finally:
            self.context.part = before if is_backward else None
        self._check_hits(is_backward)

    def _check_hits(self, is_backward: bool) -> None:
        """As many attentions as the first time: one that was missed works on this rank's tokens alone."""
        hits = self.context.hits
        if not is_backward and hits == 0:
            raise ValueError(
                f"{type(self.model).__name__} ran and no attention went through an exchange, so each rank's "
                "tokens saw only each other; call F.scaled_dot_product_attention, use "
                "DistributedAttention, or remove sequence_parallel_size (§9.14)"
            )
        if is_backward:
            self._check_recomputed(hits)
            return
        first = self._hits.setdefault(self.model.training, hits)
        if hits != first:
            raise RuntimeError(
                f"{hits} attentions were exchanged in forward, the first time {first}; some attention went "
                "another way (§9.14)"
            )

    def _check_recomputed(self, hits: int) -> None:
        """A backward recomputes the attentions of one forward, of several, or of some layers of each."""
        first = self._recomputed = self._recomputed or hits
        if hits and hits % first and first % hits:
            raise RuntimeError(
                f"{hits} attentions were exchanged in backward, the first time {first}; some attention went "
                "another way (§9.14)"
            )

    def _probe(self, given: Mapping[str, Any], batch: Cut) -> None:
        """Refuse a model that is not, on parts of a few tokens, what it is on the whole of them."""
        self._has_probed = True
        if batch.is_from_loader:
            assert batch.part is not None
            few = few_tokens_of_all(given, batch.part, self.group)
        else:
            few = few_tokens(given, batch.sizes["tokens"], batch.sizes["samples"], self.group)
        fault, parts = self._compared(few)
        raise_together(fault, self.group)
        self._parts = parts
        if self.kind.is_transformers and self.kind.cut == "tokens" and "attention_mask" in self.kind.accepts:
            ids = next(x for name, x in few.items() if name in ("input_ids", "inputs_embeds"))
            mask = torch.ones(ids.shape[:2], dtype=torch.long, device=ids.device)
            mask[:, 0] = 0  # the first token is padding
            fault, _ = self._compared({**few, "attention_mask": mask})
            self._needs_positions = not raise_together(None, self.group, anyone=fault is None)

    def _compared(self, few: Mapping[str, Any]) -> tuple[ValueError | None, list[bool]]:
        """What is wrong with few tokens on parts, and which of the outputs are parts."""
        alone = cut_batch(few, self.kind, 0, 1)
        mine = cut_batch(few, self.kind, comm.get_rank(self.group), comm.get_world_size(self.group))
        inputs = own_defaults(self.model, alone.inputs, few)
        with evaluating(self.model), as_one_process():
            whole = self.model(**inputs)
        self.context.set_micro_batch(mine.part, mine.padding, mine.positions)
        with evaluating(self.model):
            try:
                with self._running(is_backward=False):
                    spread = self.model(**mine.inputs)
            except (ValueError, TypeError):
                raise
            except Exception as failure:
                raise ValueError(
                    f"{type(self.model).__name__} fails on a part of its tokens: {failure}; remove "
                    "sequence_parallel_size (§9.14)"
                ) from failure
        return fault_of(self.model, whole, spread, mine.part, is_strict=self._is_strict)

    def _agreed(self, given: Mapping[str, Any]) -> Cut:
        """What this rank runs, once all ranks know that they were given the same."""
        cut, error = None, None
        try:
            cut = cut_batch(given, self.kind, comm.get_rank(self.group), comm.get_world_size(self.group))
        except Exception as refusal:
            error = refusal
        names = ("tokens", "samples", "labels", "checksum of input_ids")
        sizes = dict.fromkeys(names, 0) if cut is None else dict(cut.sizes)
        if not self._has_compared:
            sizes["checksum of input_ids"] = 0  # all of the first batch is compared below
        raise_together(error, self.group, anyone=False, **sizes)
        assert cut is not None
        if cut.is_from_loader:
            return cut.completed(self.group)
        if not self._has_compared:
            self._has_compared = True
            ranks = range(comm.get_world_size(self.group))
            raise_together(different_data(dict(given), self.group, ranks, axis="sequence"), self.group)
        return cut

    def _whole(self, outputs: Any, part: Part) -> Any:
        """Outputs with all tokens: those that were parts of few tokens are parts of these."""
        found = list(tensors_of(outputs, is_strict=self._is_strict))
        here = part.lengths[part.rank]
        if self._parts is not None and len(self._parts) == len(found):
            flags = iter(self._parts)
        elif self.kind.is_transformers:  # asked for more than the first time, e.g. hidden states
            flags = iter([x.dim() >= 2 and x.shape[1] == here for x in found])
        else:
            raise ValueError(
                f"{type(self.model).__name__} gives {len(found)} tensors, the first time it gave "
                f"{len(self._parts or ())}; which of them have tokens is known of those alone (§9.14)"
            )
        return mapped(outputs, lambda x: gather_tokens(x, part, self.group) if next(flags) else x)


def by_name(model: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a forward by their names."""
    bound = inspect.signature(model.forward).bind_partial(*inputs)
    return {**bound.arguments, **named}


def own_defaults(model: nn.Module, inputs: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for one process: positions that the caller did not give are the model's own to make."""
    parameters = inspect.signature(model.forward).parameters
    return {
        name: x
        for name, x in inputs.items()
        if name in given
        or name not in ("position_ids", "positions")
        or parameters[name].default is inspect.Parameter.empty
    }


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A nested output with `function` applied to its tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        items = {key: mapped(item, function) for key, item in value.items()}
        return items if type(value) is dict else type(value)(**items)
    if isinstance(value, (tuple, list)):
        row = [mapped(item, function) for item in value]
        return type(value)(*row) if hasattr(value, "_fields") else type(value)(row)
    return value


def _with_loss(outputs: Any, loss: Tensor) -> Any:
    """The model's output with the loss in it; first, as its own loss would be."""
    return type(outputs)(**{"loss": loss, **{key: value for key, value in outputs.items() if key != "loss"}})


def auto_wrap_model_for_sp(model: nn.Module, process_group: ProcessGroup) -> SequenceParallel:
    """The model as something that is called with whole batches; `initialize` does this by itself.

    A loss that comes back needs its backward inside `backward()` if the model recomputes activations, and the
    mean of the ranks' gradients afterwards.

    Source: §9.14; DeepSpeed `sequence/auto_sp.py::auto_wrap_model_for_sp` @ 0.19.8.
    Differs: works on language models; returns the wrapped model instead of changing the vision encoder
    inside.
    """
    return SequenceParallel(model, process_group)
