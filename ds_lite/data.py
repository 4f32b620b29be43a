"""Micro-batches from any iterator, and loaders that start again (§9.2)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ds_lite import comm
from ds_lite.comm import ProcessGroup


class RepeatingLoader:
    """An iterator that starts its loader again whenever it ends; each pass is one epoch.

    A sampler with `set_epoch` is told the epoch, so that shuffles differ between passes and agree
    between ranks.

    Raises: ValueError if the loader gives nothing at all.

    >>> it = iter(RepeatingLoader([0, 1, 2]))
    >>> [next(it) for _ in range(5)]
    [0, 1, 2, 0, 1]

    Source: §9.2; DeepSpeed `runtime/dataloader.py::RepeatingLoader` @ 0.19.8.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.epoch = 0
        self._iterator = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        """Batches in one pass."""
        return len(self.loader)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._start_again()
        try:
            return next(self._iterator)
        except StopIteration:
            raise ValueError(
                "RepeatingLoader cannot repeat: its loader gives no batch when it is started again; give a "
                "non-empty dataset, or a loader that can be iterated more than once (§9.2)"
            ) from None

    def _start_again(self) -> None:
        self.epoch += 1
        set_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self.epoch)
        self._iterator = iter(self.loader)


def make_loader(
    dataset: Dataset[Any], batch_size: int, *, replicas: int, replica: int, seed: int = 0, **options: Any
) -> DataLoader[Any]:
    """A DataLoader over this replica's part of the dataset, shuffled alike on every stage.

    `options` go to `torch.utils.data.DataLoader`; a `sampler` given there is used as it is.
    """
    if options.get("sampler") is None:
        options["sampler"] = DistributedSampler(
            dataset, num_replicas=replicas, rank=replica, shuffle=True, seed=seed
        )
    return DataLoader(dataset, batch_size=batch_size, drop_last=True, **options)


def take_micro_batches(
    iterator: Iterator[Any] | None, count: int, *, where: str, batch_fn: Callable[[Any], Any] | None = None
) -> list[tuple[Any, Any]]:
    """The next `count` batches, through `batch_fn`, each checked to be (inputs, labels).

    `where` names the rank in errors.

    Raises: ValueError if there is no iterator, if it ends early or refills a tensor it gave; TypeError for
    anything but a pair.
    """
    if iterator is None:
        raise ValueError(
            f"no data on {where}: the first stage reads the inputs and the last the labels; pass data_iter, "
            f"call set_dataloader, or give initialize training_data (§9.2)"
        )
    if not hasattr(iterator, "__next__"):
        raise TypeError(
            f"data_iter on {where} is a {type(iterator).__name__}, which starts anew in every call; pass an "
            f"iterator, iter(loader), or call set_dataloader(loader) once (§9.2)"
        )
    batches: list[tuple[Any, Any]] = []
    versions: list[list[int]] = []
    for index in range(count):
        try:
            batch = next(iterator)
        except StopIteration:
            raise ValueError(
                f"the data iterator ended after {index} of {count} micro-batches on {where}; give one that "
                f"lasts, e.g. ds_lite.utils.RepeatingLoader (§9.2)"
            ) from None
        if batch_fn is not None:
            batch = batch_fn(batch)
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            size = f" of length {len(batch)}" if isinstance(batch, (tuple, list)) else ""
            raise TypeError(
                f"micro-batch {index} on {where} is a {type(batch).__name__}{size}; the pipeline needs "
                f"(inputs, labels), each a tensor or a tuple of tensors (§9.2)"
            )
        batches.append((batch[0], batch[1]))
        versions.append(_versions(batch))
    if versions != [_versions(batch) for batch in batches]:
        raise ValueError(
            f"the data iterator on {where} changed a micro-batch that it had already given; the {count} "
            f"micro-batches of a step are taken together, so each needs tensors of its own (§9.2)"
        )
    return batches


def _versions(value: Any) -> list[int]:
    """How often each tensor in nested containers was changed in place so far."""
    if isinstance(value, Tensor):
        return [value._version]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [version for item in items for version in _versions(item)]


def to_device(value: Any, device: torch.device) -> Any:
    """Move the tensors in nested tuples, lists and dicts; everything else stays as it is."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    return _mapped(value, lambda item: to_device(item, device))


def cast_floats(value: Any, dtype: torch.dtype | None) -> Any:
    """Floating-point tensors in nested tuples, lists and dicts in another dtype; None leaves them alone."""
    if isinstance(value, Tensor):
        return value.to(dtype) if dtype is not None and value.is_floating_point() else value
    return _mapped(value, lambda item: cast_floats(item, dtype))


def different_data(
    value: Any, group: ProcessGroup, ranks: Sequence[int], *, axis: str = "tensor"
) -> ValueError | None:
    """The error to raise if the ranks of a tensor- or sequence-parallel group hold other tensors; else None.

    Communication: one all-gather of 32 bytes a rank over the group.
    """
    digest, own_error = hashlib.sha256(), None
    try:
        _digest_into(digest, value)
    except (RuntimeError, TypeError) as error:  # the others wait below, so not yet
        own_error = ValueError(f"the first batch cannot be compared between ranks: {error} (§9.3)")
    mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8).to(comm.control_device())
    everyone = torch.empty(len(ranks) * 32, dtype=torch.uint8, device=mine.device)
    comm.all_gather_into_tensor(everyone, mine, group=group)
    if own_error is not None:
        return own_error
    if all(torch.equal(row, everyone[:32]) for row in everyone.view(-1, 32)):
        return None
    return ValueError(
        f"the {axis}-parallel ranks {list(ranks)} got different data in their first batch, but they compute "
        f"parts of one result; feed all of them the same, e.g. with a sampler over the data-parallel rank "
        f"(§9.3)"
    )


def _digest_into(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)} ".encode())
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        digest.update(plain.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, dict):
        for key, item in value.items():
            digest.update(f"{key} ".encode())
            _digest_into(digest, item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _digest_into(digest, item)
    elif isinstance(value, (bool, int, float, str)):
        digest.update(f"{value} ".encode())


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """A nested tuple, list or dict with `function` applied to its members; anything else as it is."""
    if isinstance(value, tuple):
        parts = [function(item) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [function(item) for item in value]
    if isinstance(value, dict):
        return {key: function(item) for key, item in value.items()}
    return value
