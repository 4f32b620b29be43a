"""Noise for the gates that does not depend on how the work is spread (§9.12.2).

A number is a function of (seed, step, layer, what it is for, global token, column) and of nothing else: a
token meets the same noise on any rank and beside any neighbours, and a step that is run again repeats it.
There is no state to save. Columns are a token's experts or features.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

_WORD = 2**64
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: the distance of neighbouring splitmix64 states


class Purpose(IntEnum):
    """What noise is for; each purpose has numbers of its own."""

    JITTER = 1
    RSAMPLE = 2
    SECOND_EXPERT = 3
    TOKEN_SELECTION = 4


@dataclass(frozen=True)
class TokenNoise:
    """The noise of one gate in one step, for the tokens that are routed together.

    `tokens` (T,) are the tokens' global numbers, e.g. global sample * tokens per sample + position; the noise
    is made on their device. All ranks that route a token must give it the same number.

    >>> whole = TokenNoise(seed=1, step=7, layer=2, tokens=torch.arange(6)).uniform(Purpose.JITTER, 3)
    >>> part = TokenNoise(seed=1, step=7, layer=2, tokens=torch.tensor([4, 1])).uniform(Purpose.JITTER, 3)
    >>> torch.equal(part, whole[[4, 1]])
    True
    """

    seed: int
    step: int
    layer: int
    tokens: Tensor

    @classmethod
    def drawn(
        cls, num_tokens: int, device: torch.device, generator: torch.Generator | None = None
    ) -> TokenNoise:
        """Noise for a gate on its own, with a seed from `generator` (of the CPU; by default torch's own)."""
        seed = int(torch.randint(2**62, (), generator=generator))
        return cls(seed, 0, 0, torch.arange(num_tokens, device=device))

    def uniform(self, purpose: Purpose, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Numbers strictly between 0 and 1: odd multiples of 2^-53 in float64, of 2^-24 in float32.

        Shapes: (T, columns). A float32 number lies within 2^-24 of the float64 one.
        """
        bits = 52 if dtype == torch.float64 else 23  # one fewer than the format has: the middle of each step
        whole = random_words(self._streams(purpose), columns)
        whole.bitwise_right_shift_(64 - bits).bitwise_and_((1 << bits) - 1)
        return whole.to(dtype).add_(0.5).mul_(2.0**-bits)

    def gumbel(self, purpose: Purpose, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard Gumbel numbers: added to logits, their largest is a draw from the softmax.

        Shapes: (T, columns).
        """
        return self.uniform(purpose, columns, dtype).log_().neg_().log_().neg_()

    def _streams(self, purpose: Purpose) -> Tensor:
        """One splitmix64 state per token, (T,)."""
        key = torch.zeros((), dtype=torch.int64)
        for word in (self.seed, self.step, self.layer, int(purpose)):
            key = _mix((key ^ _signed(word)) + _signed(_GOLDEN))
        return _mix((self.tokens.long() ^ int(key)) + _signed(_GOLDEN))


def random_words(streams: Tensor, columns: int) -> Tensor:
    """The first `columns` numbers of each stream of splitmix64, 64 random bits each.

    Shapes: streams (T,) int64 -> (T, columns) int64.

    >>> random_words(torch.tensor([1234567]), 2)[0].tolist()  # the generator's published test values
    [6457827717110365317, 3203168211198807973]

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; the mixing
    constants are Stafford's Mix13.
    """
    counter = torch.arange(1, columns + 1, device=streams.device) * _signed(_GOLDEN)
    return _mix(streams.unsqueeze(-1) + counter)


def _mix(x: Tensor) -> Tensor:
    """Scramble 64 bits so that each bit of the result depends on all of `x`, in place; a bijection."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x.bitwise_xor_(_logical_shift(x, shift)).mul_(_signed(factor))  # int64 products wrap around
    return x.bitwise_xor_(_logical_shift(x, 31))


def _logical_shift(x: Tensor, by: int) -> Tensor:
    """Shift right and fill with zeros; torch's own shift of an int64 repeats the sign."""
    return (x >> by).bitwise_and_((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    """The int64 with the bits of `word` modulo 2^64."""
    return (word + _WORD // 2) % _WORD - _WORD // 2


# ------------------------------------------------------------------------------- DeepSpeed's two functions


def multiplicative_jitter(
    x: Tensor, device: torch.device | None = None, epsilon: float = 1e-2, *, uniform: Tensor | None = None
) -> Tensor:
    """`x` times a number between 1 - epsilon and 1 + epsilon, another for each element.

    `uniform` are the numbers between 0 and 1 to use, of x's shape; without them torch's generator is asked.
    `device` is x's and is not looked at.

    Source: §9.12; DeepSpeed `moe/sharded_moe.py::multiplicative_jitter` @ 0.19.8.
    """
    if epsilon == 0:
        return x
    drawn = torch.rand_like(x) if uniform is None else uniform
    return x * (1 - epsilon + 2 * epsilon * drawn)


def gumbel_rsample(
    shape: tuple[int, ...], device: torch.device, *, generator: torch.Generator | None = None
) -> Tensor:
    """Standard Gumbel numbers in float32 from `generator`, or from torch's own.

    Source: §9.12; DeepSpeed `moe/sharded_moe.py::gumbel_rsample` @ 0.19.8.
    """
    return torch.empty(shape, device=device).exponential_(generator=generator).log_().neg_()
