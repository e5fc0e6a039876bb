"""The embedded simulator: layouts, rules of success and failure, and pictures."""

import math

import numpy as np
import pytest

from vla_accel.envs.tabletop import COLORS, Tabletop
from vla_accel.envs.tabletop_world import HALF_BLOCK, World


def begin(task=0, state=0, **options):
    env = Tabletop(**options)
    obs, _ = env.reset(options={"task_id": task, "state_id": state})
    return env, obs


def act(dx=0.0, dy=0.0, dz=0.0, turn=0.0, close=0.0):
    return np.array([dx, dy, dz, 0, 0, turn, close], np.float32)


def test_equal_ids_give_equal_episodes_and_others_differ():
    (one, a), (other, b) = begin(state=5), begin(state=5)
    np.testing.assert_array_equal(a["images"]["wrist"], b["images"]["wrist"])
    move = act(0.3, -0.4, -0.5, 0.2, 0.5)
    for x, y in zip(one.step(move)[0]["state"], other.step(move)[0]["state"], strict=True):
        assert x == y
    assert not np.array_equal(begin(state=6)[1]["images"]["wrist"], a["images"]["wrist"])


def test_train_and_evaluation_states_are_disjoint():
    ids = Tabletop().state_ids
    assert ids["eval"].stop <= ids["train"].start
    assert len(ids["eval"]) == 1000


def test_missing_options_are_drawn_from_the_seed_and_the_training_states():
    env, other = Tabletop(), Tabletop()
    first, again = env.reset(seed=4)[0], other.reset(seed=4)[0]
    np.testing.assert_array_equal(first["images"]["wrist"], again["images"]["wrist"])
    assert not np.array_equal(env.reset(seed=5)[0]["images"]["wrist"], first["images"]["wrist"])


@pytest.mark.parametrize("state", range(0, 60, 3))
def test_blocks_start_apart_on_the_table_and_clear_of_the_gripper(state):
    env, _ = begin(state=state, num_blocks=4)
    spots = [block.start for block in env.world.blocks]
    distances = [math.dist(a, b) for i, a in enumerate(spots) for b in spots[:i]]
    assert min(distances) > 0.12
    assert min(math.dist(spot, env.world.tip[:2]) for spot in spots) > 0.07
    assert np.abs(spots).max() <= 0.17


def test_the_task_moves_no_block_and_neither_does_their_number():
    layouts = [[block.start for block in begin(task, 9, num_blocks=4)[0].world.blocks] for task in range(4)]
    assert layouts[0] == layouts[1] == layouts[2] == layouts[3]
    assert [block.start for block in begin(0, 9, num_blocks=2)[0].world.blocks] == layouts[0][:2]
    assert begin(0, 9, tasks=("push",))[0].world.tip == begin(0, 9)[0].world.tip


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 4])
def test_the_target_is_on_the_table_among_blocks_of_other_colours(num_blocks):
    for state in range(30):
        for task, color in enumerate(COLORS):
            env, _ = begin(task, state, num_blocks=num_blocks, image_size=16)
            assert env.block_colors[env.target] == color
            assert len(set(env.block_colors)) == len(env.world.blocks) == num_blocks


def test_distractors_come_from_the_colours_that_instructions_name():
    for state in range(20):
        env, _ = begin(0, state, colors=("red", "blue"), image_size=16)
        assert set(env.block_colors) == {"red", "blue"}
    env, _ = begin(0, 0, colors=("red",), num_blocks=3)
    assert "red" in env.block_colors
    assert len(set(env.block_colors)) == 3


def test_a_picture_does_not_give_the_target_away():
    # Of all scenes that show red and blue, as many ask for the one as for the other, wherever it lies.
    asked = {"first": 0, "second": 0}
    for state in range(600):
        for task in (0, 2):
            env, _ = begin(task, state, image_size=16)
            if set(env.block_colors) == {"red", "blue"}:
                nearer = min(range(2), key=lambda index: env.world.blocks[index].start)
                asked["first" if nearer == env.target else "second"] += 1
    count = sum(asked.values())
    assert count > 300
    assert abs(asked["first"] - count / 2) < 3 * math.sqrt(count) / 2  # three standard deviations of a fair coin


def test_instructions_pair_every_verb_with_every_colour():
    env = Tabletop(tasks=("push", "pick"), colors=("blue", "red"))
    assert env.instructions == [
        "push the blue block", "push the red block", "pick up the blue block", "pick up the red block",
    ]  # fmt: skip
    env.reset(options={"task_id": 2, "state_id": 0})
    assert (env.verb, env.block_colors[env.target]) == ("pick", "blue")


def test_state_and_action_have_the_shape_and_units_of_libero():
    env, obs = begin(start_jitter=0.0)
    np.testing.assert_allclose(obs["state"], [0, 0, 0.20, 0, 0, 0, 0.04, -0.04], rtol=0, atol=1e-7)
    assert env.action_space.shape == (7,)
    state = env.step(np.array([1.0, -0.5, 0.2, 1.0, 1.0, 0.6, 0.5], np.float32))[0]["state"]
    np.testing.assert_allclose(state, [0.05, -0.025, 0.21, 0, 0, 0.3, 0.03, -0.03], rtol=0, atol=1e-7)


def test_minus_one_opens_and_plus_one_closes():
    env, _ = begin()
    widths = [env.step(act(close=close))[0]["state"][6] for close in (1, 1, 1, -1, -1, -1)]
    np.testing.assert_allclose(widths, [0.02, 0, 0, 0.02, 0.04, 0.04], rtol=0, atol=1e-7)


def test_actions_beyond_their_bounds_are_clipped_and_the_gripper_stays_in_its_workspace():
    env, before = begin(max_episode_steps=50)
    after = env.step(act(dz=100.0))[0]["state"]
    assert after[2] - before["state"][2] == pytest.approx(0.05)
    for _ in range(12):
        state = env.step(act(1, 1, 1))[0]["state"]
    np.testing.assert_allclose(state[:3], [0.24, 0.24, 0.32], rtol=0, atol=1e-7)
    for _ in range(12):
        state = env.step(act(0, 0, -1, turn=1))[0]["state"]
    np.testing.assert_allclose(state[[2, 5]], [0.01, math.pi / 2], rtol=0, atol=1e-6)


def place(env, spots, tip):
    """Put blocks and gripper where a test needs them."""
    env.world = World(spots, tip)


@pytest.mark.parametrize(("distance", "reached"), [(0.039, True), (0.041, False)])
def test_reach_means_within_the_radius_in_space(distance, reached):
    env, _ = begin()
    spots = [(0.2, 0.2), (0.2, 0.2)]
    spots[env.target] = (0.0, 0.0)
    place(env, spots, (0.0, 0.0, HALF_BLOCK + distance))
    _, reward, terminated, truncated, info = env.step(act())
    assert (reward, terminated, info["success"]) == (float(reached), reached, reached)
    assert not truncated


def test_reaching_the_wrong_block_ends_the_episode_as_a_failure():
    env, _ = begin()
    spots = [(0.0, 0.0), (0.0, 0.0)]
    spots[env.target] = (0.2, 0.2)
    place(env, spots, (0.0, 0.0, 0.05))
    _, reward, terminated, _, info = env.step(act())
    assert (reward, terminated, info["success"]) == (0.0, True, False)
    with pytest.raises(RuntimeError, match=r"call reset\(\)"):
        env.step(act())


@pytest.mark.parametrize("right", [True, False])
def test_pushing_five_centimetres_decides_the_episode(right):
    env, _ = begin(tasks=("push",))
    spots = [(0.2, 0.2), (0.2, 0.2)]
    spots[env.target if right else 1 - env.target] = (0.0, 0.0)
    place(env, spots, (-0.06, 0.0, 0.02))
    env.world.width = 0.0
    assert env.step(act(dx=1))[2] is False  # the gripper is at -1 cm and pushes the block 3 cm ahead of itself
    block = env.world.blocks[env.target if right else 1 - env.target]
    assert (block.x, block.y) == (pytest.approx(0.02), pytest.approx(0.0))
    _, reward, terminated, _, info = env.step(act(dx=1))
    assert (reward, terminated, info["success"]) == (float(right), True, right)


@pytest.mark.parametrize("right", [True, False])
def test_lifting_six_centimetres_decides_the_episode(right):
    env, _ = begin(tasks=("pick",))
    spots = [(0.2, 0.2), (0.2, 0.2)]
    spots[env.target if right else 1 - env.target] = (0.0, 0.0)
    place(env, spots, (0.0, 0.0, 0.02))
    env.step(act(close=1))
    assert env.world.held is env.world.blocks[env.target if right else 1 - env.target]
    assert env.step(act(dz=1, close=1))[2] is False
    _, reward, terminated, _, info = env.step(act(dz=0.3, close=1))
    assert (reward, terminated, info["success"]) == (float(right), True, right)


def colored(image, color):
    """Pixels `[P, P]` in which a block of that colour is to be seen: near to its hue, whatever the light."""
    unit = np.array(COLORS[color]) / np.linalg.norm(COLORS[color])
    pixels = image.astype(np.float64)
    norm = np.linalg.norm(pixels, axis=-1)
    return (pixels @ unit > 0.985 * norm) & (norm > 60)


@pytest.mark.parametrize("camera", ["wrist", "front"])
def test_the_target_is_in_view_at_the_start(camera):
    env = Tabletop(cameras=("wrist", "front"), num_blocks=4)
    for state in range(60):
        for task, color in enumerate(COLORS):
            obs, _ = env.reset(options={"task_id": task, "state_id": state})
            assert colored(obs["images"][camera], color).sum() >= 6, (state, color)


def test_the_wrist_picture_shows_where_to_go():
    # Up in the picture is +x and left is +y: the offset of the target is the direction of the way to it.
    env = Tabletop(num_blocks=1, image_size=64)
    for state in range(40):
        obs, _ = env.reset(options={"task_id": 0, "state_id": state})
        rows, columns = np.nonzero(colored(obs["images"]["wrist"], "red"))
        seen = np.array([31.5 - rows.mean(), 31.5 - columns.mean()])
        block = env.world.blocks[0]
        way = np.array([block.x, block.y]) - env.world.tip[:2]
        cosine = seen @ way / np.linalg.norm(seen) / np.linalg.norm(way)
        assert cosine > math.cos(math.radians(10)), state


def test_blocks_grow_in_the_wrist_picture_as_the_gripper_descends():
    env, obs = begin(num_blocks=1, image_size=64)
    env.world.tip[:2] = [env.world.blocks[0].x - 0.06, env.world.blocks[0].y]
    far = colored(env.render_observation()["images"]["wrist"], "red").sum()
    env.world.tip[2] = 0.08
    near = colored(env.render_observation()["images"]["wrist"], "red").sum()
    assert near > 1.8 * far


# Mean colours may differ by a grey level of 255; where a picture has 256 pixels, one on an edge weighs that much alone.
@pytest.mark.parametrize(("size", "levels"), [(16, 3), (48, 1), (224, 1)])
def test_pictures_have_the_size_asked_for_and_show_the_same_at_any_size(size, levels):
    env, obs = begin(image_size=size, cameras=("front", "wrist"))
    assert list(obs["images"]) == ["front", "wrist"]
    assert list(env.observation_space["images"]) == ["front", "wrist"]
    reference = begin(image_size=64, cameras=("front", "wrist"))[1]
    for camera, image in obs["images"].items():
        assert (image.shape, image.dtype) == ((size, size, 3), np.uint8)
        expected = reference["images"][camera].mean(axis=(0, 1))
        np.testing.assert_allclose(image.mean(axis=(0, 1)), expected, rtol=0, atol=levels)


def test_cameras_that_are_off_cost_nothing_and_come_back():
    env, _ = begin()
    env.set_rendering(False)
    assert env.step(act(dx=0.5))[0]["images"]["wrist"].max() == 0
    current = env.render_observation()["images"]["wrist"]
    env.set_rendering(True)
    np.testing.assert_array_equal(env.step(act())[0]["images"]["wrist"], current)


def test_render_returns_a_video_frame_whatever_the_cameras():
    env, _ = begin(cameras=("wrist",), image_size=16)
    frame = env.render()
    assert (frame.shape, frame.dtype) == ((256, 256, 3), np.uint8)
    assert frame.std() > 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ("throw",)}, r"tasks must be one or more of reach, push, pick.*got \['throw'\]"),
        ({"tasks": ()}, "tasks must be one or more of"),
        ({"colors": ("red", "red")}, "each at most once"),
        ({"colors": ("pink",)}, "colors must be one or more of red, green, blue, yellow"),
        ({"cameras": ("side",)}, "cameras must be one or more of wrist, front"),
        ({"image_size": 15}, r"image_size must lie in \[16, 4096\], got 15"),
        ({"num_blocks": 0}, r"num_blocks must lie in \[1, 4\], got 0"),
        ({"num_blocks": 5}, r"num_blocks must lie in \[1, 4\], got 5"),
        ({"reach_radius": 0.2}, "reach_radius must lie in"),
        ({"start_jitter": -0.1}, "start_jitter must lie in"),
        ({"max_episode_steps": 0}, "max_episode_steps must lie in"),
        ({"tasks": 3}, "tasks must be one or more of reach, push, pick, each at most once, got 3"),
        ({"colors": {"red": 1}}, "colors must be one or more of"),
        ({"cameras": [["wrist"]]}, "cameras must be one or more of"),
        ({"image_size": "big"}, "image_size must be a whole number, got 'big'"),
        ({"image_size": 32.0}, "image_size must be a whole number, got 32.0"),
        ({"num_blocks": True}, "num_blocks must be a whole number, got True"),
        ({"reach_radius": "far"}, "reach_radius must be a number, got 'far'"),
        ({"start_jitter": None}, "start_jitter must be a number, got None"),
        ({"max_episode_steps": [9]}, r"max_episode_steps must be a whole number, got \[9\]"),
    ],
)
def test_options_are_refused_with_their_rule_and_value(options, message):
    with pytest.raises(ValueError, match=message):
        Tabletop(**options)


def test_reset_refuses_ids_out_of_range_and_unknown_options():
    env = Tabletop()
    with pytest.raises(ValueError, match=r"task_id must lie in \[0, 4\), got 4"):
        env.reset(options={"task_id": 4})
    with pytest.raises(ValueError, match=r"state_id must lie in \[0, 1000000\), got -1"):
        env.reset(options={"state_id": -1})
    with pytest.raises(ValueError, match=r"reset options must be task_id and state_id only, got \['level'\]"):
        env.reset(options={"level": 1})


def test_every_option_changes_something():
    assert Tabletop(reach_radius=0.05).reach_radius != Tabletop().reach_radius
    start = [begin(state=1, start_jitter=jitter)[0].world.tip for jitter in (0.0, 0.04)]
    assert start[0] == [0.0, 0.0, 0.2]
    assert start[1] != start[0]
    env, _ = begin(reach_radius=0.05)
    spots = [(0.2, 0.2), (0.2, 0.2)]
    spots[env.target] = (0.0, 0.0)
    place(env, spots, (0.0, 0.0, HALF_BLOCK + 0.045))
    assert env.step(act())[4]["success"]
