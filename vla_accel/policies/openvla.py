"""OpenVLA and OpenVLA-OFT as distributions over action chunks: a thin adapter between model and loop.

Not here: the model (`models/openvla`) and the token maths (`token.py`).
Usage: `policy = OpenVLAPolicy(model, processor, unnorm_key=None, temperature=1.0)`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from vla_accel.config import OFTPolicyConfig, PolicyConfig
from vla_accel.models import load_vla, peek_vla, save_vla, share_weights
from vla_accel.models.openvla.actions import OFT_EPS, ActionStatistics, ActionTokenizer
from vla_accel.policies import token
from vla_accel.policies.base import Policy, PolicySpec, ValueHead
from vla_accel.policies.folders import EMBEDDED, VALUE_HEAD_FILE, load_head, part_of, save_head, value_width
from vla_accel.rules import check
from vla_accel.types import Observation, PolicySample, PolicyScore, TensorDict


def peek(model: str, config: PolicyConfig, suite: str | None) -> PolicySpec:
    """See `policies.peek_policy`."""
    path = config.path or str(EMBEDDED / model)
    vla = peek_vla(path, **_overrides(model, config))
    _check_fits(model, config, path, vla)
    try:
        statistics = ActionStatistics.from_norm_stats(vla.norm_stats, config.unnorm_key, suite=suite)
    except ValueError as error:
        raise ValueError(f"--policy.unnorm_key must fit the checkpoint {path}: {error}") from error
    said = vla.to_dict().get("action_dim", statistics.action_dim)
    rule = f"must name statistics of {said} action dimensions, as config.json of {path} says (these have "
    check(said == statistics.action_dim, "policy.unnorm_key", f"{rule}{statistics.action_dim})", statistics.name)
    return PolicySpec(
        path=path,
        chunk_size=vla.num_actions_chunk,
        action_dim=statistics.action_dim,
        shard_units=OpenVLAPolicy.shard_units,
        embedded=config.path is None,
        num_images=vla.num_images_in_input,
    )


def load(model: str, config: PolicyConfig, suite: str | None) -> OpenVLAPolicy:
    """See `policies.load_policy`."""
    path = config.path or str(EMBEDDED / model)
    vla, processor = load_vla(path, dtype=getattr(torch, config.dtype), **_overrides(model, config))
    _check_fits(model, config, path, vla.config)
    if config.freeze_vision:
        vla.vision_backbone.requires_grad_(False)
    if config.gradient_checkpointing:
        vla.gradient_checkpointing_enable()
    policy = OpenVLAPolicy(
        vla,
        processor,
        unnorm_key=config.unnorm_key,
        suite=suite,
        temperature=config.temperature,
        value_hidden=value_width(path, config.value_hidden),
        value_detach=config.value_detach,
    )
    load_head(policy.value_head, path, VALUE_HEAD_FILE)
    return policy.eval()


def _overrides(model: str, config: PolicyConfig) -> dict[str, Any]:
    """What the choice of the model says about a checkpoint whose own configuration is silent."""
    if model == "openvla":
        return {}
    overrides: dict[str, Any] = {"action_decoding": "parallel"}
    if isinstance(config, OFTPolicyConfig) and config.append_stop_token is not None:
        overrides["append_stop_token"] = config.append_stop_token
    return overrides


def _check_fits(model: str, config: PolicyConfig, path: str, vla: Any) -> None:
    """Raise a `ValueError` if a checkpoint's configuration `vla` or its value head contradicts the options."""
    check(
        vla.is_parallel == (model == "openvla-oft"),
        "model",
        f"must be openvla-oft, since the checkpoint {path} decodes its actions in parallel",
        model,
    )
    value_width(path, config.value_hidden)


class OpenVLAPolicy(Policy):
    """One token per action dimension and environment step, each over the checkpoint's action bins.

    The autoregressive model draws its 7 tokens one after the other and acts for one step; the parallel one (OFT) draws
    the K x A tokens of a chunk at once. `trace` is `{"bins": int64 [B, U]}`, indices into the action bins.
    The value is read from the hidden state that predicts the first token, in rollout and update alike.

    Args:
        model: an `OpenVLAForActionPrediction`.
        processor: its `PrismaticProcessor`.
        unnorm_key: which statistics un-normalise actions; None: the only ones, or those of `suite`.
        suite: name of the environment, tried as a key of the statistics.
        temperature: of sampling, above 0.
        value_hidden: width of the value head.
        value_detach: whether the value head is cut off from the trunk.
        cameras: which of the observation's cameras the model sees, in order; None: as many of the first as the
            checkpoint takes.

    Raises:
        ValueError: when the checkpoint has no statistics, or an ambiguous or unknown key is given.
    """

    shard_units: ClassVar[tuple[str, ...]] = ("LlamaDecoderLayer", "VisionBlock")

    def __init__(
        self,
        model: Any,
        processor: Any,
        *,
        unnorm_key: str | None = None,
        suite: str | None = None,
        temperature: float = 1.0,
        value_hidden: int = 256,
        value_detach: bool = True,
        cameras: tuple[str, ...] | None = None,
    ):
        super().__init__()
        config = model.config
        self.statistics = ActionStatistics.from_norm_stats(config.norm_stats, unnorm_key, suite=suite)
        self.chunk_size = config.num_actions_chunk
        self.action_dim = config.action_dim = self.statistics.action_dim  # a checkpoint may know several robots
        self.temperature = temperature
        self.cameras = cameras
        self.model = model
        self.processor = processor
        self.tokenizer = ActionTokenizer(config.action_token_begin + config.n_action_bins, config.n_action_bins)
        self.value_head = ValueHead(config.text_config.hidden_size, hidden_dim=value_hidden, detach=value_detach)
        self.register_buffer(
            "unit_step", torch.arange(self.chunk_size).repeat_interleave(self.action_dim), persistent=False
        )
        self.streams: list[torch.Generator] = []
        self._prompts: dict[str, Tensor] = {}
        self._prompt_length = 0

    def fit_instructions(self, instructions: list[str]) -> None:
        """See the base class."""
        self._prompt_length = max(len(self._prompt(text)) for text in instructions)

    def prepare(self, obs: Observation) -> TensorDict:
        """Resize the images and look up the prompts' token ids.

        Returns:
            `images` uint8 `[N, C, 3, S, S]`, `input_ids` and `attention_mask` int64 `[N, L]`, and, where the
            checkpoint reads proprioception, `proprio` float32 `[N, Q]` in -1..1.
        """
        frames = [self.processor.image_processor.resize(list(obs.images[name])) for name in self._cameras(obs)]
        prompts = [self._prompt(text) for text in obs.instructions]
        length = max(self._prompt_length, *(len(prompt) for prompt in prompts))
        ids = torch.zeros(len(prompts), length, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, prompt in enumerate(prompts):
            ids[i, : len(prompt)] = prompt
            mask[i, : len(prompt)] = 1
        inputs = {"images": torch.stack(frames, dim=1), "input_ids": ids, "attention_mask": mask}
        if self.model.config.use_proprio:
            inputs["proprio"] = torch.from_numpy(self.statistics.normalize_proprio(obs.state).astype(np.float32))
        return inputs

    def forward(
        self, inputs: TensorDict, trace: TensorDict | None = None, *, greedy: bool = False
    ) -> PolicySample | PolicyScore:
        """See the base class."""
        if trace is None:
            with torch.no_grad():
                return self._act(inputs, greedy)
        ids = trace["bins"] + self.tokenizer.begin
        states = self.model.action_states(**self._model_inputs(inputs), action_ids=ids)
        logits = self.model.action_logits(states)
        log_prob, entropy = token.score(logits, trace["bins"], temperature=self.temperature)
        if "target" in trace:  # imitation of soft targets; see encode_demonstration
            log_prob = token.likelihood(logits, trace["target"])
        return PolicyScore(log_prob=log_prob, entropy=entropy, value=self.value_head(states[:, 0]))

    def encode_demonstration(self, action: Tensor, *, smoothing: float = 0.0, repeats: int = 1) -> TensorDict:
        """See the base class. Actions outside the statistics' range are clipped to its ends."""
        check(repeats == 1, "sft.repeats", "must be 1 for tokens, since nothing about their score is random", repeats)
        normalized = self.statistics.normalize(action.cpu().double().numpy())
        ids = self.tokenizer.encode(normalized).reshape(len(action), -1)
        bins = torch.from_numpy(ids - self.tokenizer.begin)
        if smoothing == 0:
            return {"bins": bins}
        return {"bins": bins, "target": token.smoothed(bins, self.tokenizer.n_bins, width=smoothing)}

    def save(self, folder: str, state_dict: TensorDict) -> None:
        """See the base class: a folder of the original layout, and the value head in a file of its own."""
        save_vla(self.model, self.processor, folder, state_dict=part_of(state_dict, "model."))
        save_head(state_dict, "value_head.", folder, VALUE_HEAD_FILE)
        share_weights(folder)

    def _act(self, inputs: TensorDict, greedy: bool) -> PolicySample:
        log_probs: list[Tensor] = []
        rows = len(inputs["input_ids"])
        if not greedy and len(self.streams) != rows:
            raise RuntimeError(
                f"{rows} environments are to sample, but there are {len(self.streams)} streams of noise. Call "
                f"seed(seed, first_env=..., num_envs={rows}) first, or act with greedy=True."
            )

        def choose(logits: Tensor) -> Tensor:
            noise = None if greedy else token.gumbel_noise(self.streams, tuple(logits.shape[1:])).to(logits.device)
            index = token.sample(logits, temperature=self.temperature, noise=noise)
            log_probs.append(token.score(logits, index, temperature=self.temperature)[0])
            return index

        states, ids = self.model.decode_actions(**self._model_inputs(inputs), choose=choose)
        log_prob = log_probs[0] if log_probs[0].dim() == 2 else torch.stack(log_probs, dim=1)
        return PolicySample(
            action=self._environment_action(ids),
            trace={"bins": ids - self.tokenizer.begin},
            log_prob=log_prob,
            value=self.value_head(states[:, 0]),
        )

    def _environment_action(self, ids: Tensor) -> Tensor:
        """Token ids `[N, U]` to actions in environment units, float32 `[N, K, A]`."""
        normalized = self.tokenizer.decode(ids.cpu().numpy()).reshape(-1, self.chunk_size, self.action_dim)
        action = self.statistics.unnormalize(normalized, eps=OFT_EPS if self.model.config.is_parallel else 0.0)
        return torch.from_numpy(np.asarray(action, dtype=np.float32)).to(ids.device)

    def _model_inputs(self, inputs: TensorDict) -> dict[str, Tensor | None]:
        images = inputs["images"]
        pixels = self.processor.image_processor.normalize(images.flatten(0, 1))
        pixels = pixels.unflatten(0, images.shape[:2]).flatten(1, 2)
        return {
            "input_ids": inputs["input_ids"],
            "attention_mask": inputs["attention_mask"],
            "pixel_values": pixels.to(self.model.dtype),
            "proprio": inputs.get("proprio"),
        }

    def _cameras(self, obs: Observation) -> tuple[str, ...]:
        wanted = self.model.config.num_images_in_input
        names = self.cameras or tuple(obs.images)[:wanted]
        if len(names) != wanted or any(name not in obs.images for name in names):
            raise ValueError(
                f"The checkpoint takes {wanted} image(s) per decision, but the environment shows the cameras "
                f"{', '.join(obs.images)}. Choose as many with --env.options cameras."
            )
        return names

    def _prompt(self, text: str) -> Tensor:
        if text not in self._prompts:
            ids, mask = self.processor.encode([text])
            self._prompts[text] = ids[0][mask[0].bool()]
        return self._prompts[text]
