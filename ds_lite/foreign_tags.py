"""How other libraries mark their parameters, read as our tags (§9.7)."""

from __future__ import annotations

from torch import nn

from ds_lite.tags import tag


def adopt_tags(model: nn.Module) -> None:
    """Read the attributes with which Megatron and DeepSpeed mark parameters as our tags.

    tensor_model_parallel=True or model_parallel=True: cut over the model axis, "sharded".
    sequence_parallel=True: used on a part of the tokens, "partial".
    allreduce=False: owned by an expert.
    q_layernorm and k_layernorm, known by name, if something is cut and a config has qk_layernorm: "partial".

    Raises: ValueError for a parameter that is marked as cut and as partial.

    Source: §9.7; Megatron-Core `tensor_parallel/layers.py::set_tensor_model_parallel_attributes`,
    `distributed/finalize_model_grads.py::_allreduce_non_tensor_model_parallel_grads` @ 0.16.1.
    """
    configs = [getattr(module, "config", None) for module in model.modules()]
    cuts_heads = any(getattr(config, "qk_layernorm", False) for config in configs)
    cuts_heads = cuts_heads and any(map(_is_marked_as_cut, model.parameters()))
    by_name = ("q_layernorm", "k_layernorm") if cuts_heads else ()
    for name, parameter in model.named_parameters():
        is_cut = _is_marked_as_cut(parameter)
        is_partial = getattr(parameter, "sequence_parallel", False) or any(part in name for part in by_name)
        if is_cut and is_partial:
            raise ValueError(
                f"parameter {name} is marked tensor_model_parallel and sequence_parallel; what is cut has no "
                f"copies whose gradients could be summed, take one mark off (§9.7)"
            )
        if is_cut or is_partial:
            tag(parameter, model="sharded" if is_cut else "partial")
        if not getattr(parameter, "allreduce", True):
            tag(parameter, owner="expert")


def _is_marked_as_cut(parameter: nn.Parameter) -> bool:
    return any(getattr(parameter, mark, False) for mark in ("tensor_model_parallel", "model_parallel"))
