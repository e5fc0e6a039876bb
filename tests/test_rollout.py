"""Collecting: exact numbers in an environment that counts, and the real one against a replay step by step."""

import gymnasium as gym
import pytest
import torch
from helpers.policies import CountingPolicy

from vla_accel.advantages import gae
from vla_accel.envs import make_env, make_vector_env, training_jobs
from vla_accel.envs.jobs import WithRests
from vla_accel.rollout import collect, start
from vla_accel.types import Episode, Job, Observation

CPU = torch.device("cpu")
FIRST = [Job(task_id=1, state_id=7, seed=0), Job(task_id=0, state_id=13, seed=0)]
"""Five steps until the time limit, then solved after three."""
SECOND = [Job(task_id=0, state_id=24, seed=0), Job(task_id=1, state_id=9, seed=0)]
"""Solved after four steps, then five steps until the time limit."""


def counting_envs(jobs, **options):
    return make_vector_env(
        "helpers.counting_env:CountingEnv", num_envs=len(jobs), jobs=jobs, **{"chunk_size": 2, **options}
    )


def collect_counting(*lengths, jobs=(FIRST, SECOND)):
    """Rollouts of these many decisions, one after the other, at two steps per decision."""
    envs, policy = counting_envs(list(jobs)), CountingPolicy(2)
    state = start(envs)
    try:
        return [collect(policy, policy, envs, state, num_decisions=n, device=CPU) for n in lengths], policy
    finally:
        envs.close()


def test_collect_follows_each_environment_through_its_episodes():
    (rollout,), _ = collect_counting(6)
    # First: steps 1+2, 3+4, 5 and cut; 1+2, 3 and solved; nothing to play. Second: 1+2, 3+4 and solved; 1+2, 3+4, 5.
    assert rollout.reward.T.tolist() == [[3, 7, 5, 3, 3, 0], [3, 7, 3, 7, 5, 0]]
    assert rollout.executed.T.tolist() == [[2, 2, 1, 2, 1, 0], [2, 2, 2, 2, 1, 0]]
    assert rollout.truncated.T.int().tolist() == [[0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 1, 0]]
    assert rollout.terminated.T.int().tolist() == [[0, 0, 0, 0, 1, 0], [0, 1, 0, 0, 0, 0]]
    assert rollout.valid.T.int().tolist() == [[1, 1, 1, 1, 1, 0]] * 2
    assert rollout.value.T.tolist() == [[700, 702, 704, 1300, 1302, 0], [2400, 2402, 900, 902, 904, 0]]
    assert rollout.log_prob[..., 0].T.tolist() == [[-1, -1, -1, -1, -1, 0]] * 2


def test_next_value_is_that_of_the_final_observation_where_truncated_and_0_where_terminated():
    (rollout,), _ = collect_counting(6)
    # The first's truncated episode ends at step 5, worth 705, though the next one's first observation is worth 1300.
    # The second's solved episode is worth nothing more, though the next one begins with 900.
    assert rollout.next_value.T.tolist() == [[702, 704, 705, 1302, 0, 0], [2402, 0, 902, 904, 905, 0]]


def test_advantages_of_an_episode_that_ends_within_a_chunk():
    (rollout,), _ = collect_counting(6)
    advantage, returns = gae(
        rollout.reward,
        rollout.value / 100,
        next_value=rollout.next_value / 100,
        terminated=rollout.terminated,
        truncated=rollout.truncated,
        valid=rollout.valid,
        gamma=0.5,
        gae_lambda=1.0,
    )
    # A decision is discounted once, however many steps of it were executed. From the end of the truncated episode:
    # 5 + 7.05 / 2 = 8.525; 7 + 8.525 / 2 = 11.2625; 3 + 11.2625 / 2 = 8.63125. Of the solved one: 3; 3 + 3 / 2 = 4.5.
    expected = torch.tensor([8.63125, 11.2625, 8.525, 4.5, 3.0, 0.0])
    torch.testing.assert_close(returns[:, 0], expected)
    torch.testing.assert_close(advantage[:, 0], expected - rollout.value[:, 0] / 100)


def test_collect_records_the_episodes_that_ended():
    (rollout,), _ = collect_counting(6)
    assert rollout.episodes == [
        Episode(
            job=SECOND[0],
            success=True,
            success_at_end=True,
            steps=4,
            success_step=4,
            total_reward=10.0,
            truncated=False,
        ),
        Episode(job=FIRST[0], success=False, success_at_end=False, steps=5, total_reward=15.0, truncated=True),
        Episode(
            job=FIRST[1], success=True, success_at_end=True, steps=3, success_step=3, total_reward=6.0, truncated=False
        ),
        Episode(job=SECOND[1], success=False, success_at_end=False, steps=5, total_reward=15.0, truncated=True),
    ]


@pytest.mark.parametrize("lengths", [(1, 5), (2, 2, 2), (3, 3), (1,) * 6])
def test_episodes_go_on_over_the_border_between_two_rollouts(lengths):
    (whole,), _ = collect_counting(6)
    parts, _ = collect_counting(*lengths)
    for name in ("reward", "executed", "terminated", "truncated", "valid", "value", "next_value", "log_prob"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name)), name
    assert torch.equal(torch.cat([part.inputs["state"] for part in parts]), whole.inputs["state"])
    assert [e for part in parts for e in part.episodes] == whole.episodes


def test_whole_episodes_end_where_the_longest_does_and_the_next_ones_begin_together():
    envs, policy = counting_envs([WithRests(FIRST), WithRests(SECOND)]), CountingPolicy(2)
    first = collect(policy, policy, envs, start(envs), num_decisions=None, device=CPU)
    second = collect(policy, policy, envs, start(envs), num_decisions=None, device=CPU)
    envs.close()
    assert first.valid.T.int().tolist() == [[1, 1, 1], [1, 1, 0]]
    assert second.valid.T.int().tolist() == [[1, 1, 0], [1, 1, 1]]
    assert [e.job for e in first.episodes] == [SECOND[0], FIRST[0]]
    assert [e.job for e in second.episodes] == [FIRST[1], SECOND[1]]
    assert first.reward.T.tolist() == [[3, 7, 5], [3, 7, 0]]


def test_collect_keeps_inputs_and_trace_of_the_decision_they_belong_to():
    (first, second), _ = collect_counting(2, 2)
    assert first.inputs["state"][:, 0, 2].tolist() == [0.0, 2.0]
    assert first.trace["call"].tolist() == [[1, 1], [2, 2]]
    # Between the rollouts one forward went into the value of what the last decision led to.
    assert second.trace["call"].tolist() == [[4, 4], [5, 5]]


def test_all_final_observations_are_valued_even_if_more_episodes_end_than_there_are_environments():
    jobs = [[Job(task_id=1, state_id=i, seed=0) for i in range(n, n + 9)] for n in (10, 30)]
    envs, policy = counting_envs(jobs, max_episode_steps=2), CountingPolicy(2)
    rollout = collect(policy, policy, envs, start(envs), num_decisions=4, device=CPU)
    assert rollout.truncated.all()
    # Each decision is an episode of two steps.
    assert rollout.next_value.T.tolist() == [[1002, 1102, 1202, 1302], [3002, 3102, 3202, 3302]]


def test_collect_times_policy_and_environment():
    (rollout,), _ = collect_counting(2)
    assert set(rollout.seconds) == {"policy", "env"}
    assert min(rollout.seconds.values()) > 0


# --------------------------------------------------------------------------------------------------------------------
# The tabletop
# --------------------------------------------------------------------------------------------------------------------

OPTIONS = {"image_size": 32, "num_blocks": 4, "reach_radius": 0.055, "start_jitter": 0.08}
LIMIT = 10  # steps, not a multiple of the chunk
NUM_ENVS = 4


def jobs_of(env):
    return training_jobs(task_ids=range(4), state_ids=range(1000, 2000), seed=5, stream=env, num_streams=NUM_ENVS)


def downward(policy):
    """Restrict the gripper to going down, so that it meets blocks and episodes also terminate."""
    policy.statistics.high[2] = -0.2
    return policy


def as_observation(single, instructions):
    return Observation(
        images={name: image[None] for name, image in single["images"].items()},
        state=single["state"][None],
        instructions=[instructions[single["task_id"]]],
    )


def replay(policy, rollout, index):
    """Play environment `index` again alone, one step at a time, with the stored actions; yields one row each time."""
    env, jobs = make_env("tabletop", **OPTIONS), jobs_of(index)

    def begin():
        job = next(jobs)
        return env.reset(seed=job.seed, options={"task_id": job.task_id, "state_id": job.state_id})[0]

    def worth(single):
        with torch.no_grad():
            return float(policy(policy.prepare(as_observation(single, env.instructions)), greedy=True).value)

    obs, steps = begin(), 0
    for bins in rollout.trace["bins"][:, index]:
        row = {"inputs": policy.prepare(as_observation(obs, env.instructions)), "value": worth(obs), "reward": 0.0}
        chunk = policy._environment_action(bins[None] + policy.tokenizer.begin)[0].numpy()
        for number, action in enumerate(chunk, start=1):
            obs, reward, terminated, _, _ = env.step(action)
            steps += 1
            row["reward"] += reward
            row["executed"] = number
            if terminated or steps == LIMIT:
                break
        row |= {"terminated": terminated, "truncated": steps == LIMIT and not terminated}
        row["next_value"] = 0.0 if terminated else worth(obs)
        yield row
        if terminated or steps == LIMIT:
            obs, steps = begin(), 0


@pytest.mark.parametrize(("model", "num_decisions"), [("openvla", 18), ("openvla-oft", 14)])
def test_collect_on_the_tabletop_equals_a_replay_step_by_step(make_policy, model, num_decisions):
    policy = downward(make_policy(model))
    envs = make_vector_env(
        "tabletop",
        num_envs=NUM_ENVS,
        chunk_size=policy.chunk_size,
        jobs=[jobs_of(i) for i in range(NUM_ENVS)],
        max_episode_steps=LIMIT,
        env_options=OPTIONS,
    )
    policy.fit_instructions(envs.instructions)
    policy.seed(0, first_env=0, num_envs=NUM_ENVS)
    state = start(envs)
    half = num_decisions // 2
    rollouts = [collect(policy, policy, envs, state, num_decisions=half, device=CPU) for _ in range(2)]
    whole = rollouts[0]
    for name in ("value", "next_value", "reward", "executed", "terminated", "truncated", "valid"):
        setattr(whole, name, torch.cat([getattr(rollout, name) for rollout in rollouts]))
    for name in ("inputs", "trace"):
        parts = [getattr(rollout, name) for rollout in rollouts]
        setattr(whole, name, {key: torch.cat([part[key] for part in parts]) for key in parts[0]})
    assert whole.terminated.any(), "the test needs an episode that terminates"
    assert whole.truncated.any(), "and one that is truncated"
    assert whole.valid.all()
    for index in range(NUM_ENVS):
        for t, row in enumerate(replay(policy, whole, index)):
            for name, x in row.pop("inputs").items():
                assert torch.equal(whole.inputs[name][t, index], x[0]), (name, t, index)
            for name, x in row.items():
                # Values of a batch and of one row differ in their last bits; those of other observations by far more.
                assert abs(float(getattr(whole, name)[t, index]) - x) < 5e-4, (name, t, index)


def test_chunks_may_be_cut_to_what_the_environments_take(make_policy):
    policy = make_policy("openvla-oft")
    jobs = [training_jobs(task_ids=[0], state_ids=range(9), seed=0, stream=0, num_streams=1)]
    envs = make_vector_env("tabletop", num_envs=1, chunk_size=3, jobs=jobs, max_episode_steps=9, env_options=OPTIONS)
    policy.fit_instructions(envs.instructions)
    policy.seed(0, first_env=0, num_envs=1)
    rollout = collect(policy, policy, envs, start(envs), num_decisions=3, device=CPU)
    assert rollout.executed.flatten().tolist() == [3, 3, 3]
    assert rollout.truncated.flatten().tolist() == [False, False, True]


def test_actions_outside_the_action_space_are_clipped_to_it():
    taken = []

    class Recorder(gym.vector.VectorWrapper):
        def step(self, actions):
            taken.append(actions)
            return self.env.step(actions)

    class Excited(CountingPolicy):
        def forward(self, inputs, trace=None, *, greedy=False):
            sample = super().forward(inputs, trace, greedy=greedy)
            sample.action[:] = torch.tensor([7.0, -0.5])
            return sample

    envs, policy = counting_envs([FIRST]), Excited(2)
    recorder = Recorder(envs)
    recorder.instructions = envs.instructions
    collect(policy, policy, recorder, start(recorder), num_decisions=1, device=CPU)
    assert taken[0].tolist() == [[[1.0, -0.5], [1.0, -0.5]]]
