"""What a run writes and shows: folders, JSON that is never half there, curves, films, the bar, the closing table."""

import json
import sys
import time

import numpy as np
import pytest
from PIL import Image

from vla_accel.track import (
    Progress,
    RunLog,
    agree_on_folder,
    check_trackers,
    closing_table,
    make_output_dir,
    new_folder,
    write_json,
    write_video,
)

# --------------------------------------------------------------------------------------------------------------------
# Folders
# --------------------------------------------------------------------------------------------------------------------


def test_the_default_output_folder_is_in_runs_and_named_after_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = make_output_dir(None, default="openvla-tabletop")
    assert folder.is_dir()
    assert folder.parent.name == "runs"
    assert folder.name.startswith("openvla-tabletop-2")


def test_two_runs_that_start_in_the_same_second_get_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "noon")
    names = [make_output_dir(None, default="run").name for _ in range(3)]
    assert names == ["run-noon", "run-noon-2", "run-noon-3"]


def test_all_ranks_write_into_the_folder_of_the_main_process(tmp_path, accelerator, monkeypatch):
    monkeypatch.setattr("vla_accel.track.broadcast_object", lambda *_: str(tmp_path / "main"))  # as from another rank
    (tmp_path / "own").mkdir()
    assert agree_on_folder(accelerator, tmp_path / "own") == tmp_path / "main"
    assert [path.name for path in tmp_path.iterdir()] == ["main"]


def test_an_output_folder_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^--run\.output_dir must be a folder that can be written, but '.*/file/run'"):
        make_output_dir(str(tmp_path / "file" / "run"), default="x")


def test_an_output_folder_that_holds_a_run_is_refused_unless_the_run_is_resumed(tmp_path):
    RunLog(tmp_path).write(0, {"loss": 1.0})
    with pytest.raises(ValueError, match=r"^--run\.output_dir must be new, but .* --run\.resume\.$"):
        make_output_dir(str(tmp_path), default="x")
    assert make_output_dir(str(tmp_path), default="x", resume=True) == tmp_path


def test_a_new_folder_may_be_missing_or_empty_but_not_in_use(tmp_path):
    assert new_folder(str(tmp_path / "a" / "b"), option="out") == tmp_path / "a" / "b"
    (tmp_path / "empty").mkdir()
    assert new_folder(str(tmp_path / "empty"), option="out") == tmp_path / "empty"
    (tmp_path / "empty" / "file").write_text("")
    for used in (tmp_path / "empty", tmp_path / "empty" / "file"):
        with pytest.raises(ValueError, match=r"^--out must be a new or an empty folder, but is "):
            new_folder(str(used), option="out")
    with pytest.raises(
        ValueError, match=r"^--out must be a path that can be written, but is .*(Not a directory|File exists)"
    ):
        new_folder(str(tmp_path / "empty" / "file" / "below"), option="out")


# --------------------------------------------------------------------------------------------------------------------
# JSON and metrics
# --------------------------------------------------------------------------------------------------------------------


class _Unwritable:
    """Something that JSON cannot hold, so that writing fails halfway."""


def test_a_failed_write_leaves_the_old_json(tmp_path):
    path = tmp_path / "result.json"
    write_json(path, {"success": 0.5})
    with pytest.raises(TypeError):
        write_json(path, {"success": 0.9, "then": _Unwritable()})
    assert json.loads(path.read_text()) == {"success": 0.5}


def test_metrics_are_one_json_object_per_line(tmp_path):
    log = RunLog(tmp_path)
    log.write(0, {"loss/policy": 0.5})
    log.write(1, {"loss/policy": 0.25, "eval/success": 1.0})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"iteration": 0, "loss/policy": 0.5},
        {"iteration": 1, "loss/policy": 0.25, "eval/success": 1.0},
    ]


def test_loading_drops_later_iterations_and_a_line_cut_short(tmp_path):
    log = RunLog(tmp_path)
    for iteration in range(4):
        log.write(iteration, {"x": 10.0 * iteration})
    with log.path.open("a") as file:
        file.write('{"iteration": 4, "x"')
    resumed = RunLog(tmp_path)
    resumed.load(3)
    resumed.write(3, {"x": -1.0})
    rows = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [(row["iteration"], row["x"]) for row in rows] == [(0, 0.0), (1, 10.0), (2, 20.0), (3, -1.0)]


def test_other_ranks_write_nothing(tmp_path):
    log = RunLog(tmp_path, enabled=False)
    log.write(0, {"loss": 1.0})
    log.plot(["loss"])
    assert list(tmp_path.iterdir()) == []


def test_curves_are_drawn_for_the_metrics_that_exist(tmp_path):
    log = RunLog(tmp_path)
    log.plot(["loss"])
    assert not (tmp_path / "curves.png").exists()
    for iteration in range(3):
        log.write(iteration, {"loss": 1.0, **({"eval/success": 0.5} if iteration == 2 else {})})
    log.plot(["loss", "eval/success", "never/logged"])
    with Image.open(tmp_path / "curves.png") as picture:
        pixels = np.asarray(picture.convert("RGB"))
    assert pixels.shape[1] > 2 * pixels.shape[0]  # two panels side by side, not three
    assert pixels.min() < 100  # something is drawn


# --------------------------------------------------------------------------------------------------------------------
# On the screen
# --------------------------------------------------------------------------------------------------------------------


def test_a_bar_that_goes_to_a_file_is_a_few_lines(capfd):
    bar = Progress(1000)
    for step in range(1000):
        bar.step(loss=f"{step}")
    bar.close()
    lines = capfd.readouterr().err.splitlines()
    assert 1 <= len(lines) <= 3
    assert "1000/1000" in lines[-1]
    assert "loss=999" in lines[-1]


def test_a_bar_on_a_terminal_moves_in_place(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    bar = Progress(2)
    bar.step(loss="1")
    bar.close()
    assert "\r" in capsys.readouterr().err


def test_other_ranks_show_no_bar(capfd):
    bar = Progress(10, enabled=False)
    bar.step(loss="1")
    bar.close()
    assert capfd.readouterr().err == ""


def test_a_tracker_without_its_package_is_refused_with_the_command_that_installs_it():
    check_trackers(["none", "tensorboard"])
    with pytest.raises(ValueError, match=r"^--run\.trackers must .* but is 'no_such_package'\. .*pip install no_such"):
        check_trackers(["no_such_package"])


def test_the_closing_table_shows_before_and_after_with_intervals():
    def side(success, n):
        return {"success": success, "n": n, "interval_95": [success - 0.1, success + 0.1]}

    before = {**side(0.5, 20), "tasks": {"reach the red block": side(0.25, 10), "push": side(0.75, 10)}}
    after = {**side(0.9, 20), "tasks": {"reach the red block": side(0.85, 10), "push": side(0.8, 10)}}
    assert closing_table(before, after).splitlines() == [
        "held-out success      before                  after                   n",
        "reach the red block    25.0% [15%, 35%]   ->   85.0% [75%, 95%]      10",
        "push                   75.0% [65%, 85%]   ->   80.0% [70%, 90%]      10",
        "all                    50.0% [40%, 60%]   ->   90.0% [80%, 100%]     20",
    ]


def test_without_an_evaluation_the_closing_line_says_why():
    assert closing_table(None, None) == "No evaluation (--run.eval_episodes 0)."


# --------------------------------------------------------------------------------------------------------------------
# Films
# --------------------------------------------------------------------------------------------------------------------


def read_film(path):
    import imageio.v2 as imageio

    return np.stack(imageio.mimread(path))


@pytest.mark.parametrize("size", [(64, 48), (33, 47)], ids=["even", "odd"])
def test_a_film_has_every_frame_in_its_colours(tmp_path, size):
    colors = [(200, 30, 30), (30, 200, 30), (30, 30, 200), (120, 120, 120), (20, 20, 20)]
    path = tmp_path / "videos" / "film.mp4"
    write_video(path, [np.full((*size, 3), color, np.uint8) for color in colors])
    film = read_film(path)
    assert film.shape == (5, *(side + side % 2 for side in size), 3)
    # Lossy, and limited range: plain colours come back within a few of 255 levels.
    np.testing.assert_allclose(film.mean((1, 2)), colors, atol=8)


def test_no_frames_make_no_file(tmp_path):
    write_video(tmp_path / "film.mp4", [])
    assert list(tmp_path.iterdir()) == []
