"""§9.11 The grid's groups, the ledger and the chapter's send and recv, on real processes.

Guards against: a group over the wrong axis, global ranks taken for group ranks, a name of the protocol that
is missing, traffic booked on the wrong axis or not at all, messages to a stage that is no neighbour."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tolerance import EXACT, assert_close
from torch import Tensor, nn

import ds_lite
from ds_lite import comm, trace
from ds_lite.grid import PipelineParallelGrid
from ds_lite.pipe import p2p
from ds_lite.pipe.module import PipelineModule
from ds_lite.topology import ProcessTopology

F64 = torch.float64
LAYOUTS = [
    (["pipe", "data"], [2, 2]),
    (["data", "pipe"], [2, 2]),
    (["pipe"], [4]),
    (["data"], [4]),
    (["pipe", "model"], [2, 2]),
    (["model", "pipe", "data"], [2, 1, 2]),
    (["data", "seq"], [2, 2]),
    (["pipe", "data", "seq", "model"], [1, 2, 1, 2]),
]

# The names of SEMANTICS 4.3, and ours for the sequence axis: which axes each family speaks about.
FAMILIES = {
    "pipe_parallel": ("pipe",),
    "pipeline_model_parallel": ("pipe",),
    "data_parallel": ("data",),
    "model_parallel": ("pipe", "model"),
    "slice_parallel": ("model",),
    "tensor_model_parallel": ("model",),
    "sequence_parallel": ("seq",),
    "sequence_data_parallel": ("data", "seq"),
}


def expected_ranks(axes: list[str], dims: list[int], rank: int, wanted: tuple[str, ...]) -> list[int]:
    """The ranks that differ from mine on the wanted axes only: a slice of a table of all ranks."""
    table = np.arange(np.prod(dims)).reshape(dims)
    place = np.unravel_index(rank, dims)
    index = tuple(slice(None) if axis in wanted else int(place[i]) for i, axis in enumerate(axes))
    return sorted(np.atleast_1d(table[index]).flatten().tolist())


def _names(rank: int) -> None:
    for axes, dims in LAYOUTS:
        topology = ProcessTopology(axes, dims)
        grid = PipelineParallelGrid(topology)
        place = dict(zip(axes, (int(i) for i in np.unravel_index(rank, dims))))
        assert grid.topology() is topology
        assert grid.get_global_rank() == rank
        assert grid.get_stage_id() == place.get("pipe", 0)
        assert grid.get_data_parallel_id() == place.get("data", 0)
        for family, wanted in FAMILIES.items():
            what = f"{family} of {axes} {dims}"
            ranks = expected_ranks(axes, dims, rank, wanted)
            group = getattr(grid, f"get_{family}_group")()
            assert dist.get_process_group_ranks(group) == ranks, what
            assert getattr(grid, f"get_{family}_world_size")() == len(ranks), what
            assert getattr(grid, f"get_{family}_rank")() == ranks.index(rank) == dist.get_rank(group), what
        assert grid.get_data_parallel_group_ranks() == expected_ranks(axes, dims, rank, ("data",))
        column = expected_ranks(axes, dims, rank, ("pipe",))
        assert [grid.stage_to_global(stage) for stage in range(len(column))] == column
        for outside in (-1, len(column)):
            with pytest.raises(ValueError, match=r"\(§9.11\)$"):
                grid.stage_to_global(outside)
        if "data" in place and "pipe" in place:
            other = (place["data"] + 1) % topology.get_dim("data")
            expected = topology.get_rank(**{**place, "pipe": 0, "data": other})
            assert grid.stage_to_global(0, data=other) == expected


def test_every_name_of_the_protocol_answers_right_on_every_rank(world: Any) -> None:
    world(_names, 4)


def _sums(rank: int) -> int:
    """Each group adds up powers of two, so a sum tells exactly who took part."""
    without_zero = 0
    for axes, dims in LAYOUTS:
        grid = PipelineParallelGrid(ProcessTopology(axes, dims))
        for family, wanted in FAMILIES.items():
            ranks = expected_ranks(axes, dims, rank, wanted)
            without_zero += len(ranks) > 1 and 0 not in ranks
            value = torch.tensor([2.0**rank], dtype=F64)
            with comm.record() as ledger:
                comm.all_reduce(value, group=getattr(grid, f"get_{family}_group")())
            assert value.item() == sum(2.0**member for member in ranks), f"{family} of {axes} {dims}"
            assert [key[:2] for key in ledger.rows] == (
                [("*".join(axis for axis in wanted if grid.size(axis) > 1), "all_reduce")]
                if len(ranks) > 1
                else []
            ), f"{family} of {axes} {dims}"
        everyone = torch.tensor([2.0**rank], dtype=F64)
        with comm.record() as ledger:
            comm.all_reduce(everyone)
        assert everyone.item() == 15.0 and list(ledger.rows) == [("world", "all_reduce", "")]
    return without_zero


def test_every_group_sums_over_its_members_and_books_on_its_axis(world: Any) -> None:
    counts = world(_sums, 4)
    assert counts[0] == 0 and min(counts[1:]) >= 3  # groups that do not hold rank 0 were among them


def _default_grid(rank: int) -> tuple[int, int, int]:
    grid = PipelineParallelGrid()
    return grid.get_data_parallel_world_size(), grid.get_data_parallel_rank(), grid.get_stage_id()


@pytest.mark.parametrize("nprocs", [1, 3])
def test_without_a_topology_all_ranks_are_replicas(world: Any, nprocs: int) -> None:
    assert world(_default_grid, nprocs) == [(nprocs, rank, 0) for rank in range(nprocs)]


def _make(rank: int, axes: list[str], dims: list[int]) -> None:
    PipelineParallelGrid(ProcessTopology(axes, dims))


@pytest.mark.parametrize(
    "axes,dims,match",
    [
        (
            ["pipe", "data"],
            [2, 1],
            r"pipe=2 \* data=1 = 2 ranks does not fit a world of 3.*start 2 pro.*§9.11",
        ),
        (["pipe", "row"], [3, 1], r"unknown axes \['row'\].*pipe, data, seq and model \(§9.11\)"),
    ],
)
def test_a_grid_that_does_not_fit_is_refused_on_every_rank(
    world: Any, axes: list[str], dims: list[int], match: str
) -> None:
    world.raises(ValueError, match, _make, 3, axes, dims)


def _slow_to_connect(rank: int) -> None:
    """The last rank connects 0.3 s after the others, as on a busy machine."""
    connect = dist.new_group

    def late(*args: Any, **kwargs: Any) -> Any:
        if rank == 2:
            time.sleep(0.3)
        group = connect(*args, **kwargs)
        if rank == 2:
            time.sleep(0.3)
        return group

    with mock.patch.object(dist, "new_group", late), comm.record() as ledger:
        start = time.perf_counter()
        comm.new_group([0, 2], "data")
        spent = time.perf_counter() - start
    assert spent > 0.5 or rank == 1, f"rank {rank} had its group after {spent:.2f} s, before rank 2 had it"
    assert not ledger.rows


def test_no_rank_has_a_group_before_all_its_ranks_are_connected(world: Any) -> None:
    """A rank that leaves at once, with an error of its own, broke the connecting of slower ranks."""
    world(_slow_to_connect, 3)


# ------------------------------------------------------------------------------------------ the ledger

SIZE = 12  # elements of one rank's tensor; divisible by 1 to 4
BYTES = SIZE * 8


def _tensor(rank: int, size: int = SIZE) -> Tensor:
    return torch.arange(size, dtype=F64) + 100 * rank


def _collectives(rank: int) -> None:
    n = comm.get_world_size()
    group = comm.new_group(list(range(n)), "data")
    all_ranks = [_tensor(other) for other in range(n)]

    def check(
        operation: str, payload: int, sent: int, act: Callable[[bool], tuple[Any, Tensor, Tensor]]
    ) -> None:
        """Twice: blocking, and with a handle; `act` gives the handle, what came out and what is right."""
        for async_op in (False, True):
            with comm.record() as ledger, trace.current().span("ReduceGrads"):
                handle, got, expected = act(async_op)
            assert (handle is not None) == async_op, operation
            if async_op:
                handle.wait()
            assert_close(got, expected, EXACT, f"{operation} on {n} ranks")
            row = ledger.total("data", operation, "ReduceGrads")
            counts = (row.calls, row.payload, row.sent)
            wanted = (1, payload, sent) if n > 1 else (0, 0, 0)
            assert counts == wanted, f"{operation} on {n} ranks: {counts}, not {wanted}"
            assert len(ledger.rows) == (n > 1)

    def all_reduce(async_op: bool) -> tuple[Any, Tensor, Tensor]:
        mine = _tensor(rank)
        return comm.all_reduce(mine, group=group, async_op=async_op), mine, torch.stack(all_ranks).sum(0)

    def broadcast(async_op: bool) -> tuple[Any, Tensor, Tensor]:
        mine = _tensor(rank)
        handle = comm.broadcast(mine, src=n - 1, group=group, async_op=async_op)
        return handle, mine, all_ranks[n - 1]

    def all_gather(async_op: bool) -> tuple[Any, Tensor, Tensor]:
        out = torch.empty(n * SIZE, dtype=F64)
        handle = comm.all_gather_into_tensor(out, _tensor(rank), group=group, async_op=async_op)
        return handle, out, torch.cat(all_ranks)

    def reduce_scatter(async_op: bool) -> tuple[Any, Tensor, Tensor]:
        out = torch.empty(SIZE // n, dtype=F64)
        handle = comm.reduce_scatter_tensor(out, _tensor(rank), group=group, async_op=async_op)
        return handle, out, torch.stack(all_ranks).sum(0).chunk(n)[rank]

    def all_to_all(async_op: bool) -> tuple[Any, Tensor, Tensor]:
        out = torch.empty(SIZE, dtype=F64)
        handle = comm.all_to_all_single(out, _tensor(rank), group=group, async_op=async_op)
        return handle, out, torch.cat([other.chunk(n)[rank] for other in all_ranks])

    check("all_reduce", BYTES, 2 * (n - 1) * BYTES // n, all_reduce)
    check("broadcast", BYTES, BYTES if rank == n - 1 else 0, broadcast)
    check("all_gather", n * BYTES, (n - 1) * BYTES, all_gather)
    check("reduce_scatter", BYTES, (n - 1) * BYTES // n, reduce_scatter)
    check("all_to_all", BYTES, (n - 1) * BYTES // n, all_to_all)


@pytest.mark.parametrize("nprocs", [1, 2, 3, 4])
def test_collectives_are_right_and_booked_by_their_formulas(world: Any, nprocs: int) -> None:
    world(_collectives, nprocs)


def _uneven_exchange(rank: int) -> None:
    """Rank i sends i + j + 1 rows of three elements to rank j; only what leaves is sent."""
    group = comm.new_group([0, 1, 2], "data")
    rows_to = [rank + j + 1 for j in range(3)]
    rows_from = [j + rank + 1 for j in range(3)]
    x = torch.full((sum(rows_to), 3), float(rank), dtype=F64)
    out = torch.empty(sum(rows_from), 3, dtype=F64)
    with comm.record() as ledger:
        comm.all_to_all_single(out, x, rows_from, rows_to, group=group)
    expected = [torch.full((rows, 3), float(j), dtype=F64) for j, rows in enumerate(rows_from)]
    assert_close(out, torch.cat(expected), EXACT)
    row = ledger.total("data", "all_to_all")
    away = sum(rows_to) - rows_to[rank]
    assert (row.calls, row.payload, row.sent) == (1, sum(rows_to) * 24, away * 24)


def test_an_uneven_exchange_counts_the_rows_that_leave(world: Any) -> None:
    world(_uneven_exchange, 3)


def _other_calls(rank: int) -> None:
    group = comm.new_group([0, 1, 2], "pipe")
    with comm.record() as outer:
        with comm.record() as inner:
            gathered = [torch.empty(SIZE, dtype=F64) for _ in range(3)]
            comm.all_gather(gathered, _tensor(rank), group=group)
            comm.barrier(group)
            if rank == 0:
                comm.send(_tensor(0), dst=2, group=group)
            if rank == 2:
                x = torch.empty(SIZE, dtype=F64)
                comm.recv(x, src=0, group=group)
                assert_close(x, _tensor(0), EXACT)
        comm.barrier(group)
    comm.barrier(group)  # no ledger is open any more
    for other in range(3):
        assert_close(gathered[other], _tensor(other), EXACT)
    rows = {key[1]: (row.calls, row.payload, row.sent) for key, row in inner.rows.items()}
    ends = {0: {"send": (1, BYTES, BYTES)}, 1: {}, 2: {"recv": (1, BYTES, 0)}}
    assert rows == {"all_gather": (1, 3 * BYTES, 2 * BYTES), "barrier": (1, 0, 0), **ends[rank]}
    assert {key[0] for key in outer.rows} == {"pipe"}
    assert outer.total("pipe", "barrier").calls == 2 and inner.total("pipe", "barrier").calls == 1
    assert inner.total().payload == outer.total().payload == sum(row[1] for row in rows.values())


def test_point_to_point_lists_and_barriers_are_booked_too(world: Any) -> None:
    world(_other_calls, 3)


WIDTH, BATCH, MICRO_BATCHES = 3, 2, 3


def _a_step(rank: int) -> None:
    """One train_batch on pp=2 x dp=2: every message of it, by instruction."""
    layers = [nn.Linear(WIDTH, WIDTH, dtype=F64) for _ in range(2)]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine, *_ = ds_lite.initialize(model=model, config=config)
    x = torch.ones(BATCH, WIDTH, dtype=F64)
    with comm.record() as ledger:
        engine.train_batch(iter([(x, x)] * MICRO_BATCHES))
    activation = BATCH * WIDTH * 8
    wanted = {
        ("send", "SendActivation"): (MICRO_BATCHES, MICRO_BATCHES * activation),
        ("recv", "RecvGrad"): (MICRO_BATCHES, 0),
        ("recv", "RecvActivation"): (0, 0),
        ("send", "SendGrad"): (0, 0),
    }
    if engine.stage_id == 1:
        wanted = {
            ("send", "SendGrad"): (MICRO_BATCHES, MICRO_BATCHES * activation),
            ("recv", "RecvActivation"): (MICRO_BATCHES, 0),
            ("recv", "RecvGrad"): (0, 0),
            ("send", "SendActivation"): (0, 0),
        }
    for (operation, instruction), (calls, sent) in wanted.items():
        row = ledger.total("pipe", operation, instruction)
        assert (row.calls, row.sent) == (calls, sent), (operation, instruction, row)
        assert ledger.total("pipe", f"{operation}_header", instruction).calls == calls
    reduced = ledger.total("data", "all_reduce", "ReduceGrads")
    parameters = WIDTH * WIDTH + WIDTH
    assert (reduced.calls, reduced.payload) == (1, (parameters + 2) * 8)  # and a flag for each of the two
    assert ledger.total("tied").calls == 0


def test_a_training_step_sends_what_the_chapter_says(world: Any) -> None:
    world(_a_step, 4)


# ------------------------------------------------------------------------- the chapter's send and recv


def _message(stage: int, step: int) -> Tensor:
    return torch.arange(6, dtype=F64).reshape(2, 3) + 10 * stage + 100 * step


def _ring(rank: int, axes: list[str], dims: list[int]) -> None:
    """Down the pipe, up the pipe, and around the end in both directions."""
    grid = PipelineParallelGrid(ProcessTopology(axes, dims))
    stages, here = grid.get_pipe_parallel_world_size(), grid.get_stage_id()
    replica = grid.get_data_parallel_id()
    for step, direction in enumerate((1, -1)):
        to, source = (here + direction) % stages, (here - direction) % stages
        got = torch.empty(2, 3, dtype=F64)
        if here == 0:  # starts the ring; then everyone hands on
            p2p.send(_message(here, step) + replica * 1000, to, grid=grid)
            p2p.recv(got, source, grid=grid)
        else:
            p2p.recv(got, source, grid=grid)
            p2p.send(_message(here, step) + replica * 1000, to, grid=grid)
        assert_close(got, _message(source, step) + replica * 1000, EXACT, f"stage {here}, step {step}")


@pytest.mark.parametrize(
    "axes,dims", [(["pipe"], [4]), (["pipe", "data"], [2, 2]), (["data", "pipe"], [2, 2])]
)
def test_tensors_go_down_up_and_around_the_pipe(world: Any, axes: list[str], dims: list[int]) -> None:
    world(_ring, 4, axes, dims)


def _kinds(rank: int) -> None:
    """Strides, dtypes and empty shapes; the grid is the one the script has named."""
    with pytest.raises(ValueError, match=r"no grid is known; pass grid=engine.grid .*\(§9.11\)"):
        p2p.send(torch.ones(1), 1 - rank)
    p2p.init_process_groups(PipelineParallelGrid(ProcessTopology(["pipe"], [2])))
    try:
        sent = [
            torch.arange(12.0).reshape(3, 4).t(),
            torch.arange(12.0).reshape(3, 4)[:, 1:3],
            torch.tensor(2.5).expand(4, 3),
            torch.tensor(7),
            torch.empty(0, 3),
            torch.tensor([True, False, True]),
            torch.tensor([float("nan"), -0.0]).bfloat16(),
            torch.ones(3, requires_grad=True),
        ]
        for tensor in sent:
            whole = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
            strided = whole[..., 1] if tensor.dim() else whole[1]
            plain = torch.zeros(tensor.shape, dtype=tensor.dtype)
            for landing in (strided, plain):
                if rank == 0:
                    p2p.send(tensor, 1)
                else:
                    p2p.recv(landing, 0)
                    expected = tensor.detach()
                    same = (landing == expected) | (landing != landing) & (expected != expected)
                    assert bool(same.all()), f"{tensor} arrived as {landing}"
            assert not bool(whole[..., 0].any() if tensor.dim() else whole[0])  # the gaps stay as they were
    finally:
        p2p.init_process_groups(None)  # type: ignore[arg-type]


def test_any_stride_and_dtype_can_be_sent_and_received(world: Any) -> None:
    world(_kinds, 2)


def _refused(rank: int, dims: list[int], asynchronous: bool) -> None:
    grid = PipelineParallelGrid(ProcessTopology(["pipe", "data"], dims))
    here = grid.get_stage_id()
    if asynchronous:
        p2p.send(torch.ones(1), (here + 1) % dims[0], async_op=True, grid=grid)
    strangers = [stage for stage in range(-1, dims[0] + 1) if stage not in _neighbours(here, dims[0])]
    for call in (p2p.send, p2p.recv):
        for stage in strangers[1:]:
            with pytest.raises(ValueError, match=rf"stage {here} of {dims[0]} cannot talk to stage {stage}"):
                call(torch.ones(1), stage, grid=grid)
    p2p.recv(torch.ones(1), strangers[0], grid=grid)


def _neighbours(here: int, stages: int) -> set[int]:
    return {(here + 1) % stages, (here - 1) % stages} - {here}


@pytest.mark.parametrize("dims", [[4, 1], [2, 2], [1, 4]])
def test_only_neighbours_talk(world: Any, dims: list[int]) -> None:
    world.raises(
        ValueError, r"cannot talk to stage -1; only neighbours.*\(§9.11\)$", _refused, 4, dims, False
    )


def test_an_asynchronous_send_is_refused_with_the_way_out(world: Any) -> None:
    world.raises(
        ValueError, r"async_op=True is not offered.*isend and irecv \(§9.11\)", _refused, 4, [4, 1], True
    )
