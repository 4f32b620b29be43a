"""§9.14 Faults of attention in chunks: merging, masks, skipping, the sum in backward, slots, the layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from ds_lite.sequence import chunked, host_store, pair, ulysses_chunks
from ds_lite.sequence.chunked import Rule
from ds_lite.sequence.exchange import Layout
from ds_lite.sequence.fpdt_layer import FPDT_Attention, FPDT_InputConstruct
from ds_lite.sequence.pair import Sight, attend
from ds_lite.sequence.ulysses_chunks import Setup
from mutants import Mutant, Patch, around, killed_by

MUTANTS: list[Mutant] = []

EQUAL = "tests/test_s09_14_fpdt.py::test_the_layer_equals_one_process"
SP2, SHARED = f"{EQUAL}[sp2]", f"{EQUAL}[sp4-shared]"
REFUSED = "tests/test_s09_14_fpdt.py::test_what_the_layer_cannot_do_is_refused_on_every_rank"
OUTPUT, GRADIENT = "output: differs", "gradient of the hidden states: differs"


@killed_by(MUTANTS, SP2, OUTPUT, section="9.14")
def parts_added_without_weights() -> Patch:
    """A further chunk counts half, whatever share of the whole sum it has: its log-sum-exp is not asked."""

    def merge(right: Any, out: Any, lse: Any, part: Any, part_lse: Any) -> Any:
        return right(out, lse, part, torch.where(lse.isinf(), part_lse, lse))

    return around(chunked, "merge", merge)


@killed_by(MUTANTS, SP2, GRADIENT, section="9.14")
def probabilities_of_one_chunk() -> Patch:
    """Backward divides by the sum over the pair's own keys, not by that over all keys."""

    def backward(right: Any, grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any) -> Any:
        return right(grad, q, k, v, out, attend(q, k, v, *rest)[1], *rest)

    return around(chunked, "attend_backward", backward)


@killed_by(MUTANTS, SP2, OUTPUT, section="9.14")
def diagonal_unmasked() -> Patch:
    """Within its own chunk a query sees the tokens after it."""
    return around(Rule, "sight", lambda right, *args: Sight())


@killed_by(MUTANTS, SP2, OUTPUT, section="9.14")
def one_chunk_too_many_skipped() -> Patch:
    """The chunk just before a query's own is left out as if it were in the future."""

    def reaches(right: Any, rule: Rule, queries: Any, keys: Any) -> bool:
        return bool(right(rule, queries, keys)) and keys[1] != queries[0]

    return around(Rule, "reaches", reaches)


@killed_by(MUTANTS, SP2, OUTPUT, section="9.14")
def fetched_into_the_slot_in_use() -> Patch:
    """The next chunk is fetched over the one in work."""
    return mock.patch.object(host_store, "SLOTS", 1)


@killed_by(MUTANTS, SP2, OUTPUT, section="9.14")
def ranks_hold_runs_of_the_sequence() -> Patch:
    """Each rank gets a run of neighbouring tokens, and chunk i of all ranks is no chunk of the sequence."""

    def positions(right: Any, inputs: FPDT_InputConstruct, sp_rank: int) -> Any:
        whole = torch.arange(inputs.tokens.shape[1])
        return whole.chunk(inputs.sp_size)[sp_rank]

    return around(FPDT_InputConstruct, "positions", positions)


@killed_by(MUTANTS, SHARED, OUTPUT, section="9.14")
def every_chunk_at_the_first_positions() -> Patch:
    """Rotary positions start again with each chunk."""

    def turned(right: Any, setup: Setup, *args: Any, **options: Any) -> Any:
        return right(
            replace(setup, places=[(0, stop - start) for start, stop in setup.places]), *args, **options
        )

    return around(Setup, "turned", turned)


@killed_by(MUTANTS, SP2, GRADIENT, section="9.14")
def gradients_of_keys_sent_home_early() -> Patch:
    """A chunk's keys and values take the gradient of their own queries home, and none of later ones."""

    def backward(
        right: Any, grad: Any, held: Any, place: Any, keys: Any, places: Any, rule: Any, grads: Any
    ) -> Any:
        thrown = [(torch.zeros_like(dk), torch.zeros_like(dv)) for dk, dv in grads[:-1]]
        return right(grad, held, place, keys, places, rule, [*thrown, grads[-1]])

    return around(ulysses_chunks, "attend_chunk_backward", backward)


@killed_by(MUTANTS, SP2, GRADIENT, section="9.14")
def one_query_head_speaks_for_its_group() -> Patch:
    """A key head gets the gradient of one of the query heads that share it, not of all."""
    return around(pair, "_per_group", lambda right, x, groups: x[:, :: x.shape[1] // groups])


@killed_by(MUTANTS, SHARED, GRADIENT, section="9.14")
def one_rank_speaks_for_a_shared_head() -> Patch:
    """Where two ranks compute with the same key head, its gradient is that of the last one."""
    return mock.patch.object(Layout, "is_shared", False)


@killed_by(
    MUTANTS,
    f"{REFUSED}[tokens-local_tokens differs between ranks]",
    "0 of 2 ranks raised",
    section="9.14",
    deadline=4,
)
def agreed_by_those_who_changed() -> Patch:
    """Only a rank whose own shapes are new asks the others, who do not answer."""
    agreed = {}

    def agree(right: Any, layer: FPDT_Attention, hidden: Any, *extras: Any) -> None:
        if agreed.get(id(layer)) != hidden.shape:
            right(layer, hidden, *extras)
        agreed[id(layer)] = hidden.shape

    return around(FPDT_Attention, "_agree", agree)
