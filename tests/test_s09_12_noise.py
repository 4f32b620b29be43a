"""§9.12 The gates' noise. Guards against: a seed, step, layer or purpose that is not looked at, noise that
depends on where a token lies, numbers that reach 0 or 1, correlations, and a generator that is touched."""

from __future__ import annotations

import math

import pytest
import torch
from tolerance import EXACT, FP32, LAW, assert_close, differs

from ds_lite.moe.noise import Purpose, TokenNoise, gumbel_rsample, multiplicative_jitter, random_words

F64 = torch.float64
WORD = 2**64


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


def splitmix64(state: int, position: int) -> int:
    return mix((state + position * 0x9E3779B97F4A7C15) % WORD)


def noise(tokens, *, seed=0, step=0, layer=0):
    return TokenNoise(seed, step, layer, tokens)


def test_words_equal_splitmix64_in_plain_integers():
    states = [0, 1, -1, 2**63 - 1, -(2**63), 1234567, -987654321]
    words = random_words(torch.tensor(states), 5)
    for row, state in zip(words.tolist(), states):
        assert [word % WORD for word in row] == [splitmix64(state % WORD, j) for j in range(1, 6)]


@pytest.mark.parametrize(
    "seed,step,layer,token", [(0, 0, 0, 0), (2**64 - 1, 3, 7, 10**12), (-5, 10**9, 1, 2)]
)
def test_uniform_numbers_equal_their_definition(seed, step, layer, token):
    key = 0
    for word in (seed, step, layer, Purpose.RSAMPLE, token):
        key = mix(((key ^ (word % WORD)) + 0x9E3779B97F4A7C15) % WORD)
    expected = [((splitmix64(key, j) >> 12) + 0.5) / 2**52 for j in (1, 2, 3)]
    drawn = noise(torch.tensor([token]), seed=seed, step=step, layer=layer).uniform(Purpose.RSAMPLE, 3, F64)
    assert_close(drawn[0], torch.tensor(expected, dtype=F64), EXACT)


def test_each_part_of_the_key_counts_and_nothing_else():
    tokens = torch.arange(64)
    base = noise(tokens).uniform(Purpose.JITTER, 3)
    for other in (noise(tokens, seed=1), noise(tokens, step=1), noise(tokens, layer=1), noise(tokens + 64)):
        assert not (other.uniform(Purpose.JITTER, 3) == base).any()
    assert not (noise(tokens).uniform(Purpose.RSAMPLE, 3) == base).any()
    swapped = [noise(tokens, step=3, layer=2), noise(tokens, step=2, layer=3)]
    assert not (swapped[0].uniform(Purpose.JITTER, 3) == swapped[1].uniform(Purpose.JITTER, 3)).any()
    state = torch.get_rng_state()
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    assert_close(noise(tokens[shuffled]).uniform(Purpose.JITTER, 3), base[shuffled], EXACT)
    assert_close(noise(tokens.int()).uniform(Purpose.JITTER, 2), base[:, :2], EXACT, "the first columns")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(tokens, torch.arange(64))


@pytest.mark.parametrize("dtype,tail", [(F64, 2.0**-53), (torch.float32, 2.0**-24)])
def test_numbers_lie_strictly_between_zero_and_one(dtype, tail):
    drawn = noise(torch.arange(20000)).uniform(Purpose.JITTER, 10, dtype)
    assert drawn.dtype == dtype and drawn.min() >= tail and drawn.max() <= 1 - tail
    wide = noise(torch.arange(20000)).uniform(Purpose.JITTER, 10, F64)
    assert (drawn.double() - wide).abs().max() <= 2.0**-24
    assert noise(torch.arange(20000)).gumbel(Purpose.JITTER, 10, dtype).isfinite().all()


def test_numbers_are_uniform_in_every_direction():
    """Chi-square of 64 cells over 65536 numbers (mean 63, deviation 11.2), counted along each key."""
    n, cells = 65536, 64

    def chi_square(numbers):
        counts = torch.bincount((numbers.flatten() * cells).long(), minlength=cells)
        return ((counts - n / cells) ** 2).sum().item() / (n / cells)

    one = torch.zeros(1, dtype=torch.int64)
    over = {
        "tokens": noise(torch.arange(n)).uniform(Purpose.TOKEN_SELECTION, 1, F64),
        "tokens of stride 2^20": noise(torch.arange(n) << 20).uniform(Purpose.TOKEN_SELECTION, 1, F64),
        "columns": noise(one).uniform(Purpose.RSAMPLE, n, F64),
        "both": noise(torch.arange(256)).uniform(Purpose.RSAMPLE, 256, F64),
    }
    for key in ("seed", "step", "layer"):
        drawn = [noise(torch.arange(256), **{key: i}).uniform(Purpose.RSAMPLE, 1, F64) for i in range(256)]
        over[key] = torch.cat(drawn)
    for name, numbers in over.items():
        assert 25 < chi_square(numbers) < 130, name  # six deviations above, over three below
    assert chi_square(torch.arange(n) / n) < 1  # control: too even
    assert chi_square(over["both"] ** 1.05) > 130


def test_neighbours_are_not_correlated():
    grid = noise(torch.arange(400)).uniform(Purpose.RSAMPLE, 400, F64)
    after = noise(torch.arange(400), step=1).uniform(Purpose.RSAMPLE, 400, F64)
    other = noise(torch.arange(400)).uniform(Purpose.JITTER, 400, F64)
    pairs = {
        "column": (grid[:, 1:], grid[:, :-1]),
        "token": (grid[1:], grid[:-1]),
        "step": (grid, after),
        "purpose": (grid, other),
        "diagonal": (grid[1:, :-1], grid[:-1, 1:]),
    }
    for name, (a, b) in pairs.items():
        correlation = torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1].item()
        assert abs(correlation) < 6 / math.sqrt(a.numel()), name


def test_gumbel_numbers_have_the_mean_and_variance_of_their_law():
    drawn = noise(torch.arange(30000)).gumbel(Purpose.RSAMPLE, 4, F64)
    assert abs(drawn.mean().item() - 0.5772156649) < 0.02  # deviation 0.0037
    assert abs(drawn.var().item() - math.pi**2 / 6) < 0.1
    uniform = noise(torch.arange(30000)).uniform(Purpose.RSAMPLE, 4, F64)
    assert_close(drawn, -(-uniform.log()).log(), LAW)


def test_a_drawn_seed_comes_from_the_generator_given_and_moves_on():
    first, second = (torch.Generator().manual_seed(4) for _ in range(2))
    device = torch.device("cpu")
    state = torch.get_rng_state()
    drawn = [TokenNoise.drawn(5, device, generator) for generator in (first, second, first)]
    assert torch.equal(torch.get_rng_state(), state)
    assert drawn[0].seed == drawn[1].seed != drawn[2].seed
    assert drawn[0].tokens.tolist() == [0, 1, 2, 3, 4]
    TokenNoise.drawn(5, device)
    assert not torch.equal(torch.get_rng_state(), state)


def test_deepspeeds_two_functions():
    x = torch.randn(50, 40)
    before = x.clone()
    jittered = multiplicative_jitter(x, x.device)
    assert differs(jittered, x) and ((jittered / x) - 1).abs().max() <= 0.01 + 1e-6
    assert ((jittered / x) - 1).abs().max() > 0.009
    assert multiplicative_jitter(x, x.device, epsilon=0) is x
    uniform = noise(torch.arange(50)).uniform(Purpose.JITTER, 40)
    assert_close(multiplicative_jitter(x, epsilon=0.5, uniform=uniform), x * (0.5 + uniform), FP32)
    assert torch.equal(x, before)
    generators = [torch.Generator().manual_seed(2) for _ in range(2)]
    a, b = (gumbel_rsample((3, 4), torch.device("cpu"), generator=generator) for generator in generators)
    assert a.shape == (3, 4) and torch.equal(a, b) and a.isfinite().all()
