"""What a data loader for language models gives, as the pair that a pipeline takes (§9.9)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ds_lite.pipe.causal_lm.hull import CONTEXT


def by_name(batch: Any) -> Any:
    """A dict of input_ids, labels and what else there is of CONTEXT, as (inputs, labels); a pair as it is.

    Raises: ValueError for other names, and for a batch without input_ids or labels.

    >>> ids = torch.tensor([[4, 5]])
    >>> by_name({"input_ids": ids, "labels": ids})
    (tensor([[4, 5]]), tensor([[4, 5]]))
    """
    if not isinstance(batch, Mapping):
        return batch
    known = {"input_ids", "labels", *CONTEXT}
    if unknown := set(batch) - known:
        raise ValueError(f"a batch has {sorted(unknown)}; a pipeline takes {sorted(known)} (§9.9)")
    if missing := {"input_ids", "labels"} - set(batch):
        raise ValueError(
            f"a batch has no {' and no '.join(sorted(missing))}; give input_ids and labels (§9.9)"
        )
    ids = batch["input_ids"]
    given = [batch.get(name) for name in CONTEXT]
    if given[1] is not None and given[0] is None:
        given[0] = torch.ones_like(ids)  # what travels is known by its place
    inputs = (ids, *(x for x in given if x is not None))
    return inputs if len(inputs) > 1 else ids, batch["labels"]
