"""PI0 and PI0.5 as distributions over action chunks: a thin adapter between model and loop.

Not here: the model (`models/pi0`) and the maths of denoising (`flow.py`).
Usage: `policy = Pi0Policy(model, processor, num_steps=4)`.

The observation runs through the vision-language model once per decision; denoising steps, their scores and the value
read what it left.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vla_accel.config import Pi0PolicyConfig
from vla_accel.models import load_vla, peek_vla, save_vla, share_weights
from vla_accel.models.pi0.prefix import PrefixCache
from vla_accel.policies import flow
from vla_accel.policies.base import Policy, PolicySpec, ValueHead
from vla_accel.policies.folders import EMBEDDED, VALUE_HEAD_FILE, load_head, part_of, save_head, value_width
from vla_accel.rules import check
from vla_accel.types import Observation, PolicySample, PolicyScore, TensorDict, UnitGroups

NOISE_HEAD_FILE = "noise_head.safetensors"

KIND_OF = {"sde": "sde", "learned": "noise"}
"""`policy.noise` -> kind of transition in `flow`."""
DEFAULT_LEVEL = {"sde": 0.5, "learned": 0.16}
"""`policy.noise` -> noise level; after arXiv 2510.25889."""
DEFAULT_CACHE_GB = 8.0
KEPT = "prefix."
"""Begins the names of what is kept of the language model's pass."""


def peek(model: str, config: Pi0PolicyConfig, suite: str | None) -> PolicySpec:  # noqa: ARG001 - one signature for all
    """See `policies.peek_policy`."""
    path = config.path or str(EMBEDDED / model)
    options = {"tokenizer": config.tokenizer, "constant_dims": config.constant_dims}
    vla = peek_vla(path, **options, need_statistics=True)
    _check_fits(model, config, path, vla)
    return PolicySpec(
        path=path,
        chunk_size=vla.chunk_size,
        action_dim=vla.action_dim,
        shard_units=Pi0Policy.shard_units,
        embedded=config.path is None,
        num_images=len(vla.cameras),
        has_entropy=config.noise == "learned",
        has_bins=False,
    )


def load(model: str, config: Pi0PolicyConfig, suite: str | None) -> Pi0Policy:  # noqa: ARG001 - one signature for all
    """See `policies.load_policy`."""
    path = config.path or str(EMBEDDED / model)
    vla, processor = load_vla(
        path,
        dtype=getattr(torch, config.dtype),
        expert_dtype=torch.float32,  # small steps of a learning rate vanish in bfloat16
        tokenizer=config.tokenizer,
        constant_dims=config.constant_dims,
        need_statistics=True,
    )
    _check_fits(model, config, path, vla.config)
    if config.freeze_vlm:
        vla.paligemma_with_expert.paligemma.requires_grad_(False)
    if config.gradient_checkpointing:
        vla.gradient_checkpointing_enable()
    policy = Pi0Policy(
        vla,
        processor,
        num_steps=config.num_steps,
        noise=config.noise,
        noise_level=config.noise_level,
        every_step=config.noise_steps == "all",
        value_hidden=value_width(path, config.value_hidden),
        value_detach=config.value_detach,
        prefix_cache_gb=DEFAULT_CACHE_GB if config.prefix_cache_gb is None else config.prefix_cache_gb,
        keep_on_host=config.prefix_cache_place == "host",
    )
    load_head(policy.value_head, path, VALUE_HEAD_FILE)
    load_head(policy.noise_head, path, NOISE_HEAD_FILE)
    return policy.eval()


def _check_fits(model: str, config: Pi0PolicyConfig, path: str, vla: Any) -> None:
    """Raise a `ValueError` if a checkpoint's configuration `vla` or its value head contradicts the options."""
    variant = getattr(vla, "variant", "openvla")
    check(variant == model, "model", f"must be {variant}, as the checkpoint {path} is", model)
    value_width(path, config.value_hidden)


class NoiseHead(nn.Module):
    """An MLP from the action expert's output to how much noise each action element gets (arXiv 2510.25889).

    The last layer starts at zero: the first deviation is the geometric mean of its bounds.

    Args:
        feature_dim: width of the expert.
        action_dim: D.
    """

    def __init__(self, feature_dim: int, action_dim: int):
        super().__init__()
        self.fc1 = nn.Linear(feature_dim, 128)
        self.fc2 = nn.Linear(128, 64)
        self.out = nn.Linear(64, action_dim)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, feature: Tensor) -> Tensor:
        """Map features `[..., feature_dim]` to `[..., D]`, unbounded."""
        hidden = torch.tanh(self.fc1(feature.to(self.fc1.weight.dtype)))
        return self.out(torch.tanh(self.fc2(hidden)))


class Pi0Policy(Policy):
    """A chain of denoising steps, of which one, drawn anew for each decision, or all are random.

    Units are the elements of the random steps' transitions that lie in the chunk's K steps and A real action
    dimensions: `U = S * K * A`. `trace` is `{"x", "x_next"}` float32 `[B, S, H, D]` and `{"step"}` int64 `[B, S]`; see
    `flow.Chain`. Greedy actions follow the flow without noise from one fixed start, the same for every observation;
    their log-probability and trace are 0.
    The value is read from the language model's mean output and the robot state, which no denoising step changes;
    where nobody reads it, it is 0 and the language model's last block is not run.
    What a frozen vision-language model left of an observation is kept for the update, if there is room for it: keys,
    values and mean output.

    Args:
        model: a `Pi0Model`.
        processor: its `Pi0Processor`.
        num_steps: denoising steps.
        noise: `"sde"` or `"learned"`.
        noise_level: strength of `sde`, or largest standard deviation of `learned`, whose smallest is half of it. None:
            the usual one.
        every_step: all denoising steps are random.
        value_hidden: width of the value head.
        value_detach: whether the value head is cut off from the trunk.
        prefix_cache_gb: gigabytes per rollout for what is kept; unused where a weight of the vision-language model is
            trained.
        keep_on_host: it goes to the CPU's memory instead of staying on the device.

    Raises:
        ValueError: when the checkpoint has no statistics.
    """

    shard_units: ClassVar[tuple[str, ...]] = ("GemmaLayer", "SiglipLayer")

    def __init__(
        self,
        model: Any,
        processor: Any,
        *,
        num_steps: int = 4,
        noise: str = "sde",
        noise_level: float | None = None,
        every_step: bool = False,
        value_hidden: int = 256,
        value_detach: bool = True,
        prefix_cache_gb: float = DEFAULT_CACHE_GB,
        keep_on_host: bool = False,
    ):
        super().__init__()
        config = model.config
        processor.check_statistics()
        self.chunk_size, self.action_dim = config.chunk_size, config.action_dim
        self.num_steps, self.kind, self.every_step = num_steps, KIND_OF[noise], every_step
        self.noise_level = DEFAULT_LEVEL[noise] if noise_level is None else noise_level
        self.model, self.processor = model, processor
        frozen = not any(p.requires_grad for p in model.paligemma_with_expert.paligemma.parameters())
        self.keep_bytes, self.keep_on_host = int(prefix_cache_gb * 1e9) if frozen else 0, keep_on_host
        feature_dim = config.vlm["width"] + config.max_state_dim
        self.value_head = ValueHead(feature_dim, hidden_dim=value_hidden, detach=value_detach)
        width, padded = config.expert["width"], config.max_action_dim
        self.noise_head = NoiseHead(width, padded) if noise == "learned" else None
        step = torch.arange(self.chunk_size).repeat_interleave(self.action_dim)
        self.register_buffer("unit_step", step.repeat(num_steps if every_step else 1), persistent=False)
        start = torch.randn(self.chunk_size, padded, generator=torch.Generator().manual_seed(0))
        self.register_buffer("greedy_start", start, persistent=False)
        self.streams: list[torch.Generator] = []

    def prepare(self, obs: Observation) -> TensorDict:
        """Hand cameras over and write the prompts; see `Pi0Processor.prepare`.

        Cameras that the checkpoint does not know by name take its places in their order.
        """
        places = {name: self.processor.camera_of(name) for name in obs.images}
        free = (camera for camera in self.processor.config.cameras if camera not in places.values())
        frames = {places[name] or next(free, None): frame for name, frame in obs.images.items()}
        frames.pop(None, None)  # of cameras that the checkpoint has no place for
        return self.processor.prepare(frames, obs.state, obs.instructions)

    def forward(
        self, inputs: TensorDict, trace: TensorDict | None = None, *, greedy: bool = False
    ) -> PolicySample | PolicyScore:
        """See the base class."""
        if trace is None:
            with torch.no_grad():
                return self._act(inputs, greedy)
        cache, state, value, _ = self._observe(inputs)
        if "time" in trace:  # imitation; see encode_demonstration
            return PolicyScore(log_prob=self._imitate(cache, state, trace), entropy=None, value=value)
        log_prob, entropy = [], []
        for slot in range(trace["step"].shape[1]):
            x, x_next, step = trace["x"][:, slot], trace["x_next"][:, slot], trace["step"][:, slot]
            velocity, std = self._read(*self.model.denoise(cache, state, x, flow.time_of(step, self.num_steps)))
            options = {"num_steps": self.num_steps, "kind": self.kind, "noise_level": self.noise_level, "std": std}
            density, spread = flow.score(x, x_next, step, velocity, **options)
            log_prob.append(self._units(density))
            if spread is not None:
                entropy.append(self._units(spread))
        return PolicyScore(
            log_prob=torch.cat(log_prob, 1),
            entropy=torch.cat(entropy, 1) if entropy else None,
            value=value,
            groups=UnitGroups(
                names=tuple(f"step_{step}" for step in range(self.num_steps)),
                index=trace["step"].repeat_interleave(self.chunk_size * self.action_dim, 1),
            ),
        )

    def encode_demonstration(self, action: Tensor, *, smoothing: float = 0.0, repeats: int = 1) -> TensorDict:
        """Points of the flow towards the actions, with noise and time from torch's global generator.

        The score of such a trace has, as `log_prob` `[B, repeats * K * A]`, minus half the squared error of the
        velocity: its log-density under unit variance, but for a constant. So raising it is flow matching.
        """
        check(smoothing == 0, "sft.smoothing", "must be 0 for a flow policy, which has no bins", smoothing)
        target = self.processor.normalize_actions(action.cpu())
        noise = torch.randn(len(target), repeats, *target.shape[1:])
        time = self.model.sample_time(len(target) * repeats).view(-1, repeats)
        return {"action": target, "noise": noise, "time": time}

    def save(self, folder: str, state_dict: TensorDict) -> None:
        """See the base class: a folder of LeRobot's layout, and each head in a file of its own."""
        save_vla(self.model, self.processor, folder, state_dict=part_of(state_dict, "model."))
        save_head(state_dict, "value_head.", folder, VALUE_HEAD_FILE)
        save_head(state_dict, "noise_head.", folder, NOISE_HEAD_FILE)
        share_weights(folder)

    def _act(self, inputs: TensorDict, greedy: bool) -> PolicySample:
        cache, state, value, kept = self._observe(inputs)
        step = self.model.stepper(cache, state)
        rows, size = len(state), tuple(self.greedy_start.shape)
        if greedy:
            start = self.greedy_start.expand(rows, *size)
            action = flow.integrate(step, start, num_steps=self.num_steps)
            count = len(self.unit_step) // (self.chunk_size * self.action_dim)
            zeros = torch.zeros(rows, count, *size, device=state.device)
            index = torch.zeros(rows, count, dtype=torch.int64, device=state.device)
            trace, log_prob, kept = {"x": zeros, "x_next": zeros, "step": index}, zeros, {}
        else:
            if len(self.streams) != rows:
                raise RuntimeError(
                    f"{rows} environments are to sample, but there are {len(self.streams)} streams of noise. Call "
                    f"seed(seed, first_env=..., num_envs={rows}) first, or act with greedy=True."
                )
            draws = flow.draw(self.streams, size, num_steps=self.num_steps, every_step=self.every_step)
            chain = flow.sample(
                lambda x, time: self._read(*step(x, time)),
                draws.to(state.device),
                num_steps=self.num_steps,
                kind=self.kind,
                noise_level=self.noise_level,
            )
            action, log_prob = chain.action, chain.log_prob
            trace = {"x": chain.x, "x_next": chain.x_next, "step": chain.step}
        action = self.processor.unnormalize_actions(action)
        return PolicySample(action=action, trace=trace, log_prob=self._units(log_prob), value=value, kept=kept)

    def _observe(self, inputs: TensorDict) -> tuple[PrefixCache, Tensor, Tensor, TensorDict]:
        """What the vision-language model leaves for the expert, the normalised state, the value, and what to keep."""
        kept = {name: x for name, x in inputs.items() if name.startswith(KEPT)}
        state = inputs["state"]
        if not kept:
            observed = self.processor.model_inputs(inputs)
            del observed["state"]
            cache = self.model.prefix_cache(**observed, with_output=self.value_read)
            if not self.value_read:
                return cache, state, state.new_zeros(len(state)), {}
            kept = {KEPT + name: getattr(cache, name) for name in ("keys", "values", "mask")}
            kept[KEPT + "mean"] = cache.mean_output()
        cache = PrefixCache(*(kept[KEPT + name] for name in ("keys", "values", "mask")))
        value = self.value_head(torch.cat([kept[KEPT + "mean"], state], 1))
        return cache, state, value, kept if self.keep_bytes else {}

    def _read(self, velocity: Tensor, feature: Tensor) -> tuple[Tensor, Tensor | None]:
        """The expert's answer as `flow` takes it: velocity and, where it is learned, the standard deviation."""
        if self.noise_head is None:
            return velocity, None
        raw = self.noise_head(feature)
        return velocity, flow.learned_std(raw, low=self.noise_level / 2, high=self.noise_level)

    def _imitate(self, cache: Any, state: Tensor, trace: TensorDict) -> Tensor:
        rows, repeats = trace["time"].shape
        row = torch.arange(rows, device=state.device).repeat_interleave(repeats)
        time, noise, action = trace["time"].flatten(), trace["noise"].flatten(0, 1), trace["action"][row]
        x = torch.lerp(action, noise, time[:, None, None])
        velocity, std = self._read(*self.model.denoise(cache.select(row), state[row], x, time))
        error = (velocity - (noise - action)).square()
        if std is not None:
            error = error + 0.0 * std  # data parallelism waits for every parameter's gradient
        return self._units(-0.5 * error.unflatten(0, (rows, repeats)))

    def _units(self, x: Tensor) -> Tensor:
        """Elements of the model's actions, `[B, ..., H, D]`, to units `[B, U]`."""
        return x[..., : self.chunk_size, : self.action_dim].flatten(1)
