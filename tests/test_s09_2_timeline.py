"""§9.2 Timelines. Guards against: shifted columns, missing boxes, a picture that only some can read."""

from xml.etree import ElementTree

import pytest

from ds_lite.pipe.schedule import DataParallelSchedule, InferenceSchedule, TrainSchedule
from ds_lite.pipe.simulate import simulate
from ds_lite.pipe.timeline import Span, timeline_svg, timeline_text

README_PICTURE = """\
stage 0 | F0  . F1  . F2  . F3 B0 F4 B1 F5 B2 F6 B3 F7 B4  . B5  . B6  . B7
stage 1 |  . F0  . F1  . F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5  . B6  . B7  .
stage 2 |  .  . F0  . F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6  . B7  .  .
stage 3 |  .  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7  .  .  .
ticks 22   busy 16   bubble 6/22 = 3/11 = (S-1)/(m+S-1)"""


def test_the_text_picture_is_the_one_of_the_readme():
    assert timeline_text(TrainSchedule, num_stages=4, num_micro_batches=8) == README_PICTURE


def test_the_text_picture_of_other_schedules_keeps_its_columns():
    text = timeline_text(InferenceSchedule, num_stages=11, num_micro_batches=12)
    rows = text.splitlines()[:-1]
    assert rows[0].startswith("stage  0 |  F0  F1") and rows[10].startswith("stage 10 |   .")
    assert len({len(row) for row in rows}) == 1
    assert text.endswith("ticks 22   busy 12   bubble 10/22 = 5/11 = (S-1)/(m+S-1)")
    assert (
        timeline_text(DataParallelSchedule, 1, 2)
        == "stage 0 | F0B0 F1B1\nticks 2   busy 2   bubble 0/2 = 0 = (S-1)/(m+S-1)"
    )


def test_the_svg_has_a_box_for_every_pass_and_says_so_to_a_screen_reader():
    run = simulate(TrainSchedule, 3, 4, transfer=0.5)
    root = ElementTree.fromstring(timeline_svg(run.spans, title="A <b> & c", unit="ms", row_name="rank"))
    svg = "{http://www.w3.org/2000/svg}"
    classes = [rect.get("class") for rect in root.iter(f"{svg}rect")]
    legend = 1
    assert classes.count("tl-forward") == classes.count("tl-backward") == 3 * 4 + legend
    assert classes.count("tl-communication") == 2 * 2 * 2 * 4 + legend  # two ends, two ways, two borders
    assert classes.count("tl-idle") == 3 + legend
    assert (
        root.find(f"{svg}title").text == "A <b> & c"
        and "3 rows, one per rank" in root.find(f"{svg}desc").text
    )
    assert "prefers-color-scheme:dark" in root.find(f"{svg}style").text
    texts = [text.text for text in root.iter(f"{svg}text")]
    assert "rank 2" in texts and f"time in ms, {run.end_time:g} in all" in texts


def test_svg_numbers_are_left_out_where_they_do_not_fit():
    def numbers(width):
        spans = [Span(0, "ForwardPass", "forward", 77, start, start + 1.0) for start in range(40)]
        return timeline_svg(spans, title="t", width=width).count(">77</text>")

    assert (numbers(1200), numbers(400)) == (40, 0)


def test_svg_times_start_at_the_earliest_span():
    late = [Span(1, "step", "other", None, 1000.0, 1000.5)]
    picture = timeline_svg(late, title="t", unit="s")
    assert "rank" not in picture and "stage 1: step, 0 to 0.5 s" in picture and ">stage 0</text>" in picture


@pytest.mark.parametrize(
    "spans,message",
    [
        ([], r"spans is empty"),
        ([Span(0, "x", "lunch", None, 0.0, 1.0)], r"kind='lunch'.*choose one of \['forward', 'backward'"),
        ([Span(0, "x", "other", None, 1.0, 0.0)], r"ends before it starts"),
    ],
)
def test_impossible_pictures_are_refused(spans, message):
    with pytest.raises(ValueError, match=message):
        timeline_svg(spans, title="t")
