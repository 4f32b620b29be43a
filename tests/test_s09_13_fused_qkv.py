"""§9.13 Fused weights: cut by heads and put back, in every packing; widths as recorded.

Guards against: a fused weight cut as one block, the wrong packing, a cut inside a head, rows lost on the way
back.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_lite.module_inject import replace_policies
from ds_lite.module_inject.fusedqkv_utils import prepare_tp_fused_qkvw, require_tp_fused_qkvw
from ds_lite.module_inject.replace_module import ReplaceWithTensorSlicing
from ds_lite.module_inject.tp_shard import AutoTPMeta, get_shard_size, get_shard_size_list
from tolerance import EXACT, assert_close, differs
from torch import Tensor, nn

from ds_lite.dealing import deal_by_grain, repeated
from ds_lite.tensor_parallel.fused_qkv import FusedLayout, Heads, attention_layout, put_back, strided_copy

GOLDEN = Path(__file__).parent / "golden"
FUSED = json.loads((GOLDEN / "fused_qkv.json").read_text())["cases"]
WIDTHS = json.loads((GOLDEN / "shard_sizes.json").read_text())["cases"]


def block_of_class(name: str, **attributes: Any) -> nn.Module:
    block = type(name, (nn.Module,), {})()
    vars(block).update(attributes)
    return block


@pytest.mark.parametrize("case", FUSED, ids=lambda case: f"{case['block']}-{case['tp']}")
def test_rows_of_each_rank_are_those_of_deepspeed(case: dict[str, Any]) -> None:
    numbered = torch.arange(case["rows"]).unsqueeze(1).expand(-1, case["hidden"])
    meta = AutoTPMeta(case["num_kv_heads"], case["num_attention_heads"], case["hidden"])
    block = block_of_class(case["block"])
    for rank, rows in enumerate(case["row_index_per_rank"]):
        part = prepare_tp_fused_qkvw(block, numbered, case["tp"], rank, meta)
        assert part is not None and part[:, 0].tolist() == rows
        bias = prepare_tp_fused_qkvw(block, numbered[:, 0], case["tp"], rank, meta)
        assert bias is not None and bias.tolist() == rows
    contiguous = list(range(case["rows"] // case["tp"]))
    if not case["layout"].startswith("bloom"):
        assert case["row_index_per_rank"][0] != contiguous, "control: one block would be the fault"


@pytest.mark.parametrize("case", WIDTHS, ids=lambda case: f"{case['total']}-{case['tp']}")
def test_widths_are_those_of_deepspeed(case: dict[str, Any]) -> None:
    meta = AutoTPMeta(case["num_kv_heads"], tp_grain_size=case["tp_grain_size"])
    sizes = get_shard_size_list(case["total"], case["tp"], meta, case["layer_name"])
    assert sizes == case["sizes"]
    ranks = range(case["tp"])
    assert [
        get_shard_size(case["total"], case["tp"], meta, case["layer_name"], rank) for rank in ranks
    ] == sizes


@pytest.mark.parametrize(
    "total, tp, kv, grain, sizes",
    [
        (768, 2, 3, 1, [512, 256]),
        (512, 4, 2, 1, [256, 256, 0, 0]),
        (11008, 3, None, 64, [3712, 3648, 3648]),
        (30, 4, None, 8, [8, 8, 8, 6]),
    ],
)
def test_widths_of_the_semantics(total: int, tp: int, kv: int | None, grain: int, sizes: list[int]) -> None:
    assert get_shard_size_list(total, tp, AutoTPMeta(kv, tp_grain_size=grain)) == sizes


LAYOUTS = {
    "q|k|v": FusedLayout(),
    "per group": FusedLayout(blocks=None),
    "codegen": FusedLayout(4, ("q", "v", "k")),
    "k|v": FusedLayout(parts=("k", "v")),
}
HEADS = [Heads(8, 8, 3), Heads(16, 16, 2), Heads(6, 3, 2), Heads(8, 2, 3), Heads(4, 1, 5)]


def by_hand(layout: FusedLayout, heads: Heads) -> list[tuple[str, int, int]]:
    """What each row of the whole weight is, (part, head, column), in loops of its own."""
    blocks = heads.kv if layout.blocks is None else layout.blocks
    rows = []
    for block in range(blocks):
        for part in layout.parts:
            count = (heads.query if part == "q" else heads.kv) // blocks
            for head in range(block * count, (block + 1) * count):
                rows += [(part, head, column) for column in range(heads.width)]
    return rows


def cases() -> list[Any]:
    found = []
    for name, layout in LAYOUTS.items():
        for heads in HEADS:
            for ranks in (1, 2, 4, 8):
                has_room = ranks <= heads.query and (ranks <= heads.kv or ranks % heads.kv == 0)
                fills = layout.blocks != 4 or (heads.kv == heads.query and heads.query % (4 * ranks) == 0)
                if has_room and fills:
                    found.append(
                        pytest.param(layout, heads, ranks, id=f"{name}-{heads.query}-{heads.kv}-{ranks}")
                    )
    return found


def test_two_layouts_written_out() -> None:
    assert FusedLayout().rows(Heads(4, 2, 2), 2) == (
        ((0, 4), (8, 10), (12, 14)),
        ((4, 8), (10, 12), (14, 16)),
    )
    assert FusedLayout(blocks=None).rows(Heads(4, 2, 2), 2) == (((0, 8),), ((8, 16),))


@pytest.mark.parametrize("layout, heads, ranks", cases())
def test_each_rank_has_its_heads_and_nothing_is_lost(layout: FusedLayout, heads: Heads, ranks: int) -> None:
    names = by_hand(layout, heads)
    for dim, fused in (
        (0, torch.randn(len(names), 7)),
        (1, torch.randn(7, len(names))),
        (0, torch.randn(len(names))),
    ):
        ranges = layout.rows(heads, ranks)
        parts = [strided_copy(fused, rows, dim) for rows in ranges]
        assert_close(put_back(parts, ranges, dim), fused, EXACT)
        assert all(part.untyped_storage().data_ptr() != fused.untyped_storage().data_ptr() for part in parts)
    dealt = heads.deal(ranks)
    for rank, rows in enumerate(ranges):
        (first, last), (first_kv, last_kv) = dealt.query[rank], dealt.kv[rank]
        mine = Heads(last - first, last_kv - first_kv, heads.width)
        wanted = [
            (part, head + (first if part == "q" else first_kv), column)
            for part, head, column in by_hand(layout, mine)
        ]
        assert [names[row] for start, stop in rows for row in range(start, stop)] == wanted


# ------------------------------------------------------------------------------------------------ B16


def attention(qkv: Tensor, heads: int, split: Any) -> Tensor:
    """Softmax attention of (T, rows) without the projections; `split` finds q, k and v."""
    query, key, value = (x.reshape(len(qkv), heads, -1).transpose(0, 1) for x in split(qkv))
    return ((query @ key.transpose(1, 2)).softmax(dim=-1) @ value).transpose(0, 1).flatten(1)


def test_b16_gpt2_and_bloom_keep_the_columns_of_the_report() -> None:
    heads = Heads(4, 4, 2)
    gpt2 = attention_layout([block_of_class("GPT2Attention")])
    assert gpt2 is not None and gpt2.rows(heads, 2) == (
        ((0, 4), (8, 12), (16, 20)),
        ((4, 8), (12, 16), (20, 24)),
    )
    bloom = attention_layout([block_of_class("BloomAttention")])
    assert bloom is not None and bloom.rows(heads, 2)[0] == ((0, 12),)


def test_b16_the_wrong_cut_changes_the_attention() -> None:
    """x (5, 8) through a GPT-2 weight: the two ranks' heads side by side are the whole attention's."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(8, 24, generator=generator, dtype=torch.float64)
    whole = attention(x @ weight, 4, lambda qkv: qkv.chunk(3, dim=1))
    right = FusedLayout().rows(Heads(4, 4, 2), 2)
    wrong = (((0, 12),), ((12, 24),))
    for ranges, is_right in ((right, True), (wrong, False)):
        parts = [x @ strided_copy(weight, rows, 1) for rows in ranges]
        halves = [attention(part, 2, lambda qkv: qkv.chunk(3, dim=1)) for part in parts]
        assert differs(torch.cat(halves, dim=1), whole) != is_right


def test_b16_an_unknown_class_is_named_and_not_guessed() -> None:
    for unknown in (block_of_class("HomemadeBlock"), block_of_class("LlamaDecoderLayer")):
        with pytest.raises(ValueError, match=rf"{type(unknown).__name__} is unknown; declare it.*\(§9.13\)"):
            prepare_tp_fused_qkvw(unknown, torch.zeros(24, 8), 2, 0, AutoTPMeta(4, 4, 8))


def test_falcon_and_bigcode_pack_as_their_settings_say() -> None:
    def layout(name: str, **settings: bool) -> FusedLayout | None:
        return attention_layout([block_of_class(name, **settings)])

    one, per_group = FusedLayout(), FusedLayout(blocks=None)
    assert layout("FalconAttention", multi_query=True, new_decoder_architecture=False) == one
    assert layout("FalconAttention", multi_query=True, new_decoder_architecture=True) == per_group
    assert layout("FalconAttention", multi_query=False, new_decoder_architecture=False) == per_group
    assert layout("GPTBigCodeAttention", multi_query=False) == per_group
    assert layout("GPTBigCodeAttention", multi_query=True) == one
    assert "GPT2Attention" in replace_policies["attention"] and "Phi3MLP" in replace_policies["mlp"]
    assert layout("Phi3SmallAttention") is None, "another class of a like name may pack in another way"


# -------------------------------------------------------------------------------------- DeepSpeed's class


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_strided_copy_of_deepspeeds_class_cuts_each_third(ranks: int) -> None:
    weight, bias = torch.arange(5 * 24.0).view(5, 24), torch.arange(24.0)
    for rank in range(ranks):
        slicing = ReplaceWithTensorSlicing(mp_size=ranks)
        slicing.gpu_index = rank
        mine = torch.cat([third.chunk(ranks, dim=-1)[rank] for third in weight.chunk(3, dim=-1)], dim=-1)
        got = slicing.strided_copy(torch.empty_like(mine), weight, 3)
        assert got is not None and torch.equal(got, mine)
        got = slicing.strided_copy(torch.empty(24 // ranks), bias, 3, allocate_tensor=True)
        assert got is not None and torch.equal(got, mine[0])
        got = slicing.strided_copy(torch.empty(24 // ranks, 5), weight.T.contiguous(), 3, int8=True)
        assert got is not None and torch.equal(got, mine.T)
    assert slicing.strided_copy(torch.empty(1), None, 3) is None


def test_grains_and_blocks_side_by_side() -> None:
    assert deal_by_grain(11008, 3, 64) == (((0, 3712),), ((3712, 7360),), ((7360, 11008),))
    assert deal_by_grain(50, 4, 64)[0] == ((0, 13),)
    assert deal_by_grain(10, 2, 4) == (((0, 4),), ((4, 10),))
    assert repeated(deal_by_grain(4, 2), 4, 2) == (((0, 2), (4, 6)), ((2, 4), (6, 8)))


def test_bad_input_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"6 heads do not fill 4 blocks.*\(§9.13\)"):
        FusedLayout(4).rows(Heads(6, 6, 2), 2)
    with pytest.raises(ValueError, match=r"25 columns.*num_splits=3 equal parts"):
        ReplaceWithTensorSlicing().strided_copy(torch.empty(2, 25), torch.empty(2, 25), 3)
    with pytest.raises(ValueError, match=r"dst has shape \(2, 3\)"):
        ReplaceWithTensorSlicing(mp_size=2).strided_copy(torch.empty(2, 3), torch.empty(2, 24), 3)
    with pytest.raises(ValueError, match="num_attention_heads=None"):
        prepare_tp_fused_qkvw(block_of_class("BloomBlock"), torch.zeros(24, 8), 2, 0)
    with pytest.raises(ValueError, match="25 rows does not hold 4 query heads"):
        prepare_tp_fused_qkvw(block_of_class("BloomBlock"), torch.zeros(25, 8), 2, 0, AutoTPMeta(4, 4, 8))
    assert require_tp_fused_qkvw("h.0.attn.c_attn", 2) and not require_tp_fused_qkvw("h.0.attn.c_attn", 1)
    assert not require_tp_fused_qkvw("h.0.attn.c_proj", 2)
