"""§9.14 FPDT_Attention: chunk by chunk through the Ulysses exchange, on several ranks.

Guards against: chunks in an order that is not the sequence's, positions that start again with each chunk,
gradients that some ranks keep, a rank that waits for what nobody sends.
Truth is torch's attention on the whole sequence, in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from shard_checks import NEIGHBOURS, STRIDES, my_group, pattern
from tolerance import LAW, assert_close, differs
from torch import Tensor
from torch.nn import functional as F
from world import World

from ds_lite import comm
from ds_lite.comm import ProcessGroup
from ds_lite.sequence.fpdt_layer import FPDT_Attention, FPDT_InputConstruct

pytestmark = pytest.mark.xdist_group("fpdt")

F64, BATCH = torch.float64, 3


@dataclass(frozen=True)
class Case:
    """Sizes of one layer and its sequence; two ranks are tried as neighbours and as strides of four."""

    ranks: int
    tokens: int
    chunk_size: int
    heads: int = 4
    kv_heads: int = 2
    has_rotary: bool = True
    has_bias: bool = True
    return_bias: bool = True
    enable_offloading: bool = True

    @property
    def config(self) -> SimpleNamespace:
        return SimpleNamespace(
            hidden_size=10,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            kv_channels=6,
            attention_dropout=0.0,
        )


CASES = {
    "sp2": Case(2, 22, 8),  # chunks of 8, 8 and 6
    "sp2-uneven": Case(2, 24, 6, heads=3, kv_heads=3, return_bias=False, enable_offloading=False),
    "sp2-one-chunk": Case(2, 14, 100, has_bias=False, has_rotary=False),
    "sp3": Case(3, 21, 9, heads=6, kv_heads=3, enable_offloading=False),
    "sp4-shared": Case(4, 28, 8, heads=6, kv_heads=2),  # two ranks share a key head
}


def _parameters(case: Case) -> dict[str, Tensor | None]:
    rows, columns = (case.heads + 2 * case.kv_heads) * 6, case.heads * 6
    shapes = {"w1": (rows, 10), "b1": (rows,), "w2": (10, columns), "b2": (10,)}
    made = {n: (0.3 * pattern(*s, seed=i)).requires_grad_() for i, (n, s) in enumerate(shapes.items())}
    return {n: p if case.has_bias or n[0] == "w" else None for n, p in made.items()}


def _angles(tokens: int) -> Tensor:
    return torch.outer(torch.arange(tokens, dtype=F64), torch.tensor([1.0, 0.1], dtype=F64))


def _rotary(tokens: int) -> tuple[Tensor, Tensor]:
    """Of the first 4 of 6 columns."""
    angles = _angles(tokens).repeat(1, 2)
    return angles.cos()[:, None, None], angles.sin()[:, None, None]


def _turned(x: Tensor) -> Tensor:
    """(B, N, T, D) with rotary positions, written with complex numbers."""
    angles = _angles(x.shape[2])
    pairs = torch.complex(x[..., :2], x[..., 2:4]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag, x[..., 4:]), dim=-1)


def _one_process(case: Case, hidden: Tensor, p: dict[str, Tensor | None]) -> Tensor:
    """The layer as anybody would write it: (T, B, H) -> (T, B, H)."""
    widths = [heads * 6 for heads in (case.heads, case.kv_heads, case.kv_heads)]
    parts = F.linear(hidden, p["w1"], p["b1"]).split(widths, dim=-1)
    q, k, v = (x.unflatten(-1, (-1, 6)).permute(1, 2, 0, 3) for x in parts)
    if case.has_rotary:
        q, k = _turned(q), _turned(k)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return F.linear(mixed.permute(2, 0, 1, 3).flatten(2), p["w2"], p["b2"])


def _layer(case: Case, p: dict[str, Tensor | None], group: ProcessGroup | None) -> FPDT_Attention:
    return FPDT_Attention(
        case.config, p["w1"], p["b1"], p["w2"], p["b2"], group,
        return_bias=case.return_bias, chunk_size=case.chunk_size, enable_offloading=case.enable_offloading,
    )  # fmt: skip


def _own(case: Case, group: ProcessGroup | None) -> Tensor:
    """The positions of this rank's tokens."""
    sizes = SimpleNamespace(ds_sequence_parallel_fpdt_chunk_size=case.chunk_size)
    ranks, rank = (1, 0) if group is None else (comm.get_world_size(group), comm.get_rank(group))
    everyone = torch.arange(case.tokens).unsqueeze(0)
    return FPDT_InputConstruct(everyone, None, None, None, None, sizes, ranks, rank).generate()[0][0]


def _run(layer: FPDT_Attention, hidden: Tensor, case: Case) -> Tensor:
    rotary = _rotary(case.tokens) if case.has_rotary else None
    out, bias = layer(hidden, None, None, rotary)
    assert (bias is not None) == (case.return_bias and case.has_bias)
    return out if bias is None else out + bias


def _equals_one_process(case: Case, group: ProcessGroup | None) -> None:
    whole = pattern(case.tokens, BATCH, 10, seed=7).requires_grad_()
    upstream = pattern(case.tokens, BATCH, 10, seed=8)
    own = _own(case, group)
    mine, theirs = _parameters(case), _parameters(case)
    truth = _one_process(case, whole, theirs)
    truth.backward(upstream)
    layer = _layer(case, mine, group)
    hidden = whole.detach()[own].requires_grad_()
    out = _run(layer, hidden, case)
    assert_close(out, truth[own], LAW, "output")
    out.backward(upstream[own])
    assert_close(hidden.grad, whole.grad[own], LAW, "gradient of the hidden states")
    for name in [name for name, p in mine.items() if p is not None]:
        total = mine[name].grad.clone()
        if group is not None:
            assert differs(total, theirs[name].grad), "one rank has some tokens only"
            comm.all_reduce(total, group=group)
        assert_close(total, theirs[name].grad, LAW, f"gradient of {name}")
    if group is not None and case.chunk_size < case.tokens:
        x, y = (t.detach().chunk(case.ranks)[comm.get_rank(group)] for t in (whole, truth))
        assert differs(_run(layer, x, case), y), "the layout"
    _check_store(layer, case)


def _check_store(layer: FPDT_Attention, case: Case) -> None:
    if not case.enable_offloading:
        assert layer.store is None
    elif case.chunk_size < case.tokens:
        assert layer.store.puts and layer.store.gets
        assert layer.store.bytes_peak > 0 == layer.store.bytes_now
    else:
        assert not layer.store.puts, "one chunk is never idle"


def _on_ranks(rank: int, name: str) -> None:
    case = CASES[name]
    lists = [NEIGHBOURS, STRIDES] if case.ranks == 2 else [[list(range(case.ranks))]]
    for ranks in lists:
        _equals_one_process(case, my_group(ranks, "seq"))


@pytest.mark.parametrize("name", list(CASES))
def test_the_layer_equals_one_process(world: World, name: str) -> None:
    world(_on_ranks, 4 if CASES[name].ranks == 2 else CASES[name].ranks, name)


@pytest.mark.parametrize("name", list(CASES))
def test_a_layer_without_a_group_is_one_process(name: str) -> None:
    _equals_one_process(CASES[name], None)


def _traffic(rank: int) -> None:
    case, group = CASES["sp2"], my_group([[0, 1]], "seq")
    layer = _layer(case, _parameters(case), group)
    hidden = pattern(case.tokens // 2, BATCH, 10).requires_grad_()
    _run(layer, hidden, case)
    for wanted in ("forward", "backward"):
        with comm.record() as ledger:
            out = _run(layer, hidden, case)
        if wanted == "backward":
            with comm.record() as ledger:
                out.sum().backward()
        rows = {operation: traffic for (_, operation, _), traffic in ledger.rows.items()}
        counts = {operation: traffic.calls for operation, traffic in rows.items()}
        agreed = {"all_reduce": 1} if wanted == "forward" else {}
        assert counts == {"all_to_all": 2 * 3, **agreed}, f"{wanted}: {counts}"
        # Half of q, k, v and of the output stays at home, the rest leaves: 2(N + G) heads of 6 columns.
        assert rows["all_to_all"].payload == hidden.shape[0] * BATCH * (2 * 4 + 2 * 2) * 6 * 8 // 2


def test_each_chunk_costs_two_exchanges_forward_and_two_backward(world: World) -> None:
    world(_traffic, 2)


def _refused(rank: int, name: str) -> None:
    case, group = CASES["sp2"], my_group([[0, 1]], "seq")
    layer, hidden = _layer(case, _parameters(case), group), torch.zeros(6, BATCH, 10, dtype=F64)
    if name == "mask":
        layer(hidden, torch.ones(6, 6))
    elif name == "cache":
        layer(hidden, inference_params={})
    elif name == "rotary":
        layer(hidden, rotary_pos_emb=_rotary(6))
    elif name == "trained rotary":
        layer(hidden, rotary_pos_emb=[part.requires_grad_() for part in _rotary(12)])
    elif name == "tokens":
        layer(hidden)
        layer(hidden[: 6 - 2 * rank])
    elif name == "width on one rank":
        layer(hidden[..., : 10 - rank])
    elif name == "chunk":
        layer.chunk_size = 5
        layer(hidden)
    elif name == "chunk on one rank":
        layer.chunk_size = 4 + 2 * rank
        layer(hidden)


@pytest.mark.parametrize(
    "name, match",
    [
        ("mask", "attention_mask is given"),
        ("cache", "inference_params is given"),
        ("rotary", r"must be cos and sin of the whole sequence, \(12, 1, 1, R\)"),
        ("trained rotary", "rotary_pos_emb requires a gradient"),
        ("tokens", "local_tokens differs between ranks"),
        ("width on one rank", r"\(6, 3, 9\) must be \(T/sp, B, 10\)"),
        ("chunk", "chunk_size=5, .* not divisible by sequence_parallel_size=2; choose 6"),
        ("chunk on one rank", "chunk_size differs between ranks: . here, from 4 to 6"),
    ],
)
def test_what_the_layer_cannot_do_is_refused_on_every_rank(world: World, name: str, match: str) -> None:
    world.raises(ValueError, match, _refused, 2, name)


def test_settings_that_do_not_fit_are_refused_when_the_layer_is_built() -> None:
    case = CASES["sp2"]
    p = _parameters(case)
    given = (case.config, p["w1"], p["b1"], p["w2"], p["b2"], None)
    for options, match in [
        ({"gather_idx": 1}, "gather_idx=1"),
        ({"scatter_idx": 1}, "scatter_idx=1"),
        ({"chunk_size": 0}, "chunk_size=0"),
    ]:
        with pytest.raises(ValueError, match=match):
            FPDT_Attention(*given, **options)
    with pytest.raises(ValueError, match=r"give \(48, 10\) and \(H, 24\)"):
        FPDT_Attention(case.config, p["w1"].mT, *given[2:])
    dropping = SimpleNamespace(**{**vars(case.config), "attention_dropout": 0.1})
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1"):
        FPDT_Attention(dropping, *given[1:])


def test_the_layer_runs_under_autocast() -> None:
    case = CASES["sp2"]
    p = {name: x.detach().float().requires_grad_() for name, x in _parameters(case).items()}
    hidden = pattern(case.tokens, BATCH, 10).float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = _layer(case, p, None)(hidden, rotary_pos_emb=[x.float() for x in _rotary(case.tokens)])
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert hidden.grad.dtype == torch.float32 and p["w1"].grad.dtype == torch.float32
