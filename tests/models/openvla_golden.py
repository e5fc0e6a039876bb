"""The tiny model that the original OpenVLA code made and ran, and what it returned. Helpers, no tests.

`weights.safetensors` holds the checkpoint's bfloat16 tensors, except that of the two 32064-row matrices (token
embedding and head) only the rows whose ids occur in the inputs, and the 256 action rows, are stored. The other rows
matter to nothing but full-vocabulary sums (loss, logsumexp, argmax) and are drawn again as they were drawn first, from
a seeded generator; that the draw is the same is checked on the stored rows.
"""

import functools
import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from vla_accel.models.openvla.configuration import OpenVLAConfig
from vla_accel.models.openvla.modeling import OpenVLAForActionPrediction

DATA = Path(__file__).parents[1] / "data" / "openvla"
EMBED, HEAD = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"
SPACE_ID = 29871  # ends every prompt
ACTIONS = slice(31744, 32000)
TOLERANCE = {"atol": 1e-4, "rtol": 0}
_SEED, _STD = 20240613, {EMBED: 0.5, HEAD: 0.1875}

GOLDEN = load_file(DATA / "golden.safetensors")
PIXELS = GOLDEN["pixel_values"]  # of the prompts p0, p1, p2


def golden(prefix):
    """Tensors whose names start with `prefix/`, by the rest of the name."""
    return {name[len(prefix) + 1 :]: x for name, x in GOLDEN.items() if name.startswith(prefix + "/")}


@functools.lru_cache
def weights():
    """The whole checkpoint, bfloat16."""
    stored = load_file(DATA / "weights.safetensors")
    with safe_open(DATA / "weights.safetensors", framework="pt") as file:
        order = json.loads(file.metadata()["order"])
    generator = torch.Generator().manual_seed(_SEED)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in order}
    rows = stored.pop("rows")
    for name, key in ((EMBED, "embed_rows"), (HEAD, "head_rows")):
        matrix = drawn[name] * _STD[name]
        if name == HEAD:
            matrix[ACTIONS] *= 3
        kept = stored.pop(key)
        # Rounding to bfloat16 moves a number by at most 2**-8 of it; another stream of numbers would be far off.
        torch.testing.assert_close(matrix[rows], kept.float(), atol=1e-6, rtol=2**-8)
        matrix[rows] = kept.float()
        stored[name] = matrix.bfloat16()
    return stored


def make_model(**options):
    """The golden model in float32, with the extra modules that `options` ask for."""
    model = OpenVLAForActionPrediction(OpenVLAConfig(**{**json.loads((DATA / "config.json").read_text()), **options}))
    names = model.state_dict().keys()
    extra = {name: x for name, x in golden("extra").items() if name in names}
    model.load_state_dict({name: x.float() for name, x in (weights() | extra).items()}, strict=True)
    return model.eval()


def oft_model(**options):
    """The golden model decoding in parallel, 8 x 7 tokens."""
    return make_model(action_decoding="parallel", num_actions_chunk=8, **options)


def prompt(index):
    """The original's inputs for prompt `index` alone, 29871 included."""
    inputs = golden(f"base/p{index}")
    return {
        "input_ids": inputs["input_ids"],
        "attention_mask": inputs["attention_mask"],
        "pixel_values": PIXELS[index : index + 1],
    }


def write_folder(folder):
    """Write the golden checkpoint as the original wrote it (without tokenizer files)."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json", "preprocessor_config.json", "dataset_statistics.json"):
        shutil.copy(DATA / name, folder / name)
    save_file(weights(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def log_probs_and_entropy(logits, ids, temperature):
    """Log-probability of vocabulary ids and entropy, over the 256 action columns."""
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(-1, (ids - ACTIONS.start).unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def greedy(logits):
    return logits.argmax(-1)
