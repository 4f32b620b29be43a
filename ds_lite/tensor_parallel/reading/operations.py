"""What an operation does to the columns of an open value: each for itself, or something with several (§9.13).

A value has its columns in the last dimension until code folds it into heads; from then on the last dimension
is one head's width, which no rank shares with another. An operation that is not listed may do anything, so
what it is given has to be whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from ds_lite.tensor_parallel.reading.values import Flowing, Known, OneOf, Value, flows

_ELEMENTWISE = {
    *("add", "sub", "mul", "div", "true_divide", "pow", "float_power", "square", "sqrt", "rsqrt"),
    *("reciprocal", "exp", "expm1", "log", "log1p", "abs", "neg", "sign", "sin", "cos", "tanh", "erf"),
    *("floor", "round", "sigmoid", "logsigmoid", "relu", "relu6", "gelu", "silu", "mish", "elu", "selu"),
    *("celu", "leaky_relu", "hardswish", "hardsigmoid", "hardtanh", "softplus", "softsign", "tanhshrink"),
    *("clamp", "clip", "clamp_min", "clamp_max", "maximum", "minimum", "where", "masked_fill", "lerp"),
    *("addcmul", "addcdiv", "dropout", "dropout1d", "dropout2d", "alpha_dropout", "nan_to_num"),
    *("to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda", "contiguous", "clone"),
    *("detach", "requires_grad", "view_as", "reshape_as", "expand_as", "logical_not", "eq", "ne", "lt"),
}
_NEW = {
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_zeros"),
    *("new_ones", "save_for_backward"),
}
_NEUTRAL = {"unsqueeze", "squeeze", "expand", "repeat_interleave", "broadcast_to"}
_REPEATS = {"repeat", "tile"}
_FOLDS = {"view", "reshape", "unflatten", "rearrange"}
_MOVES = {"transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t"}
_PICKS = {"chunk", "split", "tensor_split", "unbind"}
_JOINS = {"cat", "concat", "concatenate", "stack"}
_CONTRACTS = {"matmul", "bmm", "einsum", "baddbmm"}
_REDUCES_DIM_SECOND = {
    *("mean", "sum", "nansum", "prod", "amax", "amin", "max", "min", "argmax", "argmin", "cumsum", "cumprod"),
    *("softmax", "log_softmax", "logsumexp", "softmin"),
}
_REDUCES = {*_REDUCES_DIM_SECOND, "var", "std", "norm", "vector_norm", "normalize"}
_NORMS_OF_THE_LAST = {"layer_norm", "rms_norm"}
_PASSED_ON = {"update"}  # a cache of keys and values

# Layers of torch without a linear inside that treat each element for itself.
_ELEMENTWISE_LAYERS = (
    *(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout, nn.ReLU, nn.ReLU6, nn.GELU),
    *(nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU, nn.Hardswish),
    *(nn.Hardsigmoid, nn.Hardtanh, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Threshold, nn.Tanhshrink),
    *(nn.PReLU, nn.RReLU),
)


def is_elementwise(module: nn.Module) -> bool:
    """Whether a layer of torch treats each element for itself."""
    return isinstance(module, _ELEMENTWISE_LAYERS)


def after(
    name: str,
    args: Sequence[Value],
    named: Mapping[str, Value],
    x: Flowing,
    columns: int,
    head_width: int | None,
) -> Flowing | str:
    """What an operation makes of its arguments, or why these have to be whole.

    `x` is what the arguments have in common, made of layers with `columns` columns; `head_width` if known.
    """
    is_attention = any(word in name for word in ("attention", "attn", "sdpa"))
    if name in _ELEMENTWISE or name in _PASSED_ON:
        return x
    if name in _NEW:
        return Flowing()
    if name in _NEUTRAL or name in _MOVES:
        return x if x.has_heads else replace(x, is_moved=True)
    if name in _REPEATS:
        return f"{name} puts copies of its heads or columns in an order of its own"
    if name in _FOLDS or name == "flatten":
        folded = _folded(name, args, x, columns, head_width)
        if isinstance(folded, str):
            return folded
        return replace(folded, was_folded=x.was_folded or folded.has_heads)
    if name in _PICKS:
        return x if x.has_heads or _dim(args, named, 2) in (0, 1) else replace(x, is_picked=True)
    if name in _JOINS:
        return x if x.has_heads else f"{name} puts columns of its output in other places"
    if name in _CONTRACTS or is_attention:
        if not x.has_heads:
            return f"{name} needs all columns of its output"
        if name == "einsum" and not _is_head_by_head(args):
            return "einsum sums over something that may be its heads"
        operands = [one for one in flows(args) + flows(named.values()) if one.open]
        return replace(x, attended=x.attended or is_attention or len(operands) > 1)
    if name in _REDUCES or name in _NORMS_OF_THE_LAST:
        return _reduced(name, args, named, x)
    return f"nobody knows what {name or 'a call'} does to the columns of its output"


def _reduced(name: str, args: Sequence[Value], named: Mapping[str, Value], x: Flowing) -> Flowing | str:
    """Along the last dimension it is within a head, or else over all columns; others are known by -2 "
    "alone."""
    if name in ("max", "min") and len(args) > 1 and isinstance(args[1], Flowing):
        return x  # of two tensors, element by element
    dim = named.get("dim", named.get("axis"))
    if dim is None and name in _REDUCES_DIM_SECOND:
        dim = args[1] if len(args) > 1 else None
    along = dim.object if isinstance(dim, Known) else None
    is_within = x.has_heads and (along in (-1, 3) or name in _NORMS_OF_THE_LAST)
    if is_within or (not x.has_heads and along == -2 and not x.is_moved):
        return replace(x, attended=x.attended or "softmax" in name)
    return f"{name} needs all columns of its output"


def _folded(
    name: str, args: Sequence[Value], x: Flowing, columns: int, head_width: int | None
) -> Flowing | str:
    """Columns into heads, heads into columns, or neither."""
    sizes = [size for arg in args[1:] for size in (arg if isinstance(arg, tuple) else (arg,))]
    numbers = [size.object if isinstance(size, Known) else None for size in sizes]
    last = numbers[-1] if numbers else None
    if name == "flatten":
        if x.has_heads:
            return x if (len(numbers) > 1 and last != -1) or numbers == [-2] else replace(x, has_heads=False)
        return x if numbers in ([0, 1], [0, -2]) else "flatten mixes columns of its output with tokens"
    if name == "rearrange":
        pattern = str(last).split("->")
        return replace(x, has_heads="(" not in pattern[-1])
    width = last if isinstance(last, int) and last > 0 else 0
    if x.has_heads:  # it stays so, unless all that follows the tokens becomes one dimension again
        return replace(x, has_heads=len(numbers) > 3 or (width > 0 and width == head_width))
    is_of_heads = width == head_width or (0 < width < columns and width % (head_width or 1) == 0)
    return replace(x, has_heads=True) if name == "unflatten" or len(numbers) > 3 or is_of_heads else x


def _is_head_by_head(args: Sequence[Value]) -> bool:
    """Whether an einsum sums over last dimensions alone: a head's width, or the keys."""
    equation = args[0].object if args and isinstance(args[0], Known) else None
    if not isinstance(equation, str) or "->" not in equation:
        return False
    inputs, output = equation.replace(" ", "").split("->")
    lasts = {operand[-1:] for operand in inputs.split(",")}
    return set(inputs) - {",", "."} - set(output) <= lasts


# Operations whose numbers are sizes, and no values.
SIZED = {
    *(*_FOLDS, *_PICKS, *_NEUTRAL, *_MOVES, *_REPEATS, "flatten", "narrow", "zeros", "ones", "empty", "full"),
    *(
        "new_zeros",
        "new_ones",
        "new_empty",
        "new_full",
        "Size",
        "view_as",
        "arange",
        "layer_norm",
        "rms_norm",
    ),
}


def _dim(args: Sequence[Value], named: Mapping[str, Value], place: int) -> int | None:
    dim = named.get("dim", named.get("axis", args[place] if len(args) > place else None))
    return dim.object if isinstance(dim, Known) and isinstance(dim.object, int) else None


def indexed(x: Flowing, index: Sequence[tuple[str, Value]]) -> Flowing | str:
    """An open value at an index, given as (kind, value) with kind "all", "part", "stepped", "new", "...",
    "one".

    Columns may be taken apart (a fused weight), not every other one; of heads none may be left out.
    """
    kinds = [kind for kind, _ in index if kind != "new"]
    from_the_end = kinds[kinds.index("...") + 1 :] if "..." in kinds else None
    if x.has_heads:
        is_of_heads = from_the_end is None and any(kind not in ("all",) for kind in kinds[1:3])
        return "an index leaves out some of its heads" if is_of_heads else x
    touched = from_the_end if from_the_end is not None else kinds[1:]
    if all(kind == "all" for kind in touched):
        return x
    if any(kind in ("stepped", "one") for kind in touched):
        return "an index picks single columns of its output"
    return replace(x, is_picked=True)


def name_of(what: Value, text: str) -> str:
    """The name of an operation: the object's own, else the word in the code."""
    found = what.object if isinstance(what, Known) else None
    own = getattr(found, "__name__", None) if not isinstance(what, OneOf) else None
    return str(own or text.rpartition(".")[2]).rstrip("_")
