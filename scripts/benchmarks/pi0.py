"""PI0's speed: sampling against transformers' own PI0 and bare matrix products, and updates that reuse the prefix.

One thread, float32, the same weights in the same process. What is compared takes turns and is measured in CPU time of
one core, which other load on the machine changes less than wall clock time; each figure is the median over the turns,
of times or of ratios within one turn. The bare products are the multiplications that the arithmetic cannot do without,
in the model's order and shapes, each with matrices of its own: masked cameras and padded words left out, keys and
values only of the language model's last block, the state token once. Their rate is measured, not assumed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_accel.batch import make_batch
from vla_accel.config import PPOOptions
from vla_accel.distributed import make_accelerator, prepare_policy
from vla_accel.models.pi0 import load_pi0
from vla_accel.models.pi0.tiny import make_tiny_pi0
from vla_accel.modes import train_mode
from vla_accel.policies.pi0 import Pi0Policy
from vla_accel.ppo import update
from vla_accel.types import Observation, Rollout

SIZES: dict[str, Any] = {
    "layers": 4, "width": 512, "mlp_dim": 2048, "expert_width": 256, "expert_mlp_dim": 1024, "num_heads": 8,
    "head_dim": 64, "vision_width": 192, "vision_depth": 4, "vision_heads": 3, "patch_size": 14, "image_size": 224,
    "chunk": 50, "prompt_length": 48,
}  # fmt: skip
WORDS = 48
LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class Product:
    """`batch` matrices `[rows, inner]` times as many `[inner, columns]`; the matrices are its own, as a layer's are."""

    batch: int
    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.batch * self.rows * self.inner * self.columns

    def task(self) -> Callable[[], Any]:
        """Makes the matrices and returns what multiplies them."""
        shape = (self.batch,) if self.batch > 1 else ()
        left, right = torch.randn(*shape, self.rows, self.inner), torch.randn(*shape, self.inner, self.columns)
        return partial(torch.bmm if shape else torch.mm, left, right, out=torch.empty(*shape, self.rows, self.columns))


def block_products(sizes: dict[str, int], batch: int, tokens: int, seen: int) -> list[Product]:
    """Of one block of a Gemma whose `tokens` see `seen` keys."""
    width, mlp, heads, dim = sizes["width"], sizes["mlp_dim"], sizes["num_heads"], sizes["head_dim"]
    rows = batch * tokens
    return [
        Product(1, rows, width, (heads + 2) * dim),
        Product(batch, heads * tokens, dim, seen),
        Product(batch, heads * tokens, seen, dim),
        Product(1, rows, heads * dim, width),
        Product(1, rows, width, 2 * mlp),
        Product(1, rows, mlp, width),
    ]


def sampling_products(config: Any, batch: int, cameras: int) -> tuple[list[Product], list[Product]]:
    """What sampling actions cannot do without, in the model's order: once per decision, and in every denoising step."""
    vision, vlm, expert = config.vision, config.vlm, config.expert
    patches, inner = (config.image_size // vision["patch_size"]) ** 2, 3 * vision["patch_size"] ** 2
    wide, heads, mlp = vision["width"], vision["num_heads"], vision["mlp_dim"]
    frames, prefix, chunk = batch * cameras, cameras * patches + WORDS, config.chunk_size
    rows = frames * patches
    tower_block = [
        Product(1, rows, wide, 3 * wide),
        Product(frames * heads, patches, wide // heads, patches),
        Product(frames * heads, patches, patches, wide // heads),
        Product(1, rows, wide, wide),
        Product(1, rows, wide, mlp),
        Product(1, rows, mlp, wide),
    ]
    tower = [Product(1, rows, inner, wide), *tower_block * vision["depth"], Product(1, rows, wide, vlm["width"])]
    language = block_products(vlm, batch, prefix, prefix) * (vlm["depth"] - 1)
    last_keys = Product(1, batch * prefix, vlm["width"], 2 * vlm["head_dim"])
    state = block_products(expert, batch, 1, prefix + 1) * (expert["depth"] - 1)
    width, columns, tokens = expert["width"], config.max_action_dim, batch * chunk
    step = [
        Product(1, tokens, columns, width),
        *[Product(1, tokens, width, width)] * 2,
        *block_products(expert, batch, chunk, prefix + 1 + chunk) * expert["depth"],
        Product(1, tokens, width, columns),
    ]
    return [*tower, *language, last_keys, *state], step


def their_model(folder: str, config: Any) -> torch.nn.Module:
    """Transformers' own PI0 with the folder's weights."""
    from transformers.models.pi0 import PI0Config, PI0ForConditionalGeneration

    def stack(sizes: dict[str, int]) -> dict[str, Any]:
        return {
            "model_type": "gemma",
            "vocab_size": config.vocab_size,
            "hidden_size": sizes["width"],
            "intermediate_size": sizes["mlp_dim"],
            "num_hidden_layers": sizes["depth"],
            "num_attention_heads": sizes["num_heads"],
            "num_key_value_heads": sizes["num_kv_heads"],
            "head_dim": sizes["head_dim"],
        }

    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": config.vision["width"],
        "intermediate_size": config.vision["mlp_dim"],
        "num_hidden_layers": config.vision["depth"],
        "num_attention_heads": config.vision["num_heads"],
        "patch_size": config.vision["patch_size"],
        "image_size": config.image_size,
        "vision_use_head": False,
    }
    vlm = {
        "model_type": "paligemma",
        "text_config": stack(config.vlm),
        "vision_config": vision,
        "projection_dim": config.vlm["width"],
        "image_token_id": config.vocab_size,
    }
    wanted = PI0Config(vlm_config=vlm, dit_config=stack(config.expert), chunk_size=config.chunk_size)
    return PI0ForConditionalGeneration.from_pretrained(folder, config=wanted).float().eval()


def seconds(task: Callable[[], Any]) -> float:
    """CPU seconds of this process."""
    begin = time.process_time()
    task()
    return time.process_time() - begin


def in_turn(tasks: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each task in each of `rounds` turns, after one that warms up."""
    found: dict[str, list[float]] = {name: [] for name in tasks}
    for number in range(rounds + 1):
        for name, task in tasks.items():
            taken = seconds(task)
            if number:
                found[name].append(taken)
    return found


def ratio(above: list[float], below: list[float]) -> float:
    """Median of the ratios within one turn."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


@torch.no_grad()
def compare_sampling(ours: Any, theirs: Any, batch: int, cameras: int, options: argparse.Namespace) -> str:
    """One row of the table of sampling."""
    config, draw = ours.config, torch.Generator().manual_seed(0)
    slots, size = len(config.cameras), config.image_size
    images = torch.rand(batch, slots, 3, size, size, generator=draw) * 2 - 1
    image_mask = (torch.arange(slots) < cameras).expand(batch, -1)
    tokens = torch.randint(5, 200, (batch, WORDS), generator=draw)
    token_mask = torch.ones(batch, WORDS, dtype=torch.bool)
    state = torch.randn(batch, config.max_state_dim, generator=draw)
    noise = torch.randn(batch, config.chunk_size, config.max_action_dim, generator=draw)
    patches = (size // config.vision["patch_size"]) ** 2
    inputs = {
        "input_ids": torch.cat([torch.full((batch, slots * patches), config.vocab_size), tokens], 1),
        "pixel_values": images,
        "attention_mask": torch.cat([image_mask.repeat_interleave(patches, 1), token_mask], 1).long(),
        "pixel_attention_mask": torch.ones_like(image_mask),  # its own masking drops slots from the prompt
    }
    results: dict[str, Tensor] = {}

    def sample_ours() -> None:
        results["ours"] = ours.sample_actions(
            images, image_mask, tokens, token_mask, state, noise=noise, num_steps=options.steps
        )

    def sample_theirs() -> None:
        results["theirs"] = theirs.sample_actions(state=state, noise=noise, num_steps=options.steps, **inputs)

    once, step = sampling_products(config, batch, cameras)
    bare = [product.task() for product in once] + [product.task() for product in step] * options.steps
    tasks = {"ours": sample_ours, "theirs": sample_theirs, "bare": lambda: [run() for run in bare]}
    taken = in_turn(tasks, options.rounds)
    here, there, bound = (statistics.median(taken[name]) for name in ("ours", "theirs", "bare"))
    work = sum(product.flops for product in once + step * options.steps) / 1e9
    gap = float((results["ours"] - results["theirs"]).abs().max())
    return (
        f"| {batch} | {cameras} of {slots} | {there * 1e3:.0f} | {here * 1e3:.0f} | "
        f"{ratio(taken['theirs'], taken['ours']):.2f} | {work:.1f} | {work / bound:.0f} | {bound * 1e3:.0f} | "
        f"{ratio(taken['bare'], taken['ours']):.2f} | {gap:.0e} |"
    )


def make_rollout(policy: Pi0Policy, cameras: int, rows: int) -> Rollout:
    """One sampled decision of each of `rows` environments, with random advantages to come."""
    draw = np.random.default_rng(0)
    names = policy.processor.config.cameras[:cameras]
    shape = (rows, 224, 224, 3)
    obs = Observation(
        images={name: draw.integers(0, 256, shape, dtype=np.uint8) for name in names},
        state=draw.uniform(-1, 1, (rows, policy.processor.config.state_dim)).astype(np.float32),
        instructions=[" ".join(["reach the red block and push the blue block"] * 5)] * rows,
    )
    policy.seed(0, first_env=0, num_envs=rows)
    inputs = policy.prepare(obs)
    sample = policy(inputs)
    flags = torch.zeros(1, rows, dtype=torch.bool)
    return Rollout(
        inputs={name: x[None] for name, x in inputs.items()},
        trace={name: x[None] for name, x in sample.trace.items()},
        log_prob=sample.log_prob[None],
        value=sample.value[None],
        next_value=torch.zeros(1, rows),
        reward=torch.zeros(1, rows),
        executed=torch.full((1, rows), policy.chunk_size),
        terminated=flags,
        truncated=flags,
        valid=~flags,
        kept=[{name: x[row] for name, x in sample.kept.items()} for row in range(rows)],
    )


def compare_updates(ours: Any, processor: Any, cameras: int, options: argparse.Namespace) -> str:
    """One row of the table of updates: an epoch with the prefix kept, and with the prefix computed again."""
    ours.paligemma_with_expert.paligemma.requires_grad_(False)
    policy = Pi0Policy(ours, processor).eval()
    accelerator = make_accelerator(cpu=True)
    model, optimizer = prepare_policy(accelerator, policy, learning_rate=LEARNING_RATE)
    rollout, rows = make_rollout(policy, cameras, options.rows), options.rows
    advantage = torch.randn(1, rows, generator=torch.Generator().manual_seed(0))
    batch = make_batch(rollout, advantage, advantage, unit_step=policy.unit_step, first_env=0)
    size = sum(x.numel() * x.element_size() for x in batch.kept[0].values())
    rollout.kept = []
    plain = make_batch(rollout, advantage, advantage, unit_step=policy.unit_step, first_env=0)
    ppo = PPOOptions(epochs=1, micro_batch_size=rows)

    def epoch(batch: Any) -> Callable[[], Any]:
        return lambda: update(
            accelerator, model, optimizer, batch, ppo, unit_step=policy.unit_step, num_minibatches=1, seed=0
        )

    with train_mode(model):
        taken = in_turn({"kept": epoch(batch), "again": epoch(plain)}, options.rounds)
    kept, again = (statistics.median(taken[name]) for name in ("kept", "again"))
    return (
        f"| {rows} | {cameras} of {len(ours.config.cameras)} | {again * 1e3:.0f} | {kept * 1e3:.0f} | "
        f"{ratio(taken['again'], taken['kept']):.1f} | {size / 1e6:.1f} |"
    )


def main(argv: list[str]) -> None:
    """Measure both and print two tables."""
    parser = argparse.ArgumentParser(prog="benchmark.py pi0", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="timed turns (default: 7)")
    parser.add_argument("--steps", type=int, default=10, help="denoising steps (default: 10)")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8], help="batch sizes of sampling (default: 1 8)")
    parser.add_argument("--cameras", type=int, nargs="*", default=[3, 2], help="cameras of three (default: 3 2)")
    parser.add_argument("--rows", type=int, default=8, help="decisions per update; 0: no updates (default: 8)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_pi0(folder, **SIZES)
        ours, processor = load_pi0(folder)
        theirs = their_model(folder, ours.config) if options.batches else None
    with torch.no_grad():
        ours.action_out_proj.weight.normal_(std=0.05)
        if theirs is not None:
            theirs.load_state_dict({"action_out_proj.weight": ours.action_out_proj.weight}, strict=False)
    if options.batches:
        print("| batch | cameras | transformers ms | here ms | times as fast | GFLOP | GFLOP/s of the products "
              "| products ms | products / here | largest difference |")  # fmt: skip
        print("|" + "---|" * 10)
    for batch in options.batches:
        for cameras in options.cameras:
            print(compare_sampling(ours, theirs, batch, cameras, options), flush=True)
    if options.rows:
        print(
            "\n| decisions | cameras | prefix computed again, ms | prefix kept, ms | times as fast | MB per decision |"
        )
        print("|---|---|---|---|---|---|")
        for cameras in options.cameras:
            print(compare_updates(ours, processor, cameras, options), flush=True)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
