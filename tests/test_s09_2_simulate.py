"""§9.2 Simulator. Guards against: wrong bubble, unseen deadlock, lost message, early re-use."""

import time
from itertools import product

import pytest

from ds_lite.pipe.instructions import (
    BackwardPass,
    BufferOpInstruction,
    ForwardPass,
    LoadMicroBatch,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
)
from ds_lite.pipe.schedule import DataParallelSchedule, GPipeSchedule, InferenceSchedule, TrainSchedule
from ds_lite.pipe.simulate import simulate, simulate_streams
from ds_lite.pipe.timeline import Span

SIZES = list(product(range(1, 9), range(1, 9)))  # (S, m)
PIPELINES = [TrainSchedule, GPipeSchedule, InferenceSchedule]
SENDS = ["rendezvous", "buffered"]


class SendsFirst(TrainSchedule):
    """Broken on purpose: in a backward slot it sends before it receives, as its neighbour does."""

    def steps(self):
        for step in super().steps():
            yield sorted(step, key=lambda i: not isinstance(i, SendActivation))


class OneBufferTooFew(TrainSchedule):
    """Broken on purpose: the off-by-one of field report B21."""

    def num_pipe_buffers(self):
        return max(1, super().num_pipe_buffers() - 1)


class ForgetsTheLastSend(TrainSchedule):
    """Broken on purpose: stage 0 never sends its last activation."""

    def steps(self):
        for step in super().steps():
            yield [
                i for i in step if not (self.is_first_stage and i == SendActivation(self._last(), self._id()))
            ]

    def _id(self):
        return self.micro_batches - 1

    def _last(self):
        return self._id() % self.num_pipe_buffers()


def streams_of(schedule_class, num_stages, num_micro_batches):
    return [
        [i for step in schedule_class(num_micro_batches, num_stages, stage) for i in step]
        for stage in range(num_stages)
    ]


def without_micro_batch_ids(stream):
    return [type(i)(i.buffer_id) if isinstance(i, BufferOpInstruction) else i for i in stream]


@pytest.mark.parametrize("sends", SENDS)
@pytest.mark.parametrize("schedule_class", [*PIPELINES, DataParallelSchedule])
def test_no_schedule_deadlocks_loses_a_message_or_overwrites_a_buffer(schedule_class, sends):
    for (num_stages, num_micro_batches), transfer in product(SIZES, [0.0, 0.3]):
        run = simulate(schedule_class, num_stages, num_micro_batches, transfer=transfer, sends=sends)
        assert run.deadlock is None and not run.unreceived and not run.violations
        assert run.is_clean


def test_up_to_ten_micro_batches_on_six_stages_run_with_blocking_sends():  # field report B21
    for num_stages, num_micro_batches in product(range(1, 7), range(1, 11)):
        for schedule_class in PIPELINES:
            assert simulate(schedule_class, num_stages, num_micro_batches).is_clean


@pytest.mark.parametrize("backward", [1.0, 2.0])
@pytest.mark.parametrize("schedule_class", PIPELINES)
def test_the_bubble_is_the_formula_of_the_chapter(schedule_class, backward):
    for num_stages, num_micro_batches in SIZES:
        run = simulate(schedule_class, num_stages, num_micro_batches, backward=backward)
        assert run.bubble_of_total == pytest.approx((num_stages - 1) / (num_micro_batches + num_stages - 1))
        assert run.bubble_of_ideal == pytest.approx((num_stages - 1) / num_micro_batches)


def test_1f1b_shrinks_the_memory_and_not_the_bubble():
    for num_stages, num_micro_batches in SIZES:
        one_f, gpipe = (
            simulate(cls, num_stages, num_micro_batches) for cls in (TrainSchedule, GPipeSchedule)
        )
        assert one_f.end_time == gpipe.end_time == 2 * (num_micro_batches + num_stages - 1)
        assert gpipe.peak_live_buffers == (num_micro_batches,) * num_stages
        assert one_f.peak_live_buffers == tuple(
            min(num_stages - s, num_micro_batches) for s in range(num_stages)
        )


def test_busy_and_idle_fill_the_time_of_every_stage():
    run = simulate(TrainSchedule, 3, 5, forward=[1.0, 2.0, 1.5], backward=[2.0, 3.0, 1.0], transfer=0.25)
    assert run.busy == (15.0, 25.0, 12.5)
    assert [b + i for b, i in zip(run.busy, run.idle, strict=True)] == pytest.approx([run.end_time] * 3)


@pytest.mark.parametrize("sends", SENDS)
def test_one_micro_batch_takes_what_one_can_add_by_hand(sends):
    run = simulate(TrainSchedule, 2, 1, forward=1.0, backward=2.0, transfer=0.5, sends=sends)
    assert run.end_time == 1 + 0.5 + 1 + 2 + 0.5 + 2


def test_the_slowest_stage_sets_the_pace():
    assert simulate(TrainSchedule, 2, 2, forward=[1, 3], backward=[1, 3]).end_time == 1 + 2 * 6 + 1


def test_a_buffered_send_lets_its_stage_go_on_while_a_rendezvous_holds_it():
    streams = [
        [
            LoadMicroBatch(0, 0),
            ForwardPass(0, 0),
            SendActivation(0, 0),
            LoadMicroBatch(1, 1),
            ForwardPass(1, 1),
        ],
        [ForwardPass(1, 9), ForwardPass(1, 9), RecvActivation(0, 0)],
    ]
    ends = {sends: simulate_streams(streams, transfer=0.5, sends=sends).end_time for sends in SENDS}
    assert ends == {"rendezvous": 2 + 0.5 + 1, "buffered": 2}


def test_spans_tell_who_did_what_for_which_micro_batch():
    run = simulate(TrainSchedule, 2, 2, transfer=0.5)
    forward = next(span for span in run.spans if span.stage == 1 and span.label == "ForwardPass")
    assert forward == Span(1, "ForwardPass", "forward", 0, start=1.5, end=2.5, buffer_id=0)
    sends = [span for span in run.spans if span.label == "SendActivation"]
    receives = [span for span in run.spans if span.label == "RecvActivation"]
    assert [(s.start, s.end) for s in sends] == [(r.start, r.end) for r in receives]
    assert {span.kind for span in run.spans if span.label == "OptimizerStep"} == {"closing"}


def test_two_stages_that_both_send_first_are_reported_with_both_instructions():
    run = simulate(SendsFirst, 2, 2)
    assert [(wait.stage, wait.instruction, wait.peer) for wait in run.deadlock.core] == [
        (0, SendActivation(1, 1), 1),
        (1, SendGrad(0, 0), 0),
    ]
    assert str(run.deadlock) == (
        "deadlock: stage 0 SendActivation(buffer_id=1, micro_batch_id=1) waits for stage 1; "
        "stage 1 SendGrad(buffer_id=0, micro_batch_id=0) waits for stage 0"
    )
    assert not run.is_clean
    assert simulate(SendsFirst, 2, 2, sends="buffered").is_clean  # a small message hides the fault


def test_stages_that_wait_behind_a_deadlock_are_listed_after_its_core():
    deadlock = simulate(SendsFirst, 4, 8).deadlock
    assert [wait.stage for wait in deadlock.core] == [2, 3]
    assert [wait.stage for wait in deadlock.waiting] == [0, 1, 2, 3]
    assert "behind them: stage 0 SendActivation(buffer_id=3, micro_batch_id=3) waits" in str(deadlock)


@pytest.mark.parametrize("sends", SENDS)
def test_a_receive_without_a_send_is_a_deadlock_that_names_it(sends):
    run = simulate(ForgetsTheLastSend, 2, 3, sends=sends)
    core = {wait.stage: wait.instruction for wait in run.deadlock.core}
    assert core[1] == RecvActivation(0, 2)
    assert isinstance(core[0], RecvGrad)


@pytest.mark.parametrize("sends", SENDS)
def test_a_message_nobody_receives_is_reported(sends):
    streams = [[LoadMicroBatch(0, 0), ForwardPass(0, 0), SendActivation(0, 0)], []]
    run = simulate_streams(streams, sends=sends)
    assert run.unreceived == (
        "stage 0 SendActivation(buffer_id=0, micro_batch_id=0) is never received by stage 1",
    )
    assert (run.deadlock is None) == (sends == "buffered")
    if run.deadlock:
        assert "waits for stage 1, which has finished" in str(run.deadlock)


def test_a_message_beyond_the_ends_of_the_pipeline_is_reported():
    run = simulate_streams([[LoadMicroBatch(0), ForwardPass(0), BackwardPass(0), SendGrad(0)]])
    assert (
        str(run.deadlock)
        == "deadlock: stage 0 SendGrad(buffer_id=0) waits for stage -1, which does not exist"
    )


def test_a_buffer_that_is_used_again_while_live_is_reported():
    run = simulate(OneBufferTooFew, 4, 8)
    assert run.violations[0] == (
        "stage 0 LoadMicroBatch(buffer_id=0, micro_batch_id=3) overwrites buffer 0 "
        "while micro-batch 0 is live in it"
    )


def test_a_pass_that_runs_too_early_is_reported():
    run = simulate_streams([[LoadMicroBatch(0, 0), BackwardPass(0, 0), ForwardPass(0, 0)]])
    backward = "BackwardPass(buffer_id=0, micro_batch_id=0)"
    assert run.violations == (f"stage 0 {backward} runs before the ForwardPass of micro-batch 0",)


def test_a_pass_on_a_foreign_or_an_empty_buffer_is_reported():
    stream = [LoadMicroBatch(0, 0), ForwardPass(0, 0), BackwardPass(0, 1), BackwardPass(1, 0)]
    assert simulate_streams([stream]).violations[0].endswith("finds micro-batch 0 in buffer 0")
    assert simulate_streams([stream]).violations[-1].endswith("finds no micro-batch in buffer 1")
    assert simulate_streams([[SendGrad(3)]], sends="buffered").violations == (
        "stage 0 SendGrad(buffer_id=3) finds no micro-batch in buffer 3",
    )


def test_messages_that_arrive_in_the_wrong_order_are_reported():
    first, last = streams_of(InferenceSchedule, 2, 2)
    swapped = [
        SendActivation(1 - i.buffer_id, 1 - i.micro_batch_id) if i.name == "SendActivation" else i
        for i in first
    ]
    run = simulate_streams([swapped, last], sends="buffered")
    assert any(
        line == "stage 1 RecvActivation(buffer_id=0, micro_batch_id=0) gets micro-batch 1 "
        "from stage 0 SendActivation(buffer_id=1, micro_batch_id=1)"
        for line in run.violations
    )


@pytest.mark.parametrize("schedule_class", [*PIPELINES, DataParallelSchedule])
def test_a_schedule_without_micro_batch_numbers_plays_the_same(schedule_class):
    for num_stages, num_micro_batches in SIZES[::3]:
        streams = streams_of(schedule_class, num_stages, num_micro_batches)
        numbered = simulate_streams(streams)
        assert simulate_streams([without_micro_batch_ids(stream) for stream in streams]) == numbered


def test_derived_instructions_play_the_part_of_their_base():
    class LoudForward(ForwardPass):
        """A reader's own instruction."""

    run = simulate_streams([[LoadMicroBatch(0), LoudForward(0), BackwardPass(0)]], forward=3.0)
    assert run.busy == (4.0,) and run.is_clean
    assert [span.label for span in run.spans if span.kind == "forward"] == ["LoudForward"]


def test_sixteen_stages_and_64_micro_batches_take_well_under_a_second():
    start = time.process_time()
    assert simulate(TrainSchedule, 16, 64).bubble_of_total == pytest.approx(15 / 79)
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize(
    "options,message",
    [
        ({"sends": "eager"}, r"sends='eager' is not a way to send.*\['rendezvous', 'buffered'\]"),
        ({"forward": [1.0]}, r"forward has 1 costs for 2 stages; each stage needs one"),
        ({"backward": -1.0}, r"backward=-1.0 holds a negative cost"),
        ({"transfer": -0.1}, r"transfer=-0.1 holds a negative cost"),
        ({"forward": float("nan")}, r"forward=nan holds a negative cost"),
    ],
)
def test_impossible_costs_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        simulate(TrainSchedule, 2, 2, **options)
