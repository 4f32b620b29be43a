"""DeepSpeed's names around fused weights: a part written into a given tensor, the fused q, k, v (§9.13)."""

from __future__ import annotations

from torch import Tensor, nn

from ds_lite import comm
from ds_lite.comm import ProcessGroup
from ds_lite.dealing import deal_evenly, repeated
from ds_lite.tensor_parallel.fused_qkv import Heads, attention_layout, strided_copy
from ds_lite.tensor_parallel.tp_shard import AutoTPMeta

_FUSED = ("qkv_proj", "query_key_value", "attn.Wqkv", "self_attn.W_pack", "c_attn")


class ReplaceWithTensorSlicing:
    """Copies this rank's part of whole weights into tensors that are as large as the part.

    Source: §9.13; DeepSpeed `module_inject/replace_module.py::ReplaceWithTensorSlicing` @ 0.19.8.
    """

    def __init__(
        self, mp_group: ProcessGroup | None = None, mp_size: int = 1, out_dim: int = 1, in_dim: int = 0
    ) -> None:
        self.mp_size, self.out_dim, self.in_dim = mp_size, out_dim, in_dim
        self.gpu_index = 0 if mp_group is None else comm.get_rank(mp_group)

    def strided_copy(
        self,
        dst: Tensor,
        src: Tensor | None,
        num_splits: int,
        int8: bool = False,
        allocate_tensor: bool = False,
    ) -> nn.Parameter | None:
        """This rank's part of a fused weight of `num_splits` equal parts side by side, written into `dst`.

        The parts lie along the last dim of `src`, or with `int8` along the first.

        Raises: ValueError for a `src` that does not consist of such parts, or a `dst` of another size.
        """
        if src is None:
            return None
        dim = 0 if int8 or src.dim() == 1 else src.dim() - 1
        total, rest = divmod(src.shape[dim], num_splits)
        if rest:
            raise ValueError(
                f"src has {src.shape[dim]} columns along dim {dim}, not num_splits={num_splits} equal parts; "
                f"check num_splits (§9.13)"
            )
        ranges = repeated(deal_evenly(total, self.mp_size), total, num_splits)[self.gpu_index]
        part = strided_copy(src.detach(), ranges, dim)
        if part.numel() != dst.numel():
            raise ValueError(
                f"dst has shape {tuple(dst.shape)}, this rank's part of src {tuple(part.shape)}; make them "
                f"equal (§9.13)"
            )
        target = dst.new_empty(part.shape) if allocate_tensor else dst.detach().view(part.shape)
        return nn.Parameter(target.copy_(part), requires_grad=False)


def require_tp_fused_qkvw(name: str, mp_size: int) -> bool:
    """Whether a weight of this name is usually query, key and value in one, and is to be cut.

    Source: §9.13; DeepSpeed `module_inject/fusedqkv_utils.py::require_tp_fused_qkvw` @ 0.19.8.
    """
    return mp_size > 1 and any(fused in name for fused in _FUSED)


def prepare_tp_fused_qkvw(
    module: nn.Module,
    src: Tensor | None,
    mp_size: int,
    gpu_index: int,
    meta: AutoTPMeta | None = None,
) -> Tensor | None:
    """One rank's rows of a fused weight or bias, packed as the class of the block packs it.

    Raises: ValueError for a block whose packing is unknown, and for rows that are not whole heads.

    Source: §9.13; DeepSpeed `module_inject/fusedqkv_utils.py::prepare_tp_fused_qkvw` @ 0.19.8.
    Differs: DeepSpeed takes an unknown block for one that packs head by head, with a warning.
    """
    if src is None:
        return None
    layout = attention_layout([*module.modules()])
    if layout is None:
        raise ValueError(
            f"the layout of the fused weight in {type(module).__name__} is unknown; declare it with a "
            f"TPLayerSpec and shape=((q, k, v), -1) (§9.13)"
        )
    meta = meta or AutoTPMeta()
    query = meta.num_attention_heads or meta.num_kv_heads
    hidden = meta.n_embd or (src.shape[1] if src.dim() > 1 else src.shape[0] // 3)
    if not query or hidden % query:
        raise ValueError(
            f"meta has num_attention_heads={query} for a width of {hidden}; give a number of query heads "
            f"that divides it (§9.13)"
        )
    width = hidden // query
    kv, rest = divmod(src.shape[0] - query * width, 2 * width)
    if rest or kv < 1:
        raise ValueError(
            f"a fused weight of {src.shape[0]} rows does not hold {query} query heads of width {width} and "
            f"whole key and value heads (§9.13)"
        )
    return strided_copy(src, layout.rows(Heads(query, kv, width), mp_size)[gpu_index])
