"""§9.14 Attention over chunks of one sequence, on one rank.

Guards against: parts merged without their weights, a diagonal that shows the future, a pair left out or
computed for nothing, a probability from one chunk's sum in backward, a matrix of T x T scores.
Truth is torch's attention on the whole sequence, in float64.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from meter import LiveStorages
from shard_checks import pattern
from tolerance import BF16, EXACT, FP32, LAW, Tolerance, assert_close, differs
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ds_lite.sequence import chunked, pair
from ds_lite.sequence.chunked import chunked_attention
from ds_lite.sequence.host_store import HostStore

F64 = torch.float64
BATCH, HEADS, GROUPS, TOKENS, WIDTH = 3, 6, 2, 13, 5


# -------------------------------------------------------------------------------------------- equality


def _inputs(keys: int = TOKENS, groups: int = GROUPS) -> tuple[Tensor, Tensor, Tensor]:
    shapes = [(HEADS, TOKENS), (groups, keys), (groups, keys)]
    q, k, v = (pattern(BATCH, *shape, WIDTH, seed=i).requires_grad_() for i, shape in enumerate(shapes))
    return q, k, v


def _truth(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool,
    window: int | None = None,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    mask = torch.ones_like(distance, dtype=torch.bool)
    if is_causal:
        mask &= distance >= 0
    if window is not None:
        mask &= distance < window
    if key_padding_mask is not None:
        mask = mask & key_padding_mask[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, scale=scale)


def _compare(q: Tensor, k: Tensor, v: Tensor, chunks: int, store: HostStore | None, **options: Any) -> None:
    msg = f"{chunks} chunks, {'a store' if store else 'no store'}, {options}"
    upstream = pattern(*q.shape, seed=9).mT.contiguous().mT  # strided, as it may come
    out = chunked_attention(q, k, v, chunks=chunks, store=store, **options)
    truth = _truth(q, k, v, **options)
    assert_close(out, truth, LAW, msg)
    gradients, expected = (torch.autograd.grad(x, (q, k, v), upstream) for x in (out, truth))
    for name, mine, theirs in zip("qkv", gradients, expected):
        assert_close(mine, theirs, LAW, f"{msg}: gradient of {name}")


PADDED = torch.tensor([[True] * 9 + [False] * 4, [False] * 5 + [True] * 8, [False] * 13])
OPTIONS = {
    "causal": {"is_causal": True},
    "all": {"is_causal": False, "scale": 0.3},
    "window": {"is_causal": True, "window": 4},
    "padding": {"is_causal": False, "key_padding_mask": PADDED},
    "everything": {"is_causal": True, "window": 5, "key_padding_mask": PADDED},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_torchs_attention_for_any_number_of_chunks(name: str) -> None:
    q, k, v = _inputs()
    before = [x.detach().clone() for x in (q, k, v)]
    for chunks in (1, 2, 3, 4, 7, 13, 40):
        for store in (None, HostStore()):
            _compare(q, k, v, chunks, store, **OPTIONS[name])
    for x, old in zip((q, k, v), before):
        assert_close(x.detach(), old, EXACT, "inputs are never modified")
    other = _truth(q, k, v, is_causal=name == "all")
    assert differs(chunked_attention(q, k, v, chunks=4, **OPTIONS[name]), other), "the rule is seen"


@pytest.mark.parametrize("keys", [9, 17])
def test_queries_and_keys_may_differ_in_number(keys: int) -> None:
    q, k, v = _inputs(keys)
    for chunks in (2, 5):
        _compare(q, k, v, chunks, None, is_causal=True)
        _compare(q, k, v, chunks, None, is_causal=True, window=3)


@pytest.mark.parametrize("groups", [1, 3, 6])
def test_query_heads_may_share_keys_in_any_number(groups: int) -> None:
    _compare(*_inputs(groups=groups), 3, None, is_causal=True)


def test_strided_inputs_are_read_as_they_are() -> None:
    q, k, v = (x.detach().mT.contiguous().mT.requires_grad_() for x in _inputs())
    assert q.stride(-1) != 1
    _compare(q, k, v, 4, None, is_causal=True)


def test_the_plain_path_and_the_kernel_are_one() -> None:
    q, k, v = _inputs()
    with mock.patch.object(pair, "HAS_CPU_KERNEL", False):
        for is_causal in (True, False):
            _compare(q, k, v, 4, None, is_causal=is_causal)


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, FP32), (torch.bfloat16, BF16), (torch.float16, BF16)]
)
@pytest.mark.parametrize("has_kernel", [True, False])
def test_lower_precisions_add_up_in_float32(
    dtype: torch.dtype, tolerance: Tolerance, has_kernel: bool
) -> None:
    exact, rounded = _inputs(), [x.detach().to(dtype).requires_grad_() for x in _inputs()]
    truth = _truth(*exact, is_causal=True)
    with mock.patch.object(pair, "HAS_CPU_KERNEL", has_kernel):
        out = chunked_attention(*rounded, chunks=4, is_causal=True, store=HostStore())
        gradients = torch.autograd.grad(out, rounded, torch.ones_like(out))
    assert out.dtype == dtype
    assert_close(out.double(), truth.detach(), tolerance)
    for mine, theirs in zip(gradients, torch.autograd.grad(truth, exact, torch.ones_like(truth))):
        assert mine.dtype == dtype
        assert_close(mine.double(), theirs, tolerance)


@pytest.mark.parametrize("scale", [0.0, -0.7])
def test_a_scale_need_not_be_positive(scale: float) -> None:
    """torch's own kernel gives NaN with a causal one."""
    q, k, v = _inputs()
    for is_causal in (True, False):
        _compare(q, k, v, 4, None, is_causal=is_causal, scale=scale)


def test_autocast_does_not_make_the_sums_coarse() -> None:
    exact, rounded = _inputs(), [x.detach().float().requires_grad_() for x in _inputs()]
    truth = _truth(*exact, is_causal=True, window=5)
    with torch.autocast("cpu", torch.bfloat16):
        out = chunked_attention(*rounded, chunks=4, is_causal=True, window=5)
        gradient = torch.autograd.grad(out.sum(), rounded[0])[0]
    assert_close(out.double(), truth.detach(), FP32)
    assert_close(gradient.double(), torch.autograd.grad(truth.sum(), exact[0])[0], FP32)


@pytest.mark.parametrize("name", ["causal", "everything"])
def test_gradients_agree_with_finite_differences(name: str) -> None:
    q = pattern(2, 2, 5, 2, seed=1).requires_grad_()
    k, v = (pattern(2, 1, 5, 2, seed=i).requires_grad_() for i in (2, 3))
    options = dict(OPTIONS[name])
    if "key_padding_mask" in options:
        options["key_padding_mask"] = torch.tensor([[True, False, True, True, True], [False] * 5])
    assert torch.autograd.gradcheck(lambda *x: chunked_attention(*x, chunks=3, **options), (q, k, v))


def test_a_query_that_sees_no_key_gets_zeros_and_gives_none() -> None:
    q, k, v = _inputs()
    out = chunked_attention(q, k, v, chunks=3, is_causal=True, key_padding_mask=PADDED)
    gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert not any(x.isnan().any() for x in (out, *gradients))
    assert not out[1, :, :5].any() and not gradients[0][1, :, :5].any(), "before the first key that counts"
    assert not out[2].any() and not any(x[2].any() for x in gradients), "no key counts at all"
    assert out[1, :, 5:].all()


# ---------------------------------------------------------------------------------------- work and memory


def _pairs(chunks: int, **options: Any) -> tuple[int, int]:
    """How many pairs of chunks forward and backward really compute."""
    with (
        mock.patch.object(chunked, "attend", side_effect=pair.attend) as forward,
        mock.patch.object(chunked, "attend_backward", side_effect=pair.attend_backward) as backward,
    ):
        chunked_attention(*_inputs(), chunks=chunks, **options).sum().backward()
    return forward.call_count, backward.call_count


@pytest.mark.parametrize("chunks", [1, 2, 5, 8, 13])
def test_pairs_that_no_query_sees_are_not_computed(chunks: int) -> None:
    half = chunks * (chunks + 1) // 2
    assert _pairs(chunks, is_causal=True) == (half, half)
    assert _pairs(chunks, is_causal=False) == (chunks**2, chunks**2)
    if chunks == 13:  # one token a chunk: a window of 3 is a band of 3
        assert _pairs(chunks, is_causal=True, window=3) == (13 + 12 + 11,) * 2


def _largest_and_peak(tokens: int, attention: Any, **options: Any) -> tuple[int, int]:
    """Bytes beside the inputs, forward and backward."""
    q, k, v = (pattern(1, 2, tokens, 4, seed=i).requires_grad_() for i in range(3))
    with LiveStorages() as meter:
        attention(q, k, v, is_causal=True, **options).sum().backward()
    return meter.largest, meter.peak


def _whole(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


@pytest.mark.parametrize("has_kernel", [True, False])
def test_no_scores_of_tokens_times_tokens_ever_exist(has_kernel: bool) -> None:
    lengths, scores = (256, 512), 2 * 256 * 256 * 8  # of two heads, in float64
    with mock.patch.object(pair, "HAS_CPU_KERNEL", has_kernel):
        peaks = [_largest_and_peak(n, chunked_attention, chunks=n // 32) for n in lengths]
    assert peaks[0][0] <= scores // 32, "an input has 4 columns, 1/64 of the scores"
    assert peaks[0][1] < 0.4 * scores
    assert peaks[1][1] < 2.05 * peaks[0][1], "twice the tokens, twice the memory"
    whole = [_largest_and_peak(n, _whole) for n in lengths]
    assert whole[0][0] >= scores and whole[1][1] > 3.5 * whole[0][1], "the math kernel has them"


# ------------------------------------------------------------------------------------ graphs and refusals


def test_a_graph_may_be_used_again_if_it_is_kept_and_not_differentiated_twice() -> None:
    q, k, v = _inputs()
    out = chunked_attention(q, k, v, chunks=3, is_causal=True, store=HostStore())
    first, second = (torch.autograd.grad(out.sum(), q, retain_graph=True)[0] for _ in range(2))
    assert_close(first, second, EXACT)
    upstream = torch.ones_like(out).requires_grad_()
    (gradient,) = torch.autograd.grad(out, q, upstream, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
    out = chunked_attention(q, k.detach(), v.detach(), chunks=3, is_causal=True)
    assert_close(torch.autograd.grad(out.sum(), q, retain_graph=True)[0], first, EXACT)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize(
    "change, match",
    [
        ({"chunks": 0}, "chunks=0 must be at least 1"),
        ({"window": 2}, "window=2 with is_causal=False"),
        ({"window": 0, "is_causal": True}, "window=0"),
        ({"key_padding_mask": torch.ones(3, 12, dtype=torch.bool)}, r"\(3, 12\) .* \(3, 13\)"),
        ({"key_padding_mask": torch.ones(3, 13)}, "must be bool"),
    ],
)
def test_settings_that_mean_nothing_are_refused(change: dict[str, Any], match: str) -> None:
    q, k, v = _inputs()
    with pytest.raises(ValueError, match=match):
        chunked_attention(q, k, v, **{"chunks": 2, "is_causal": False, **change})


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, v = _inputs()
    for bad in (
        (q, k, v[:, :1]),
        (q[:, :5], k, v),
        (q[0], k, v),
        (q[..., :4], k, v),
        (q, k[:1], v[:1]),
        (q, k[:, :, :0], v[:, :, :0]),
        (q, k[:, :0], v[:, :0]),
    ):
        with pytest.raises(ValueError, match=r"do not fit; give \(B, N, T, D\)"):
            chunked_attention(*bad, chunks=2, is_causal=True)
    with pytest.raises(ValueError, match=r"float64, torch\.float32, torch\.float64; give all three in one"):
        chunked_attention(q, k.float(), v, chunks=2, is_causal=True)
