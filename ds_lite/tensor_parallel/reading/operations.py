"""What an operation does to the columns of an open value: each for itself, or together (§9.13).

Columns are the last dimension until code folds it into heads; from then on it is one head's width, which no
rank shares with another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from ds_lite.tensor_parallel.reading.values import Known, Value

# Operations that look at several columns at once, by the last word of their name.
_ACROSS = {
    *("mean", "sum", "nansum", "prod", "std", "var", "norm", "vector_norm", "max", "min", "amax", "amin"),
    *("softmax", "log_softmax", "logsumexp", "softmin", "normalize", "layer_norm", "rms_norm", "group_norm"),
    *("argmax", "argmin", "topk", "sort", "argsort", "median", "quantile", "cumsum", "cumprod", "all", "any"),
    *(
        "linear",
        "bilinear",
        "matmul",
        "bmm",
        "mm",
        "einsum",
        "dot",
        "baddbmm",
        "addmm",
        "scaled_dot_product_attention",
        "conv1d",
    ),
    *("flip", "roll", "gather", "index_select", "glu", "interpolate", "avg_pool1d", "max_pool1d", "fft"),
}
_FOLDS = {"view", "reshape", "unflatten", "rearrange"}

# Layers of torch without a linear inside that treat each element for itself.
_ELEMENTWISE = (
    *(
        nn.Identity,
        nn.Dropout,
        nn.Dropout1d,
        nn.Dropout2d,
        nn.AlphaDropout,
        nn.ReLU,
        nn.ReLU6,
        nn.GELU,
        nn.SiLU,
    ),
    *(nn.Mish, nn.Tanh, nn.Sigmoid, nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU, nn.Hardswish, nn.Hardsigmoid),
    *(nn.Hardtanh, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Threshold, nn.Tanhshrink, nn.PReLU, nn.RReLU),
)


def takes_columns_together(name: str, args: Sequence[Value], named: Mapping[str, Value]) -> bool:
    """Whether an operation of this name needs all columns of what it is given.

    One along another dimension, said by a plain number, does not.
    """
    if name not in _ACROSS:
        return False
    dims = [named.get("dim"), named.get("axis"), *args[1:2]]
    numbers = [dim.object for dim in dims if isinstance(dim, Known)]
    return not any(type(number) is int and number in (0, 1, -2, -3) for number in numbers)


def folds_columns(name: str) -> bool:
    """Whether an operation of this name makes heads out of columns."""
    return name in _FOLDS


def is_elementwise(module: nn.Module) -> bool:
    """Whether a layer of torch treats each element for itself."""
    return isinstance(module, _ELEMENTWISE)
