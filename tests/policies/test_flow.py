"""The maths of flow policies: schedules by hand, densities, and that Flow-SDE keeps every marginal distribution."""

import math

import pytest
import torch

from vla_accel.policies.flow import (
    Chain,
    Draws,
    draw,
    entropy,
    integrate,
    learned_std,
    log_density,
    sample,
    score,
    time_of,
    transition,
)

SHAPE = (3, 2)


def streams(count=4, seed=0):
    return [torch.Generator().manual_seed(seed + i) for i in range(count)]


def linear(x, time):
    """A velocity that depends on x and on time, and a deviation for the learned-noise kind."""
    return 0.5 * x + time[:, None, None], torch.full_like(x, 0.1)


class TestSchedule:
    """Flow-SDE's closed forms, worked by hand."""

    def deviations(self, num_steps, level=0.5):
        step = torch.arange(num_steps)
        zero = torch.zeros(num_steps, 1, 1)
        return transition(zero, zero, step, num_steps=num_steps, noise_level=level)[1].flatten()

    def test_deviations_of_four_and_ten_steps(self):
        """a for k = 0, then a sqrt((N - k) / (k N))."""
        torch.testing.assert_close(self.deviations(4), torch.tensor([0.5, 0.75**0.5 / 2, 0.25, (1 / 12) ** 0.5 / 2]))
        expected = [0.500, 0.474, 0.316, 0.242, 0.194, 0.158, 0.129, 0.104, 0.079, 0.053]
        torch.testing.assert_close(self.deviations(10), torch.tensor(expected), atol=5e-4, rtol=0)

    def test_first_mean_shrinks_x_and_ignores_the_number_of_steps_there(self):
        """(1 - a^2 / 2) x - v / N with a = 0.6: 0.82 * 2 - 3 / N."""
        x, velocity = torch.full((1, 1, 1), 2.0), torch.full((1, 1, 1), 3.0)
        for num_steps in (1, 4, 10):
            mean, std = transition(x, velocity, torch.zeros(1, dtype=int), num_steps=num_steps, noise_level=0.6)
            assert mean.item() == pytest.approx(1.64 - 3 / num_steps, abs=1e-6)
            assert std.item() == pytest.approx(0.6)

    def test_later_mean(self):
        """x - (1 + a^2/2) v / N - a^2 x / (2 N (1 - t)) for a = 1, N = 4, k = 2: 2 - 1.5 * 3 / 4 - 2 / 4."""
        x, velocity = torch.full((1, 1, 1), 2.0), torch.full((1, 1, 1), 3.0)
        mean, std = transition(x, velocity, torch.tensor([2]), num_steps=4, noise_level=1.0)
        assert mean.item() == pytest.approx(2 - 1.125 - 0.5)
        assert std.item() == pytest.approx(0.5)

    def test_mean_moves_along_the_predicted_endpoints(self):
        """The published form: x0 (1 - t') + e (t' - sigma^2 / (2 t N)), with e the predicted noise."""
        generator = torch.Generator().manual_seed(0)
        x, velocity = torch.randn(2, 10, 4, 3, generator=generator)
        step, n, a = torch.arange(10), 10, 0.7
        t = (1 - step / n)[:, None, None]
        sigma2 = a**2 * t / torch.where(t == 1, 1 / n, 1 - t)
        start, end = x - t * velocity, x + (1 - t) * velocity
        expected = start * (1 - t + 1 / n) + end * (t - 1 / n - sigma2 / (2 * t * n))
        mean, std = transition(x, velocity, step, num_steps=n, noise_level=a)
        torch.testing.assert_close(mean, expected, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(std, (sigma2 / n).sqrt())

    def test_times_are_rounded_once(self):
        """0.7 is not 1 - 0.1 - 0.1 - 0.1 in float32."""
        assert time_of(torch.tensor([0, 3]), 10).tolist() == torch.tensor([1.0, 0.7], dtype=torch.float32).tolist()
        assert time_of(torch.arange(4), 4).tolist() == [1.0, 0.75, 0.5, 0.25]

    def test_level_zero_is_the_ode(self):
        x, velocity = torch.randn(2, 4, *SHAPE)
        mean, std = transition(x, velocity, torch.arange(4), num_steps=4, noise_level=0.0)
        torch.testing.assert_close(mean, x - velocity / 4)
        assert not std.any()

    def test_learned_noise_leaves_the_mean_alone(self):
        x, velocity, std = torch.rand(3, 4, *SHAPE)
        mean, deviation = transition(x, velocity, torch.arange(4), num_steps=4, kind="noise", std=std)
        torch.testing.assert_close(mean, x - velocity / 4)
        assert torch.equal(deviation, std)

    def test_unknown_kinds_and_missing_deviations_are_refused(self):
        x, step = torch.zeros(1, 1, 1), torch.zeros(1, dtype=int)
        with pytest.raises(ValueError, match="kind must be one of sde, noise, but is 'cps'"):
            transition(x, x, step, num_steps=4, kind="cps")
        with pytest.raises(ValueError, match="needs the standard deviation"):
            transition(x, x, step, num_steps=4, kind="noise")


class TestDensity:
    def test_equals_torch_s_normal(self):
        generator = torch.Generator().manual_seed(0)
        x, mean, std = torch.randn(3, 5, *SHAPE, generator=generator)
        std = std.exp()
        normal = torch.distributions.Normal(mean, std)
        torch.testing.assert_close(log_density(x, mean, std), normal.log_prob(x))
        torch.testing.assert_close(entropy(std), normal.entropy())

    def test_is_float32_for_bfloat16(self):
        x = torch.zeros(2, 2, dtype=torch.bfloat16)
        assert log_density(x, x, torch.ones(())).dtype == torch.float32

    def test_is_0_without_noise_and_so_is_every_gradient(self):
        """A step that draws nothing has no density; its gradient must not be NaN."""
        mean = torch.tensor([1.0, 2.0], requires_grad=True)
        std = torch.tensor([0.0, 0.5], requires_grad=True)
        density = log_density(torch.tensor([3.0, 2.0]), mean, std)
        (density.sum() + entropy(std).sum()).backward()
        assert density[0] == 0
        assert entropy(std)[0] == 0
        assert mean.grad.tolist() == [0.0, 0.0]
        assert std.grad.tolist() == [0.0, 0.0]  # at x = mean: -1/s of the density and 1/s of the entropy

    def test_level_zero_gives_no_nan_gradient(self):
        x, x_next, velocity = torch.randn(3, 4, 2, *SHAPE)
        velocity.requires_grad_()
        step = torch.randint(4, (4, 2))
        log_prob, _ = score(x, x_next, step, velocity, num_steps=4, noise_level=0.0)
        log_prob.sum().backward()
        assert not log_prob.any()
        assert not velocity.grad.any()

    def test_learned_deviation_stays_inside_its_range(self):
        """Halfway in the logarithm of the variance, 0 gives the geometric mean: sqrt(.08 * .16)."""
        std = learned_std(torch.tensor([-50.0, 0.0, 50.0]), low=0.08, high=0.16)
        torch.testing.assert_close(std, torch.tensor([0.08, 0.0128**0.5, 0.16]))
        raw = torch.zeros(1, requires_grad=True)
        learned_std(raw, low=0.08, high=0.16).backward()
        torch.testing.assert_close(raw.grad, torch.tensor([0.0128**0.5 * math.log(2) / 2]))


class TestDraws:
    def test_one_step_per_decision_each_equally_likely(self):
        draws = draw(streams(2000), SHAPE, num_steps=4)
        assert draws.step.shape == (2000, 1)
        counts = draws.step.flatten().bincount(minlength=4)
        assert (counts - 500).abs().max() < 80  # four standard deviations of a binomial
        assert draws.noise.shape == (2000, 1, *SHAPE)

    def test_every_step(self):
        draws = draw(streams(2), SHAPE, num_steps=4, every_step=True)
        assert draws.step.tolist() == [[0, 1, 2, 3]] * 2
        assert draws.noise.shape == (2, 4, *SHAPE)

    def test_last_step_can_be_left_out(self):
        assert draw(streams(200), SHAPE, num_steps=4, skip_last=True).step.max() == 2
        assert draw(streams(1), SHAPE, num_steps=4, skip_last=True, every_step=True).step.tolist() == [[0, 1, 2]]
        assert draw(streams(1), SHAPE, num_steps=1, skip_last=True).step.tolist() == [[0]]

    def test_a_row_depends_on_its_own_stream_only(self):
        whole = draw(streams(4), SHAPE, num_steps=4)
        alone = draw(streams(4)[2:3], SHAPE, num_steps=4)
        for name in ("start", "step", "noise"):
            assert torch.equal(getattr(alone, name)[0], getattr(whole, name)[2])

    def test_streams_go_on(self):
        generators = streams(2)
        first, second = (draw(generators, SHAPE, num_steps=4) for _ in range(2))
        assert not torch.equal(first.start, second.start)

    def test_number_of_steps_is_checked(self):
        with pytest.raises(ValueError, match="num_steps must be at least 1, but is 0"):
            draw(streams(1), SHAPE, num_steps=0)


class TestSampling:
    @pytest.mark.parametrize("kind", ["sde", "noise"])
    @pytest.mark.parametrize("every_step", [False, True])
    def test_scoring_with_the_same_weights_gives_the_same_log_prob(self, kind, every_step):
        """The ratio before the first update is 1."""
        draws = draw(streams(6), SHAPE, num_steps=5, every_step=every_step)
        chain = sample(linear, draws, num_steps=5, kind=kind)
        x, step = chain.x.flatten(0, 1), chain.step.flatten()
        velocity, std = (y.view_as(chain.x) for y in linear(x, time_of(step, 5)))
        log_prob, bonus = score(chain.x, chain.x_next, chain.step, velocity, std=std, num_steps=5, kind=kind)
        torch.testing.assert_close(log_prob, chain.log_prob, atol=1e-5, rtol=1e-5)
        assert (bonus is None) == (kind == "sde")

    def test_log_prob_is_the_noise_that_was_drawn(self):
        draws = draw(streams(6), SHAPE, num_steps=5, every_step=True)
        chain = sample(linear, draws, num_steps=5)
        deviations = transition(chain.x, chain.x, draws.step, num_steps=5)[1]
        expected = -0.5 * draws.noise.square() - deviations.log() - 0.5 * math.log(2 * math.pi)
        torch.testing.assert_close(chain.log_prob, expected, atol=1e-4, rtol=1e-4)

    def test_steps_that_draw_nothing_follow_the_ode(self):
        """Up to its noisy step a chain is the ODE's, and from there on the ODE's from x_next."""
        draws = Draws(start=torch.randn(2, *SHAPE), step=torch.tensor([[1], [3]]), noise=torch.randn(2, 1, *SHAPE))
        chain = sample(linear, draws, num_steps=4)
        x = draws.start
        for index in range(4):
            hit = draws.step[:, 0] == index
            torch.testing.assert_close(chain.x[hit, 0], x[hit])
            euler = x - linear(x, time_of(torch.full((2,), index), 4))[0] / 4
            x = torch.where(hit[:, None, None], chain.x_next[:, 0], euler)
        torch.testing.assert_close(chain.action, x)

    def test_without_noise_sampling_is_integration(self):
        draws = draw(streams(3), SHAPE, num_steps=4, every_step=True)
        chain = sample(linear, draws, num_steps=4, noise_level=0.0)
        torch.testing.assert_close(chain.action, integrate(linear, draws.start, num_steps=4))
        assert not chain.log_prob.any()

    def test_stored_chain_is_float32_and_not_clipped(self):
        def coarse(x, time):
            return (10 * x.bfloat16()), None

        chain = sample(coarse, draw(streams(3), SHAPE, num_steps=4, every_step=True), num_steps=4)
        assert isinstance(chain, Chain)
        for tensor in (chain.action, chain.x, chain.x_next, chain.log_prob):
            assert tensor.dtype == torch.float32
        assert chain.x_next.abs().max() > 3

    def test_gradient_of_a_log_prob_against_finite_differences(self):
        x, x_next, velocity = torch.randn(3, 2, 1, *SHAPE, generator=torch.Generator().manual_seed(0))
        step, velocity = torch.tensor([[0], [2]]), velocity.requires_grad_()
        score(x, x_next, step, velocity, num_steps=4)[0].sum().backward()
        bump = torch.zeros_like(velocity)
        bump[1, 0, 2, 1] = 1e-2
        up, down = (score(x, x_next, step, velocity + sign * bump, num_steps=4)[0].sum() for sign in (1, -1))
        # The log-density is a parabola in the velocity, so the central difference is exact but for rounding.
        assert ((up - down) / 2e-2).item() == pytest.approx(velocity.grad[1, 0, 2, 1].item(), rel=1e-3)


class TestMarginals:
    """One dimension, a mixture of three Gaussians, its exact velocity: what do the samplers do to the distribution?

    The measure is the Wasserstein-1 distance to the data law at t = 0; with 10000 samples its floor is about 0.013.
    """

    WEIGHT = torch.tensor([0.3, 0.5, 0.2], dtype=torch.float64)
    MEAN = torch.tensor([-1.5, 0.4, 2.0], dtype=torch.float64)
    STD = torch.tensor([0.25, 0.15, 0.4], dtype=torch.float64)
    COUNT = 10000

    def velocity(self, x, time):
        """E[noise - action | x_t = x], exactly: each component is Gaussian in (action, noise, x_t)."""
        x, t = x.double(), time.double()[:, None, None]
        center, variance = (1 - t) * self.MEAN, (1 - t) ** 2 * self.STD**2 + t**2
        logits = self.WEIGHT.log() - 0.5 * variance.log() - 0.5 * (x - center) ** 2 / variance
        share = logits.softmax(-1)
        noise = t / variance * (x - center)
        action = self.MEAN + (1 - t) * self.STD**2 / variance * (x - center)
        return (share * (noise - action)).sum(-1, keepdim=True).float(), None

    def data(self, count, seed=1):
        generator = torch.Generator().manual_seed(seed)
        which = torch.multinomial(self.WEIGHT, count, replacement=True, generator=generator)
        noise = torch.randn(count, generator=generator, dtype=torch.float64)
        return self.MEAN[which] + self.STD[which] * noise

    def draws(self, num_steps, *, one=False):
        generator = torch.Generator().manual_seed(0)
        count = 1 if one else num_steps
        step = (
            torch.randint(num_steps, (self.COUNT, 1), generator=generator)
            if one
            else torch.arange(num_steps).expand(self.COUNT, -1)
        )
        shapes = ((self.COUNT, 1, 1), (self.COUNT, count, 1, 1))
        start, noise = (torch.randn(shape, generator=generator) for shape in shapes)
        return Draws(start=start, step=step, noise=noise)

    def distance(self, samples):
        return (samples.flatten().double().sort().values - self.data(self.COUNT).sort().values).abs().mean().item()

    def sde(self, num_steps, level, **options):
        return sample(self.velocity, self.draws(num_steps, **options), num_steps=num_steps, noise_level=level)

    def wrong(self, num_steps, rule):
        """Walk a chain whose mean and deviation come from `rule(x, v, k, t)`."""
        draws = self.draws(num_steps)
        x = draws.start
        for k in range(num_steps):
            t = 1 - k / num_steps
            velocity = self.velocity(x, torch.full((self.COUNT,), t))[0]
            mean, std = rule(x, velocity, k, t)
            x = mean + std * draws.noise[:, k]
        return x

    @pytest.mark.parametrize("level", [0.3, 0.5, 1.0])
    def test_flow_sde_keeps_the_data_law_and_its_error_vanishes(self, level):
        coarse, fine = (self.distance(self.sde(steps, level).action) for steps in (4, 40))
        assert fine < 0.04
        assert fine < coarse / 2

    def test_flow_sde_is_no_worse_than_the_ode_at_few_steps(self):
        draws = self.draws(4)
        ode = self.distance(integrate(self.velocity, draws.start, num_steps=4))
        assert self.distance(self.sde(4, 0.5).action) < ode
        assert ode == pytest.approx(0.264, abs=0.02)

    def test_flow_sde_keeps_the_law_on_the_way(self):
        """At t = 0.5 the law of x is the mixture with means halved, and variances a quarter plus a quarter."""
        chain = self.sde(40, 0.5)
        mean = 0.5 * (self.WEIGHT * self.MEAN).sum()
        second = (self.WEIGHT * (0.25 * self.MEAN**2 + 0.25 * self.STD**2 + 0.25)).sum()
        assert chain.x[:, 20].var().item() == pytest.approx((second - mean**2).item(), rel=0.05)

    def test_one_noisy_step_keeps_the_data_law(self):
        assert self.distance(self.sde(40, 0.5, one=True).action) < 0.045

    def test_noise_without_the_score_term_does_not_converge(self):
        def rule(x, velocity, k, t, n=40):
            _, std = transition(x[:1], x[:1], torch.tensor([k]), num_steps=n)
            return x - velocity / n, std

        assert self.distance(self.wrong(40, rule)) > 0.3

    def test_score_term_of_the_wrong_sign_diverges(self):
        def rule(x, velocity, k, t, n=40):
            step = torch.full((len(x),), k)
            mean, std = transition(x, velocity, step, num_steps=n)
            euler = x - velocity / n
            return 2 * euler - mean, std

        assert self.distance(self.wrong(40, rule)) > 0.5

    def test_a_clamp_in_place_of_the_first_denominator_is_unusable(self):
        """With 1 - t clamped to 1e-4 the first deviation is 100 a / sqrt(N)."""

        def rule(x, velocity, k, t, n=10, a=0.5):
            sigma2 = a**2 * t / max(1 - t, 1e-4)
            return x - velocity / n - sigma2 / (2 * t * n) * (x + (1 - t) * velocity), (sigma2 / n) ** 0.5

        assert self.distance(self.wrong(10, rule)) > 3

    def test_noise_that_does_not_shrink_with_the_step_keeps_its_bias(self):
        """Flow-CPS turns the predicted noise by an angle: its spread does not go with the square root of the step."""

        def rule(n):
            def turn(x, velocity, k, t, a=0.5):
                after = t - 1 / n
                start, end = x - t * velocity, x + (1 - t) * velocity
                return start * (1 - after) + end * after * math.cos(math.pi * a / 2), after * math.sin(math.pi * a / 2)

            return turn

        assert self.distance(self.wrong(40, rule(40))) > 0.06
        assert self.distance(self.wrong(100, rule(100))) > 0.06
