"""Pictures of a run: which ones there are, and that they show the run's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kda_jit.bench import shapes
from kda_jit.errors import InputError
from tests.bench.runs import row, run, timing

pytest.importorskip("matplotlib", reason="pictures need matplotlib")
from matplotlib import pyplot as plt

from kda_jit.bench import plot

ONE = row("1x64_h2", [64], 2, 10.0, 20.0)
LONGER = row("1x256_h2", [256], 2, 32.0, 64.0)
MORE = row("4x64_h2", [64] * 4, 2, 16.0, 48.0)
MIXED = row("mixed_h2", [5, 60], 2, 12.0, 30.0)


@pytest.fixture(autouse=True)
def _closed() -> Any:
    yield
    assert not plt.get_fignums()


def test_points_are_what_the_rows_say() -> None:
    failed = {"case": "x", "lengths": [9], "heads": 2, "floor_us": 1.0, "failed": "is wrong"}
    ours, peer, *_ = shapes.points(run(MORE, failed, MIXED))
    assert ours == ("4x64_h2", "cuda", 2, 4, 64, 256, 16.0, 16.0 * 0.99, 16.0 * 1.01, 4.0)
    assert (peer.subject, peer.us) == ("flashkda", 48.0)
    assert (ours.speed, ours.share) == (256 * 2 / 16.0, 0.25)
    assert shapes.points(run(MIXED))[0].length is None


def test_points_of_steps() -> None:
    head = {"case": "s", "decodes": 3, "prefills": [], "verified": 0, "drafts": 0, "heads": 2}
    timings = {"triton": timing(8.0), "triton, its decodes": timing(4.0)}
    (point,) = shapes.points(run(head | {"floor_us": 2.0, "timings": timings}))
    assert (point.sequences, point.length, point.tokens) == (3, 1, 3)
    head |= {"prefills": [40], "verified": 2, "drafts": 3}
    (point,) = shapes.points(run(head | {"floor_us": 2.0, "timings": timings}))
    assert (point.sequences, point.length, point.tokens) == (6, None, 3 + 40 + 8)


def test_every_picture_is_written(tmp_path: Path) -> None:
    written = plot.draw(run(ONE, LONGER, MORE, MIXED), tmp_path / "new", "h200-")
    assert list(written) == ["length", "batch", "roofline", "floor"]
    for name, path in written.items():
        assert path == tmp_path / "new" / f"h200-{name}.png"
        image = plt.imread(path)
        assert min(image.shape[:2]) > 300
        assert image[..., :3].std() > 0.02, "nothing is drawn"


@pytest.mark.parametrize(
    "rows, pictures",
    [
        ([ONE, LONGER], ["length", "roofline", "floor"]),
        ([ONE, MORE], ["batch", "roofline", "floor"]),
        ([MIXED], ["roofline", "floor"]),
    ],
)
def test_a_picture_of_nothing_is_left_out(rows: list, pictures: list, tmp_path: Path) -> None:
    assert list(plot.draw(run(*rows), tmp_path)) == pictures


def test_a_run_without_a_time_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="plot: expected a run with a time at least"):
        plot.draw(run(), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_speed_is_drawn_against_length_and_batch() -> None:
    found = shapes.points(run(ONE, LONGER, MORE, MIXED))
    for picture, line in (
        (plot._length, [(64, 12.8), (256, 16.0)]),
        (plot._batch, [(1, 12.8), (4, 32.0)]),
    ):
        figure = picture(run(), found)
        assert figure is not None
        (panel,) = figure.axes
        drawn = [
            list(zip(*map(list, curve.get_data()), strict=True)) for curve in panel.get_lines()
        ]
        assert line in [[(int(x), pytest.approx(y)) for x, y in curve] for curve in drawn]
        (legend,) = figure.legends
        names = [text.get_text() for text in legend.get_texts()]
        assert names[:2] == ["cuda", "flashkda"]
        assert panel.get_title() == "2 heads"
        plt.close(figure)


def test_roofline_and_floor_hold_every_point() -> None:
    found = shapes.points(run(ONE, LONGER, MORE, MIXED))
    figure = plot._roofline(run(), found)
    (axis,) = figure.axes
    ours = axis.containers[0].lines[0].get_data()
    assert list(ours[0]) == [2.5 * 4, 8.0 * 4, 4.0 * 4, 3.0 * 4]  # microseconds * TB/s = MB
    assert list(ours[1]) == [10.0, 32.0, 16.0, 12.0]
    roof = next(line for line in axis.get_lines() if "copy at 4 TB/s" in str(line.get_label()))
    x, y = roof.get_data()
    assert list(y) == pytest.approx([value / 4.0 for value in x])
    plt.close(figure)
    figure = plot._floor(run(), found)
    (axis,) = figure.axes
    assert [bar.get_width() for bar in axis.containers[0]] == [25.0] * 4
    peers = [bar.get_width() for bar in axis.containers[1]]
    assert peers == pytest.approx([12.5, 12.5, 100 * 4 / 48, 10.0])
    assert [t.get_text() for t in axis.get_yticklabels()] == [p.case for p in found[::2]]
    plt.close(figure)
