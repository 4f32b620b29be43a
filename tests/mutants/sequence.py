"""§9.5 §9.14 Faults of sequence parallelism: exchange, labels, positions, masks, losses, routes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from ds_lite import toy_layers
from ds_lite.sequence import auto_sp, batches, blocks, data, exchange, layer, routes, whole
from ds_lite.sequence.auto_sp import SequenceParallel
from ds_lite.sequence.context import Context
from ds_lite.sequence.data import UlyssesSPDataLoaderAdapter
from mutants import Mutant, Patch, around, killed_by

MUTANTS: list[Mutant] = []

EQUAL = "tests/test_s09_14_equality.py::test_spread_sequences_equal_one_process"
LLAMA, BERT, MISTRAL, PACKED, VIT, TOY = (
    f"{EQUAL}[{name}]"
    for name in (
        "llama-sp2-dp2-zero0",
        "bert-sp2-dp2-zero2",
        "mistral-sp3-dp1-zero0",
        "llama_packed-sp4-dp1-zero2",
        "vit-sp2-dp2-zero1",
        "toy-sp2-dp2-zero2",
    )
)
LAYER, DATA, AUTO = (f"tests/test_s09_14_{name}.py" for name in ("layer", "data", "auto_sp"))
B15 = f"{LAYER}::test_b15_the_numbers_of_the_report"
B09 = f"{DATA}::test_b09_a_gradient_is_two_and_a_half_on_every_rank"
FEW = "for a few tokens, spread over the ranks, are not those of one process"

# ------------------------------------------------------------------------------------------- the exchange


@killed_by(MUTANTS, B15, "assert .* == |differs", section="9.14")
def heads_in_the_place_of_their_senders_neighbour() -> Patch:
    """Heads of another rank land one place off: the shapes are right."""

    def rolled(right: Any, tensors: Any, layouts: Any, group: Any) -> list[Tensor]:
        return [x.roll(1, how.head_dim) for x, how in zip(right(tensors, layouts, group), layouts)]

    return around(layer, "to_heads", rolled)


@killed_by(
    MUTANTS, f"{LAYER}::test_each_direction_is_the_gradient_of_the_other[2]", "differs", section="9.14"
)
def gradient_in_the_order_of_the_forward() -> Patch:
    """The backward of an exchange keeps the tokens as they came instead of bringing them home."""

    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        home = exchange._ToSequence.apply(ctx.group, ctx.layouts, *gradients)
        return None, None, *(x.flip(how.seq_dim) for x, how in zip(home, ctx.layouts))

    return mock.patch.object(exchange._ToHeads, "backward", staticmethod(backward))


@killed_by(MUTANTS, PACKED, "gradient of .*differs", section="9.14")
def shared_heads_not_summed() -> Patch:
    """Of a key head that ranks share, each rank's gradient overwrites the one before."""
    return around(
        exchange,
        "_swap",
        lambda right, leaving, places, adds, group: right(leaving, places, [False] * len(adds), group),
    )


# --------------------------------------------------------------------------------- labels, positions, masks


@killed_by(MUTANTS, LLAMA, "loss of micro-batch 0: differs", section="9.14")
def labels_shifted_after_the_cut() -> Patch:
    """The last token of each rank has no label; the first label of the next rank is nobody's."""

    def late(right: Any, *args: Any, **options: Any) -> dict[str, Any]:
        shard: dict[str, Any] = right(*args, **{**options, "shift": False})
        if "shift_labels" in shard:
            shard["shift_labels"] = data.shift_labels(shard["shift_labels"])
        return shard

    return around(batches, "shard_batch", late)


@killed_by(MUTANTS, BERT, "loss of micro-batch 0: differs", section="9.14")
def labels_of_the_tokens_themselves_shifted() -> Patch:
    """A model that fills in blanks is trained on the next token."""
    return around(batches, "shard_batch", lambda right, *args, **o: right(*args, **{**o, "shift": True}))


@killed_by(MUTANTS, LLAMA, FEW, section="9.14")
def positions_of_each_rank_from_0() -> Patch:
    """Every rank numbers its own tokens."""

    def local(right: Any, batch: Any, *, sp_rank: int, sp_size: int, **options: Any) -> dict[str, Any]:
        shard: dict[str, Any] = right(batch, sp_rank=sp_rank, sp_size=sp_size, **options)
        places = shard["position_ids"]
        return {**shard, "position_ids": places - places[:, :1]}

    return around(batches, "shard_batch", local)


@killed_by(MUTANTS, TOY, FEW, section="9.14")
def a_layer_that_counts_from_0() -> Patch:
    """Learned positions begin again on each rank."""
    return mock.patch.object(toy_layers, "first_token", lambda: 0)


@killed_by(MUTANTS, BERT, FEW, section="9.14")
def padding_is_forgotten() -> Patch:
    """Tokens that are padding are attended to."""

    def forgets(right: Any, self: Context, part: Any, padding: Any = None, positions: Any = None) -> None:
        right(self, part, None, positions)

    return around(Context, "set_micro_batch", forgets)


@killed_by(MUTANTS, PACKED, FEW, section="9.14")
def documents_run_into_each_other() -> Patch:
    """Tokens see the document before theirs in a packed sequence."""

    def forgets(right: Any, self: Context, part: Any, padding: Any = None, positions: Any = None) -> None:
        right(self, part, padding, None)

    return around(Context, "set_micro_batch", forgets)


@killed_by(MUTANTS, VIT, f"{FEW}|differs", section="9.14")
def attention_within_each_rank() -> Patch:
    """Nothing is exchanged; each rank's tokens see each other only."""

    def alone(
        right: Any, local: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **named: Any
    ) -> Any:
        return local(query, key, value)

    return around(routes, "exchanged", alone)


# -------------------------------------------------------------------------------------- losses and gradients


@killed_by(MUTANTS, LLAMA, "loss of micro-batch 0: differs", section="9.14")
def mean_of_means() -> Patch:
    """Each rank's mean counts the same, however many tokens it is of."""

    def of_means(right: Any, logits: Tensor, labels: Tensor, group: Any, **options: Any) -> Tensor:
        own = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
        return data.token_weighted(own, torch.tensor(1), group)

    return around(auto_sp, "sequence_loss", of_means)


@killed_by(MUTANTS, f"{DATA}::test_b08_every_token_weighs_the_same[nothing]", "differs|nan", section="9.14")
def mean_of_means_without_a_token() -> Patch:
    """The report's second case: a rank without a valid token makes the loss nan."""

    def of_means(right: Any, total: Tensor, valid: Tensor, group: Any, **options: Any) -> Tensor:
        return right(total / valid, torch.ones_like(valid), group)

    return around(data, "token_weighted", of_means)


def _scaled(factor: Any) -> Patch:
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * factor(2), None

    return mock.patch.object(data._Mean, "backward", staticmethod(backward))


@killed_by(
    MUTANTS,
    f"{DATA}::test_b09_a_gradient_is_two_and_a_half_on_every_rank[2-2-shared]",
    r"differs",
    section="9.14",
)
def divided_twice() -> Patch:
    """The loss is divided by sp, and the gradients again."""
    return _scaled(lambda sp: 1 / sp)


@killed_by(
    MUTANTS,
    f"{DATA}::test_b09_a_gradient_is_two_and_a_half_on_every_rank[4-2-shared]",
    r"differs",
    section="9.14",
)
def summed_over_the_ranks() -> Patch:
    """The backward of the shared loss sums, where the engine takes a mean of what was sp times already."""
    return _scaled(lambda sp: sp)


@killed_by(MUTANTS, TOY, "gradient of .*differs", section="9.14")
def own_gradient_of_what_was_gathered() -> Patch:
    """Where tokens are gathered, each rank keeps its own gradient: 1/sp of the sum is left."""

    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return ctx.part.of(gradients[0], ctx.dim).contiguous(), None, None, None

    return mock.patch.object(whole._Gather, "backward", staticmethod(backward))


@killed_by(MUTANTS, LLAMA, "gradient of .*differs|norm", section="9.14")
def sequence_ranks_left_out_of_the_reduction() -> Patch:
    """Gradients are averaged over the replicas, and each sequence rank keeps its own."""
    from ds_lite.gradients import Routes

    def of(right: Any, self: Routes, tags: Any) -> Any:
        return replace(right(self, tags), data=self._grid.group("data"))

    return around(Routes, "of", of)


# --------------------------------------------------------------------------------------- routes and refusals


@killed_by(
    MUTANTS,
    f"{AUTO}::test_recomputed_blocks_exchange_again",
    "gradient|CheckpointError|differs|assert",
    section="9.14",
)
def forward_only() -> Patch:
    """The route is closed before backward, where recomputed attentions run."""

    @contextmanager
    def backward(self: SequenceParallel) -> Iterator[None]:
        yield

    return mock.patch.multiple(
        SequenceParallel, backward=backward, _resumed_in_backward=lambda self, outputs, batch: outputs
    )


@killed_by(
    MUTANTS,
    f"{AUTO}::test_torchs_attention_is_back_after_forward_backward_and_exceptions",
    "after forward|assert",
    section="9.14",
)
def torchs_attention_stays_replaced() -> Patch:
    """What other models of the process call exchanges too."""

    @contextmanager
    def forever(right: Any, context: Context) -> Iterator[None]:
        opened = right(context)
        opened.__enter__()
        replaced = F.scaled_dot_product_attention
        yield
        opened.__exit__(None, None, None)
        F.scaled_dot_product_attention = replaced

    return _until_the_end(around(auto_sp, "rerouted_sdpa", forever))


@contextmanager
def _until_the_end(patch: Patch) -> Iterator[None]:
    """The process is used again: what the fault leaves behind ends with it."""
    original = F.scaled_dot_product_attention
    try:
        with patch:
            yield
    finally:
        F.scaled_dot_product_attention = original


REFUSED = f"{AUTO}::test_models_that_cannot_be_spread_are_refused_on_every_rank"


@killed_by(MUTANTS, f"{REFUSED}[one of two by hand]", "DID NOT RAISE", section="9.14")
def nothing_is_tried_first() -> Patch:
    """A model that mixes tokens out of reach trains on wrong numbers."""
    return around(auto_sp, "fault_of", lambda right, *args, **how: (None, right(*args, **how)[1]))


@killed_by(MUTANTS, f"{REFUSED}[no attention]", "DID NOT RAISE", section="9.14")
def no_attention_is_no_error() -> Patch:
    """A model in which nothing was reached runs on, as if its tokens had seen each other."""
    return mock.patch.object(SequenceParallel, "_check_hits", lambda self, is_backward: None)


@killed_by(
    MUTANTS,
    f"{AUTO}::test_batches_that_cannot_be_cut_are_refused_on_every_rank[other data]",
    "DID NOT RAISE|Regex",
    section="9.14",
)
def ranks_with_other_batches() -> Patch:
    """Each rank takes its tokens of another sequence."""
    return mock.patch.object(auto_sp, "different_data", lambda *args, **named: None)


@killed_by(MUTANTS, f"{DATA}::test_a10_each_sample_comes_once_an_epoch[none-2]", "assert", section="9.14")
def every_batch_once_a_rank() -> Patch:
    """The loader gives what all ranks drew as often as there are ranks."""

    def init(right: Any, self: UlyssesSPDataLoaderAdapter, *args: Any) -> None:
        right(self, *args)
        self._differ = True

    return around(UlyssesSPDataLoaderAdapter, "__init__", init)


@killed_by(MUTANTS, f"{EQUAL}[bert_classifier-sp4-dp1-zero0]", "differs|few tokens", section="9.14")
def not_whole_again_after_the_blocks() -> Patch:
    """The pooler of each rank looks at that rank's first token."""
    return mock.patch.object(blocks, "gather_tokens", lambda x, part, group: x)


HARD = "tests/test_s09_14_hard_models.py"


@killed_by(
    MUTANTS,
    f"{HARD}::test_models_of_transformers_with_ways_of_their_own[roberta]",
    "DID NOT RAISE",
    section="9.14",
)
def one_process_gets_our_positions() -> Patch:
    """Few tokens are compared with a run that was given the same wrong positions."""
    return mock.patch.object(auto_sp, "own_defaults", lambda model, inputs, given: dict(inputs))


@killed_by(
    MUTANTS,
    f"{HARD}::test_backwards_in_another_order_than_forwards[stale]",
    "assert|metadata|differs|size|shape|tokens",
    section="9.14",
    deadline=8.0,
)
def backward_of_the_last_forward() -> Patch:
    """A recomputation works on the tokens of whichever forward came last."""

    def never(self: SequenceParallel, outputs: Any, batch: Any) -> Any:
        self.context.set_micro_batch(batch.part, batch.padding, batch.positions)
        return outputs

    return mock.patch.object(SequenceParallel, "_resumed_in_backward", never)


@killed_by(
    MUTANTS,
    f"{HARD}::test_a_rank_may_lack_a_gradient[2]",
    "deadline|did not finish|differs|size",
    section="9.14",
    deadline=8.0,
)
def scatters_beside_the_exchange_of_tokens() -> Patch:
    """Buckets are scattered in the middle of backward, between exchanges that other ranks make first."""
    from ds_lite.gradients import _Eager

    def init(right: Any, self: Any, buckets: Any, waits_in_backward: bool) -> None:
        right(self, buckets, False)

    return around(_Eager, "__init__", init)


@killed_by(MUTANTS, f"{HARD}::test_the_module_is_whole_outside_the_engine[vit]", "differs", section="9.14")
def blocks_cut_outside_the_engine() -> Patch:
    """Hooks of later blocks go on cutting when the module is called by itself."""

    def running(right: Any, self: SequenceParallel, **direction: Any) -> Any:
        @contextmanager
        def left_open() -> Iterator[None]:
            with right(self, **direction):
                yield
            if self._blocks is not None:
                self.context.part, self.context.is_open = self._blocks.part, True

        return left_open()

    return around(SequenceParallel, "_running", running)
