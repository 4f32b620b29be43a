"""What the trace files of a job mean, in sentences: who waits, for whom, and who holds up all others (§9.10).

`report` is what `ds-lite hang` prints below the table. It says no more than the rows know: a collective
inside a pass is not in them, so there a rank "may wait".
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from ds_lite.hang import LAYERS, MESSAGE, Job, Wait, cycles, moved, roots, waits
from ds_lite.trace_file import Event, Row

_NOTE_WIDTH = 120
_SHOWN = 8  # of more ranks the first and the last are named
# What waits for a message, and the send that meets it; a pass waits for what its receive has posted.
_SENDS = {
    "RecvActivation": "SendActivation",
    "ForwardPass": "SendActivation",
    "RecvGrad": "SendGrad",
    "BackwardPass": "SendGrad",
}
_MAKES = {"SendActivation": "ForwardPass", "SendGrad": "BackwardPass"}
_GONE = {
    "vanished": "vanished",
    "failed": "failed",
    "stuck": "gave up at the time limit",
    "ended": "ended by SIGTERM",
}


def report(before: Job, job: Job) -> list[str]:
    """The lines for two looks at one job; if it moved in between, they say only that.

    Units: seconds, to a tenth.
    """
    lines = [_verdict(before, job)]
    if lines[0].startswith("not stuck"):
        return lines
    found = waits(job)
    lines += _waiting(job, found)
    for circle in cycles(found):
        unless = any(found[rank].kind == LAYERS for rank in circle)
        lines.append(
            f"cycle: {' -> '.join(map(str, circle))}; none of these can be the first to go on"
            + (", unless one that may wait still computes" if unless else "")
        )
    lines += _roots(job, found)
    lines += _mismatches(job, found)
    if not found:
        state = _state(job, list(job.rows))
        lines.append(
            f"none waits for another that the rows know of: {state}{_where_to_look(job, list(job.rows))}"
        )
    return lines


def _verdict(before: Job, job: Job) -> str:
    status = {rank: row.status for rank, row in job.rows.items()}
    if set(status.values()) == {"done"}:
        return f"not stuck: {_ranks(status)} finished"
    if not job.is_running:
        return "over: no rank runs any more"
    gone = [rank for rank in status if status[rank] not in ("running", "done")]
    but = f"; no more: {_state(job, gone)}" if gone else ""
    going = moved(before, job)
    who = f"not stuck: {_ranks(going)} moved on" if going else "stuck: no rank moved"
    return f"{who} within {job.now - before.now:.1f} s{but}"


# ------------------------------------------------------------------------------------ who waits for whom


def _waiting(job: Job, found: Mapping[int, Wait]) -> Iterator[str]:
    """A sentence for each rank that waits for a message, and for all that wait alike in a collective."""
    alike: dict[tuple[object, ...], list[Wait]] = {}
    for rank, wait in found.items():
        row = job.rows[rank]
        where = rank if wait.kind == MESSAGE else (row.instruction, row.micro_batch_id, wait.group)
        alike.setdefault((where, wait.peers, row.status), []).append(wait)
    for together in alike.values():
        yield _sentence(job, together)


def _sentence(job: Job, together: Sequence[Wait]) -> str:
    wait, ranks = together[0], [wait.rank for wait in together]
    row = job.rows[wait.rank]
    may = "may " if wait.kind == LAYERS else ""
    if row.status == "running":
        verb = "wait" if may or len(ranks) > 1 else "waits"
        who = f"{_named(job, ranks)} {may}{verb} {_longest(job, ranks)} in {_instruction(row)}"
    else:
        who = f"{_named(job, ranks)} {_GONE[row.status]} in {_instruction(row)}, {may}waiting"
    if not wait.peers:
        return (
            f"{who}: all that meet there ({_ranks(wait.group)}) have come; one may be busy with its own part"
        )
    text = f"{who} for {_state(job, wait.peers)}"
    if wait.kind == MESSAGE:
        return text + _shapes(row, job.rows.get(row.peer))
    here = [rank for rank in wait.group if rank not in wait.peers]
    return text + (f"; {_ranks(here)} came there" if set(here) - set(ranks) else "")


def _shapes(row: Row, peer: Row | None) -> str:
    there = peer.shape if peer is not None else ()
    if not row.shape and not there:
        return ""
    return f"; shape {_shape(row.shape)} here, {_shape(there)} there"


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "not announced"


def _roots(job: Job, found: Mapping[int, Wait]) -> Iterator[str]:
    alike: dict[tuple[object, ...], list[int]] = {}
    held_up = roots(found)
    for rank, waiting in held_up.items():
        row = job.rows.get(rank)
        doing = (row.status, row.instruction, row.micro_batch_id) if row is not None else ()
        alike.setdefault((tuple(waiting), doing), []).append(rank)
    for ranks in alike.values():
        who = f"{_state(job, ranks)}{_before(job, ranks)}"
        verb = "holds" if len(ranks) == 1 else "hold"
        yield f"root: {who}; {verb} up {_ranks(held_up[ranks[0]])}{_where_to_look(job, ranks)}"


def _before(job: Job, ranks: Sequence[int]) -> str:
    """Their last words; or, if they are in an instruction, how long it took until now: slow or stuck?"""
    row = job.rows.get(ranks[0])
    if row is None or row.status != "running":
        return f" ({row.note[:_NOTE_WIDTH]})" if row is not None and row.note else ""
    took = [
        event.end - event.start
        for rank in ranks
        for event in job.events.get(rank, [])
        if event.instruction == row.instruction
    ]
    return f"; earlier ones took at most {max(took):.2g} s" if took else ""


def _where_to_look(job: Job, ranks: Sequence[int]) -> str:
    """What the rows do not say about ranks that wait for none, and the processes that could."""
    rows = [job.rows[rank] for rank in ranks if rank in job.rows and job.rows[rank].status == "running"]
    if not rows:
        return ""
    pids = (
        f"; look at {'pid' if len(rows) == 1 else 'pids'} {', '.join(str(row.pid) for row in rows[:_SHOWN])}"
    )
    inside = len(rows) > 1 and rows[0].instruction in ("ForwardPass", "BackwardPass")
    if inside and set(ranks) <= set(job.mates(rows[0], ("seq", "model"))):
        return f"; in their layers one may wait for another{pids}"
    return pids


# ------------------------------------------------------------------------------ what does not fit together


def _mismatches(job: Job, found: Mapping[int, Wait]) -> Iterator[str]:
    for rank, wait in found.items():
        if wait.kind != MESSAGE or not wait.peers:
            continue
        row, peer = job.rows[rank], wait.peers[0]
        back = found.get(peer)
        if back is not None and back.kind == MESSAGE and back.peers == (rank,):
            if rank < peer:
                yield f"mismatch: {_pair(job, row, job.rows[peer])}"
        elif (sent := _sent(job, row, peer)) is not None:
            yield (
                f"mismatch: rank {peer} finished {sent.instruction} of micro-batch {sent.micro_batch_id} "
                f"{job.now - sent.end:.1f} s ago, yet rank {rank} waits for it in {_instruction(row)}: "
                f"it is lost, or an earlier receive took it"
            )


def _pair(job: Job, one: Row, other: Row) -> str:
    """Why two ranks that wait for each other do not come together."""
    what = f"rank {one.rank} is in {_instruction(one)}, rank {other.rank} in {_instruction(other)}"
    sends = [row.instruction.startswith("Send") for row in (one, other)]
    receives = [row.instruction in _SENDS for row in (one, other)]
    if all(sends):
        return f"both send to each other: {what}; one of them has to receive first"
    if all(receives):
        return f"both receive from each other: {what}; {_unsent(job, one, other)}"
    receiver, sender = (one, other) if receives[0] else (other, one)
    if _SENDS.get(receiver.instruction, sender.instruction) != sender.instruction:
        return f"another kind of message: {what}"
    if one.micro_batch_id != other.micro_batch_id:
        return f"another micro-batch: {what}; one of them left one out, or did it twice"
    if one.shape and other.shape and one.shape != other.shape:
        return f"another shape: {what}; {_shape(one.shape)} and {_shape(other.shape)}"
    return f"none that the rows know: {what}, and they fit; the message is under way, look at the network"


def _unsent(job: Job, one: Row, other: Row) -> str:
    """Who of two that wait for each other's message has made its own and keeps it."""
    words = []
    for sender, receiver in ((one, other), (other, one)):
        send = _SENDS[receiver.instruction]
        done = {event.instruction for event in job.batch(sender.rank) if _is_of(event, receiver)}
        if _MAKES[send] in done and send not in done:
            words.append(f"rank {sender.rank} has done {_MAKES[send]} of {_batch(receiver)}, but not {send}")
    return " and ".join(words) or "one of them has to send first"


def _is_of(event: Event, row: Row) -> bool:
    return event.micro_batch_id == row.micro_batch_id >= 0


def _sent(job: Job, row: Row, peer: int) -> Event | None:
    """The finished send that `row` still waits for, if its peer's events hold it."""
    if row.micro_batch_id < 0:
        return None
    key = (_SENDS.get(row.instruction), row.micro_batch_id)
    last = [
        event.end
        for event in job.events.get(row.rank, [])
        if (event.instruction, event.micro_batch_id) == (row.instruction, row.micro_batch_id)
    ]
    for event in reversed(job.events.get(peer, [])):
        if event.start < max(last, default=0.0):  # it belongs to the batch before
            return None
        if (event.instruction, event.micro_batch_id) == key:
            return event
    return None


# --------------------------------------------------------------------------------------------------- words


def _state(job: Job, ranks: Collection[int]) -> str:
    """These ranks and what they do; those that do the same share the words."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for rank in ranks:
        row = job.rows.get(rank)
        key = () if row is None else (row.status, row.instruction, row.micro_batch_id)
        alike.setdefault(key, []).append(rank)
    return ", and ".join(f"{_named(job, same)}, {_doing(job, same)}" for same in alike.values())


def _doing(job: Job, ranks: Sequence[int]) -> str:
    row, one = job.rows.get(ranks[0]), len(ranks) == 1
    if row is None:
        return f"of which the folder has no trace file{'' if one else 's'}"
    if row.status == "done":
        return f"which {'has' if one else 'have'} finished"
    where = f"in {_instruction(row)}" if row.instruction else "in the caller's code"
    if row.status != "running":
        return f"which {_GONE[row.status]} {where}"
    verb = f"which {'is' if one else 'are'} {where}"
    if row.instruction:
        return f"{verb} ({_longest(job, ranks)})"
    newest = [job.events[rank][-1] for rank in ranks if job.events.get(rank)]
    if not newest:
        return verb
    last = min(newest, key=lambda event: event.end)
    return f"{verb} ({job.now - last.end:.1f} s, since {last.instruction})"


def _longest(job: Job, ranks: Sequence[int]) -> str:
    return f"{max(job.now - job.rows[rank].since for rank in ranks):.1f} s"


def _named(job: Job, ranks: Sequence[int]) -> str:
    """Ranks with the stage that they are all of, if the job has stages."""
    rows = [job.rows[rank] for rank in ranks if rank in job.rows]
    stages = {row.stage_id for row in rows}
    many = len({row.stage_id for row in job.rows.values()}) > 1
    return _ranks(ranks) + (
        f" (stage {stages.pop()})" if many and len(stages) == 1 and len(rows) == len(ranks) else ""
    )


def _instruction(row: Row) -> str:
    return row.instruction + (f" of {_batch(row)}" if row.micro_batch_id >= 0 else "")


def _batch(row: Row) -> str:
    return f"micro-batch {row.micro_batch_id}"


def _ranks(ranks: Collection[int]) -> str:
    """
    >>> _ranks([1]), _ranks([0, 2, 3])
    ('rank 1', 'ranks 0, 2 and 3')
    """
    words = [str(rank) for rank in ranks]
    if len(words) == 1:
        return f"rank {words[0]}"
    if len(words) > _SHOWN:
        return f"{len(words)} ranks, {words[0]} to {words[-1]}"
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"
