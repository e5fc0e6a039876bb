"""The tiny PI0 and PI0.5 that the original codes ran, and what they returned. Helpers, no tests.

`folder` writes a checkpoint in one of the layouts that occur in the wild; `model` loads one.
"""

import functools
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from vla_accel.models.pi0 import load_model, read_config
from vla_accel.models.pi0.loading import EMBEDDING, EXPERT_HEAD, VLM_HEAD

DATA = Path(__file__).parents[1] / "data" / "pi0"
SIZES = json.loads((DATA / "sizes.json").read_text())
VARIANTS = ("pi0", "pi05")
INPUTS = load_file(DATA / "inputs.safetensors")
OBSERVATION = tuple(INPUTS[name] for name in ("images", "img_masks", "lang_tokens", "lang_masks"))
STATE, NOISE, ACTIONS, TIME = (INPUTS[name] for name in ("state", "noise", "actions", "time"))
# Of its gradient the first 8 filters are stored.
PATCHES = "paligemma_with_expert.paligemma.model.vision_tower.vision_model.embeddings.patch_embedding.weight"


@functools.lru_cache
def outputs(variant):
    """What the original returned."""
    return load_file(DATA / f"outputs_{variant}.safetensors")


@functools.lru_cache
def weights(variant):
    """The checkpoint's tensors under our names; embedding rows that no input uses are 0."""
    stored = load_file(DATA / "weights_pi0.safetensors")
    if variant == "pi05":
        # Tensors that the two have in common under the same name and with the same numbers are stored once.
        own = load_file(DATA / "weights_pi05.safetensors")
        plain_norms = {name for name in stored if ".gemma_expert." in name and "norm.weight" in name}
        only_pi0 = {name for name in stored if name.startswith(("state_proj", "action_time_mlp"))}
        stored = {name: x for name, x in stored.items() if name not in plain_norms | only_pi0} | own
    rows, ids = stored.pop("embedding_rows"), stored.pop("embedding_ids")
    stored[EMBEDDING] = torch.zeros(SIZES["vocab_size"], rows.shape[1]).index_copy(0, ids, rows)
    return stored


def embedding_ids():
    """Ids whose embedding rows (and gradients) are stored."""
    return load_file(DATA / "weights_pi0.safetensors")["embedding_ids"]


def heads(variant):
    """The two unused language-model heads: the first equals the embedding, the second is arbitrary."""
    embedding = weights(variant)[EMBEDDING]
    return {VLM_HEAD: embedding.clone(), EXPERT_HEAD: torch.full((len(embedding), SIZES["expert"]["width"]), 0.5)}


def folder(path, variant="pi0", *, layout="lerobot", edit=None):
    """Write a checkpoint.

    `layout`: `lerobot` (as `save_pretrained` writes: prefix `model.`, both tables), `base` (as on the hub: no prefix,
    the embedding only as head) or `openpi` (the same weights, openpi's config.json). `edit` changes the tensors, a
    dict of the file's names, before they are written.
    """
    path.mkdir(parents=True, exist_ok=True)
    tensors = {**weights(variant), **heads(variant)}
    if layout == "lerobot":
        tensors = {f"model.{name}": x for name, x in tensors.items()}
    else:
        del tensors[EMBEDDING]
    if edit is not None:
        edit(tensors)
    save_file(tensors, path / "model.safetensors")
    source = "config_openpi.json" if layout == "openpi" else f"config_{variant}.json"
    shutil.copyfile(DATA / source, path / "config.json")
    return path


def sizes(layout="lerobot"):
    """Options that say what the original's nominal configuration files cannot."""
    return {**SIZES, "image_size": 56} if layout == "openpi" else SIZES


def load(path, *, layout="lerobot", **options):
    """Load the model of a folder."""
    return load_model(path, config=read_config(path, **sizes(layout)), **options)


@functools.lru_cache
def model(variant):
    """The float32 model. Shared: leave its weights alone."""
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        return load(folder(Path(place), variant))


def policy_folder(path):
    """The folder of the end-to-end fixture: weights, LeRobot's processor files, tokenizer."""
    folder(path, "pi0")
    for file in (DATA / "policy").iterdir():
        target = path / file.name
        shutil.copytree(file, target) if file.is_dir() else shutil.copyfile(file, target)
    return path


def same(net, variant="pi0"):
    """Whether the model holds exactly the stored weights."""
    state = net.state_dict()
    return state.keys() == weights(variant).keys() and all(
        torch.equal(state[k], x) for k, x in weights(variant).items()
    )
