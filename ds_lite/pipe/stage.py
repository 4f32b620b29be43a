"""One stage at work: what each buffer instruction does with tensors (§9.10.2).

A `Stage` knows its layers, its two neighbours and its buffers; it does not know the schedule. Every method
is one instruction on one buffer. Autograd ends at the stage's edge: received activations are leaves, and
what backward leaves in their `.grad` is what the previous stage receives.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_lite.agreement import RemoteError
from ds_lite.data import cast_floats, to_device
from ds_lite.pipe.losses import split_losses
from ds_lite.pipe.module import PipelineModule
from ds_lite.pipe.p2p import Arriving, Message, NeighbourError, Pending, StageLink, can_travel, show

_GRADIENT_SENDS = 2  # gradient messages that may be under way at once


def _unchanged(loss: Tensor) -> Tensor:
    return loss


@dataclass
class Buffer:
    """What one micro-batch leaves on this stage between its instructions."""

    inputs: Any = None  # first stage: what the iterator gave; later ones: the received leaf tensors
    labels: Any = None
    arriving: Arriving | None = None
    outputs: Message | None = None
    loss: Tensor | None = None
    sending: Pending | None = None

    def is_empty(self) -> bool:
        return all(value is None for value in vars(self).values())


class Stage:
    """The layers between two neighbours, and the micro-batches in flight on them.

    `previous` and `next` are None at the ends. `num_micro_batches` divides the loss, once, on the last stage.
    """

    def __init__(
        self,
        module: PipelineModule,
        previous: StageLink | None,
        following: StageLink | None,
        device: torch.device,
        input_dtype: torch.dtype | None = None,
    ) -> None:
        self.module, self.previous, self.next, self.device = module, previous, following, device
        self.input_dtype = input_dtype  # what floats in the model's inputs are cast to; None: nothing
        self.loaded: deque[tuple[Any, Any]] = deque()  # micro-batches that the iterator gave for this batch
        self._received: Counter[int] = Counter()  # messages that came in during this run, by peer
        self.losses: list[tuple[Tensor, ...]] = []  # last stage: per micro-batch, detached
        self.last_outputs: Any = None  # last stage: of the newest micro-batch
        self.buffers: list[Buffer] = []
        self._gradient_sends: deque[Pending] = deque()
        self.has_trained = False  # last stage: some loss of this run was differentiated
        self.failure: str | None = None  # why the messages between the stages can no longer be trusted

    def start(
        self,
        num_buffers: int,
        num_micro_batches: int,
        *,
        compute_loss: bool = True,
        scaled: Callable[[Tensor], Tensor] = _unchanged,
    ) -> None:
        """Make the buffers of one run of a schedule; `scaled` is what fp16 does to a loss before backward."""
        self.scaled = scaled
        self.buffers = [Buffer() for _ in range(num_buffers)]
        self.num_micro_batches, self.compute_loss = num_micro_batches, compute_loss
        self.losses, self.last_outputs, self._received = [], None, Counter()
        self.has_trained = False

    def finish(self) -> None:
        """Wait for every send; then no handle is open and no buffer holds anything."""
        for buffer in self.buffers:
            if buffer.sending is not None:
                buffer.sending.wait()
                buffer.sending = None
            if not torch.is_grad_enabled():  # no backward came by to empty it
                buffer.inputs = buffer.labels = buffer.outputs = buffer.loss = None
        while self._gradient_sends:
            self._gradient_sends.popleft().wait()
        self.last_outputs = None
        left = [index for index, buffer in enumerate(self.buffers) if not buffer.is_empty()]
        assert not left, f"after the schedule the buffers {left} are not empty: {self.buffers}"
        assert not self.loaded, f"after the schedule {len(self.loaded)} micro-batches were never loaded"

    # ------------------------------------------------------------------------------------ compute

    def load(self, buffer: Buffer) -> None:
        """LoadMicroBatch: the inputs on the first stage, the labels on the last."""
        inputs, labels = self.loaded.popleft()
        if self.previous is None:
            buffer.inputs = cast_floats(to_device(inputs, self.device), self.input_dtype)
        if self.next is None:
            buffer.labels = to_device(labels, self.device)

    def forward(self, buffer: Buffer) -> None:
        """ForwardPass: this stage's layers, and the loss on the last stage."""
        x = buffer.inputs if self.previous is None else self._take_arrived(buffer)
        outputs = self.module(x)
        if self.next is None:
            self._take_loss(buffer, outputs)
        else:
            buffer.outputs = _as_message(outputs, self.module.last_layer_name(), self.device)
        if self.previous is None:
            buffer.inputs = None  # the graph keeps what it needs

    def _take_arrived(self, buffer: Buffer) -> Any:
        assert buffer.arriving is not None, "ForwardPass before RecvActivation"
        message, buffer.arriving = buffer.arriving.wait(), None
        buffer.inputs = message
        if not torch.is_grad_enabled():
            return _unwrapped(message.tensors, message.is_tuple)
        for tensor, needs_gradient in zip(message.tensors, message.flags, strict=True):
            tensor.requires_grad_(needs_gradient)
        # The layers get copies, not the leaves: an in-place first layer must work as it does in one process.
        x = tuple(t.clone() if t.requires_grad else t for t in message.tensors)
        return _unwrapped(x, message.is_tuple)

    def _take_loss(self, buffer: Buffer, outputs: Any) -> None:
        self.last_outputs = self.module.shown(outputs) if not torch.is_grad_enabled() else None
        labels, buffer.labels = buffer.labels, None
        if not self.compute_loss:
            return
        loss = outputs if self.module.loss_fn is None else self.module.loss_fn(outputs, labels)
        losses = tuple(value.to(self.device) for value in split_losses(loss))
        buffer.loss = losses[0] if torch.is_grad_enabled() else None
        self.losses.append(tuple(value.detach() for value in losses))

    def backward(self, buffer: Buffer) -> None:
        """BackwardPass: from the loss on the last stage, from the received gradients elsewhere."""
        if self.next is None:
            assert buffer.loss is not None, "BackwardPass before ForwardPass"
            # The only division by m: m mean losses add up to m times the mean loss of the whole batch.
            if buffer.loss.requires_grad:  # a micro-batch without valid labels may give a plain zero
                self.scaled(buffer.loss / self.num_micro_batches).backward()
                self.has_trained = True
            buffer.loss = None
            return
        assert buffer.outputs is not None and buffer.arriving is not None and buffer.sending is not None
        gradients = buffer.arriving.wait()
        ends = [
            (output, gradient)
            for output, gradient, is_here in zip(
                _with_gradient(buffer.outputs), gradients.tensors, gradients.flags, strict=True
            )
            if is_here
        ]
        if ends:
            torch.autograd.backward([output for output, _ in ends], [gradient for _, gradient in ends])
        buffer.sending.wait()  # over long ago: the gradient that came back answers it
        buffer.outputs = buffer.arriving = buffer.sending = None

    # ------------------------------------------------------------------------------ communication

    def recv_activation(self, buffer: Buffer) -> None:
        """RecvActivation: post the receives that the previous stage's header announces."""
        assert self.previous is not None
        buffer.arriving = self.previous.receive()
        self._received[self.previous.peer] += 1

    def send_activation(self, buffer: Buffer) -> None:
        """SendActivation: start sending the outputs; computation goes on."""
        assert self.next is not None and buffer.outputs is not None
        show(self.next.peer, buffer.outputs.tensors)
        if buffer.sending is not None:
            buffer.sending.wait()
        buffer.sending = self.next.send(buffer.outputs)

    def recv_gradient(self, buffer: Buffer) -> None:
        """RecvGrad: post the receives; the header must describe exactly the outputs that need a gradient."""
        assert self.next is not None and buffer.outputs is not None
        show(self.next.peer, _with_gradient(buffer.outputs))
        buffer.arriving = self.next.receive()
        self._received[self.next.peer] += 1
        expected = [tuple(tensor.shape) for tensor in _with_gradient(buffer.outputs)]
        message = buffer.arriving.message
        here = zip(expected, message.tensors, message.flags, strict=False)
        if len(expected) != len(message.tensors) or any(f and s != tuple(t.shape) for s, t, f in here):
            got = [tuple(tensor.shape) for tensor in message.tensors]
            raise RuntimeError(
                f"stage {self.module.stage_id} sent outputs of shapes {expected} that need a gradient and "
                f"received gradients of shapes {got}; the two stages do not run the same micro-batch (§9.10)"
            )

    def send_gradient(self, buffer: Buffer) -> None:
        """SendGrad: start sending what backward left on the received leaves; None is told, not sent."""
        assert self.previous is not None and buffer.inputs is not None
        leaves = [t for t, flag in zip(buffer.inputs.tensors, buffer.inputs.flags, strict=True) if flag]
        tensors = tuple(leaf.new_empty(0) if leaf.grad is None else leaf.grad for leaf in leaves)
        flags = tuple(leaf.grad is not None for leaf in leaves)
        show(self.previous.peer, tensors)
        while len(self._gradient_sends) >= _GRADIENT_SENDS:
            self._gradient_sends.popleft().wait()
        self._gradient_sends.append(self.previous.send(Message(tensors, flags, is_tuple=True)))
        buffer.inputs = None

    def share_result(self, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The last stage's `values` on every stage: handed up from stage to stage, with their dtypes."""
        if self.next is not None:
            values = self.next.receive().wait().tensors
        if self.previous is not None:
            self.previous.send(Message(values, (False,) * len(values), is_tuple=True)).wait()
        return values

    def announce(self, error: Exception) -> Exception:
        """Send the failure to both neighbours, without waiting, and return what to raise.

        A neighbour that listens finds the error in place of a header and passes it on.
        """
        cause = error.error if isinstance(error, NeighbourError) else error
        told = cause
        if not isinstance(cause, (ValueError, TypeError, RemoteError)):
            told = RemoteError(f"stage {self.module.stage_id} failed with {type(cause).__name__}: {cause}")
        self._news = []  # kept: nobody may ever take them
        for link in self._links():
            with suppress(RuntimeError):  # that neighbour is gone; the other one still wants to know
                self._news.append(link.send_error(told))
        return cause

    def drain(self, error: Exception) -> None:
        """Take what the neighbours still send: one that listens no more has sends left that end only so.

        Its own error ends them early.
        """
        heard_from = error.peer if isinstance(error, NeighbourError) else None
        for link in self._links():
            if link.peer != heard_from:
                self._take_the_rest(link)

    def _links(self) -> list[StageLink]:
        return [link for link in (self.previous, self.next) if link is not None]

    def _take_the_rest(self, link: StageLink) -> None:
        total = self.num_micro_batches if link is self.previous or torch.is_grad_enabled() else 0
        for _ in range(total - self._received[link.peer]):
            try:
                link.receive().wait()
            except (RuntimeError, NeighbourError):  # it failed too, so it waits for nobody
                return


def _as_message(outputs: Any, layer: str, device: torch.device) -> Message:
    """A stage's output, checked before anything is sent: a tensor or a tuple of tensors."""
    is_tuple = isinstance(outputs, (tuple, list))
    tensors = tuple(outputs) if is_tuple else (outputs,)
    for index, tensor in enumerate(tensors):
        place = f"element {index} of the output" if is_tuple else "the output"
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{place} of {layer} is a {type(tensor).__name__}; between stages only a tensor or a tuple "
                f"of tensors can travel, so return those there or keep the layer inside a stage (§9.10)"
            )
        if not can_travel(tensor.dtype) or tensor.layout != torch.strided:
            raise TypeError(
                f"{place} of {layer} is {tensor.dtype}, {tensor.layout}; it cannot travel (§9.10)"
            )
        if tensor.device != device:
            raise TypeError(
                f"{place} of {layer} is on {tensor.device} and the stage on {device}; make it there (§9.10)"
            )
    flags = tuple(torch.is_grad_enabled() and tensor.requires_grad for tensor in tensors)
    return Message(tensors, flags, is_tuple)


def _with_gradient(message: Message) -> list[Tensor]:
    return [tensor for tensor, flag in zip(message.tensors, message.flags, strict=True) if flag]


def _unwrapped(tensors: tuple[Tensor, ...], is_tuple: bool) -> Any:
    return tensors if is_tuple else tensors[0]
