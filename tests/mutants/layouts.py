"""§9.9 §9.14 §9.4 Faults of models of transformers in pipelines, over sequences and experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ds_lite.moe import spread
from ds_lite.moe.whole import WholeMicroBatch
from ds_lite.pipe.causal_lm import hull, layers, loss, weights
from ds_lite.sequence import data
from mutants import Mutant, Patch, killed_by

MUTANTS: list[Mutant] = []

FROM_MODEL = "tests/test_s09_9_from_model.py::test_a_pipeline_of_a_model_equals_one_process"
OVER_SEQUENCES = "tests/test_s09_9_from_model.py::test_a_pipeline_over_sequences_equals_one_process"
EXPERTS = "tests/test_s09_14_experts.py::test_experts_route_the_whole_micro_batch"


@killed_by(MUTANTS, f"{EXPERTS}[2-top1-2-1]", "differs|apart", section="9.14")
def a_part_has_a_capacity_of_its_own() -> Patch:
    """Each rank of a sequence routes its tokens as if they were the micro-batch."""
    return mock.patch.object(
        WholeMicroBatch,
        "around",
        classmethod(lambda cls, hidden_states: cls(hidden_states.shape[:-1].numel())),
    )


@killed_by(MUTANTS, f"{EXPERTS}[4-top1-2-2]", "differs|apart", section="9.14")
def noise_of_the_first_tokens() -> Patch:
    """Every rank takes the routing of the first tokens as that of its own."""
    places = WholeMicroBatch._places

    def first(self: WholeMicroBatch, device: torch.device | None = None) -> Tensor:
        return torch.arange(len(places(self, device)), device=device)

    return mock.patch.object(WholeMicroBatch, "_places", first)


@killed_by(MUTANTS, f"{FROM_MODEL}[mixtral-4-2-1-0-2]", "loss of step 0: differs|differs", section="9.9")
def padding_counts_for_the_router() -> Patch:
    """Tokens that are padding count in the load-balancing loss."""
    sums = layers.sums_of_block
    return mock.patch.object(layers, "sums_of_block", lambda logits, router, mask: sums(logits, router, None))


@killed_by(MUTANTS, f"{FROM_MODEL}[mixtral-4-2-1-0-2]", "differs", section="9.9")
def the_router_s_loss_is_that_of_one_layer() -> Patch:
    """The sums are taken for those of one layer."""
    whole = loss.balancing_loss
    return mock.patch.object(loss, "balancing_loss", lambda sums, tokens, gates: whole(sums, tokens, 1))


@killed_by(MUTANTS, f"{OVER_SEQUENCES}[mixtral-4-2-1-0-2-2]", "gate.weight: differs|differs", section="9.9")
def the_router_s_gradient_counts_a_part_once() -> Patch:
    """The backward of a sum over the ranks of a sequence hands on what one of them has."""

    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None

    return mock.patch.object(data._Sum, "backward", staticmethod(backward))


@killed_by(MUTANTS, f"{OVER_SEQUENCES}[llama-4-2-1-0-0-2]", "differs", section="9.9")
def each_rank_counts_positions_from_zero() -> Patch:
    """Rotary tables are made for the first tokens on every rank."""
    at_work = hull.Hull.at_work

    @contextmanager
    def from_zero(self: hull.Hull, context: Any) -> Iterator[Any]:
        with at_work(self, context) as mine:
            start = {name: x - x[:, :1] if name == "position_ids" else x for name, x in mine.items()}
            yield start

    return mock.patch.object(hull.Hull, "at_work", from_zero)


@killed_by(MUTANTS, f"{FROM_MODEL}[gpt2-4-2-1-1-0]", "differs", section="9.9")
def the_mask_stays_on_the_first_stage() -> Patch:
    """Later blocks attend to padding."""
    around = hull.Hull.around
    return mock.patch.object(
        hull.Hull, "around", lambda self, hidden, context, block: around(self, hidden, {}, block)
    )


@killed_by(MUTANTS, f"{FROM_MODEL}[llama tied-4-2-2-0-0]", "differs|size|meta", section="9.9")
def a_tie_is_taken_apart() -> Patch:
    """The head of the last stage gets a weight of its own."""
    keep_only = weights.keep_only

    def apart(model: Any, stage: Any, names: Any, source: Any) -> None:
        keep_only(model, stage, names, source)
        head = model.get_output_embeddings()
        if not head.weight.is_meta:
            head.weight = torch.nn.Parameter(head.weight.detach().clone())

    return mock.patch("ds_lite.pipe.module.keep_only", apart)


@killed_by(MUTANTS, f"{FROM_MODEL}[mixtral-4-1-2-1-2]", "differs", section="9.4")
def weights_of_the_choice_are_not_summed() -> Patch:
    """Ranks that hold columns of an expert each keep their part of the gradient of the router's weights."""
    enter = spread.enter

    def rows_alone(x: Tensor, group: Any) -> Tensor:
        return x if x.shape[-1] == 2 else enter(x, group)

    return mock.patch.object(spread, "enter", rows_alone)
