"""PI0 through the Auto classes of transformers, which has a model type `pi0` of its own."""

import pytest
from pi0_golden import SIZES, folder, load, model, same

from vla_accel.models.pi0 import Pi0Config, Pi0Model, load_model, register, save_model


def test_both_models_are_known_and_registering_twice_changes_nothing():
    pytest.importorskip("transformers.models.pi0")
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    before = CONFIG_MAPPING["pi0"]
    register()
    register()
    assert type(AutoConfig.for_model("vla_pi0")) is Pi0Config
    assert CONFIG_MAPPING["pi0"] is before
    assert before.__module__.startswith("transformers.")


def test_transformers_own_folder_still_gives_transformers_model(tmp_path):
    pi0 = pytest.importorskip("transformers.models.pi0")
    from transformers import AutoConfig

    register()
    (tmp_path / "config.json").write_text('{"model_type": "pi0", "chunk_size": 7}')
    config = AutoConfig.from_pretrained(tmp_path)
    assert (type(config), config.chunk_size) == (pi0.PI0Config, 7)


def test_a_saved_folder_comes_back_through_the_auto_classes(tmp_path):
    """`pi0` in the folder's name must not lead to transformers' class either."""
    from transformers import AutoConfig, AutoModel

    register()
    path = tmp_path / "pi0_base"
    save_model(model("pi0"), path)
    config = AutoConfig.from_pretrained(path / "vla_accel.json")
    assert type(config) is Pi0Config
    net = AutoModel.from_pretrained(path, config=config)
    assert type(net) is Pi0Model
    assert same(net)
    assert type(AutoModel.from_config(config)) is Pi0Model
    read = {key: value for key, value in config.to_dict().items() if key != "_name_or_path"}
    assert read.items() <= Pi0Config.from_pretrained(path).to_dict().items()


def test_unknown_options_of_from_pretrained_are_refused(tmp_path):
    with pytest.raises(ValueError, match="Unknown options of a PI0 model: quantization_config"):
        load(folder(tmp_path), quantization_config={})
    with pytest.raises(ValueError, match="Unknown options of a PI0 model: subfolder"):
        load_model(folder(tmp_path), subfolder="policy", cache_dir=None)


def test_from_pretrained_takes_fields_and_refuses_unknown_ones(tmp_path):
    folder(tmp_path)
    config, rest = Pi0Config.from_pretrained(
        tmp_path, chunk_size=2, trust_remote_code=False, return_unused_kwargs=True, **SIZES
    )
    assert (config.chunk_size, config.n_action_steps, config.vocab_size, rest) == (2, 2, SIZES["vocab_size"], {})
    with pytest.raises(ValueError, match="Unknown option 'chunk' of a PI0 checkpoint"):
        Pi0Config.from_pretrained(tmp_path, chunk=2)
    with pytest.raises(ValueError, match="Unknown option 'subfolder' of a PI0 checkpoint"):
        Pi0Config.from_pretrained(tmp_path, subfolder="policy", **SIZES)
