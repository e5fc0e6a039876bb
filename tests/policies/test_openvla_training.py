"""What of OpenVLA's policies is trained, and the folders they come from and go to."""

import pytest
import torch
from helpers.decisions import acts, batch_of, observation
from torch import nn

from vla_accel.checkpoint import export_policy, full_state_dict
from vla_accel.config import OFTPolicyConfig, PolicyConfig
from vla_accel.policies import load_policy, peek_policy
from vla_accel.policies.base import ValueHead

MODELS = ("openvla", "openvla-oft")


# --------------------------------------------------------------------------------------------------------------------
# What trains
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_nothing_drops_out(make_policy, model):
    """In training mode the policy computes exactly what it computes in evaluation mode."""
    policy = make_policy(model)
    batch = batch_of(policy)
    with torch.no_grad():
        quiet = policy.eval()(batch.inputs, batch.trace)
        loud = policy.train()(batch.inputs, batch.trace)
    assert torch.equal(quiet.log_prob, loud.log_prob)
    assert torch.equal(quiet.value, loud.value)
    assert not [m for m in policy.modules() if isinstance(m, nn.Dropout) and m.p > 0]


@pytest.mark.parametrize("model", MODELS)
def test_gradient_checkpointing_changes_no_gradient(make_policy, model):
    gradients = []
    for checkpointing in (False, True):
        policy = make_policy(model, gradient_checkpointing=checkpointing)
        batch = batch_of(policy)
        policy(batch.inputs, batch.trace).log_prob.sum().backward()
        gradients.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("detach", [True, False])
def test_the_value_loss_reaches_the_trunk_only_if_it_is_not_cut_off(make_policy, detach):
    policy = make_policy("openvla-oft", value_detach=detach)
    batch = batch_of(policy)
    policy(batch.inputs, batch.trace).value.sum().backward()
    reached = {name.split(".")[0] for name, p in policy.named_parameters() if p.grad is not None}
    assert reached == ({"value_head"} if detach else {"value_head", "model"})


@pytest.mark.parametrize("detach", [True, False])
def test_the_value_head_cuts_off_its_feature(detach):
    feature = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    head = ValueHead(8, hidden_dim=4, detach=detach)
    nn.init.ones_(head.out.weight)
    head(feature).sum().backward()
    assert (feature.grad is None) == detach


def test_a_new_value_head_says_0():
    value = ValueHead(8, hidden_dim=4)(torch.randn(3, 8))
    assert value.tolist() == [0.0, 0.0, 0.0]
    assert value.dtype == torch.float32


def test_freezing_vision_freezes_all_of_it_and_nothing_else(make_policy):
    policy = make_policy("openvla", freeze_vision=True)
    frozen = {name for name, p in policy.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in policy.named_parameters() if name.startswith("model.vision_backbone.")}


# --------------------------------------------------------------------------------------------------------------------
# Folders
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_an_exported_policy_acts_and_values_bit_by_bit_as_before(make_policy, accelerator, tmp_path, model):
    policy = make_policy(model)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    obs = observation(4)
    before = acts(policy, obs, greedy=True)
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "stale.txt").write_text("left from an earlier export")
    export_policy(accelerator, policy, policy, tmp_path / "policy")
    kind = OFTPolicyConfig if model == "openvla-oft" else PolicyConfig
    config = kind(path=str(tmp_path / "policy"))
    loaded = load_policy(model, config, suite="tabletop")
    after = acts(loaded, obs, greedy=True)
    for name in ("action", "log_prob", "value"):
        assert torch.equal(getattr(after, name), getattr(before, name)), name
    state = full_state_dict(loaded)
    assert state.keys() == policy.state_dict().keys()
    assert all(torch.equal(state[name], x) for name, x in policy.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    assert not (tmp_path / "policy" / "stale.txt").exists()


@pytest.mark.parametrize("model", MODELS)
def test_a_checkpoint_says_what_it_is_before_it_is_loaded(make_policy, tiny_openvla, tiny_openvla_oft, model):
    path = str(tiny_openvla_oft if model == "openvla-oft" else tiny_openvla)
    kind = OFTPolicyConfig if model == "openvla-oft" else PolicyConfig
    spec = peek_policy(model, kind(path=path), suite="tabletop")
    policy = make_policy(model)
    assert (spec.path, spec.embedded) == (path, False)
    assert (spec.chunk_size, spec.action_dim, spec.shard_units) == (policy.chunk_size, 7, policy.shard_units)


@pytest.mark.parametrize("read", [peek_policy, load_policy])
def test_a_checkpoint_that_decodes_in_parallel_is_refused_as_plain_openvla(tiny_openvla_oft, read):
    with pytest.raises(ValueError, match=r"--model must be openvla-oft, .* in parallel, but is 'openvla'"):
        read("openvla", PolicyConfig(path=str(tiny_openvla_oft)))


def test_openvla_oft_takes_a_folder_that_does_not_say_how_it_decodes(tiny_openvla):
    # As the original project's folders: a chunk of 8 is what those were trained with.
    assert peek_policy("openvla-oft", OFTPolicyConfig(path=str(tiny_openvla))).chunk_size == 8


@pytest.mark.parametrize("read", [peek_policy, load_policy])
def test_a_value_head_of_another_width_is_refused(make_policy, accelerator, tmp_path, read):
    policy = make_policy("openvla")
    export_policy(accelerator, policy, policy, tmp_path / "policy")
    with pytest.raises(ValueError, match=r"--policy\.value_hidden must be 16, .* but is 256"):
        read("openvla", PolicyConfig(path=str(tmp_path / "policy"), value_hidden=256))


@pytest.mark.parametrize("model", MODELS)
def test_units_act_on_the_steps_of_the_chunk_in_order(make_policy, model):
    policy = make_policy(model)
    assert policy.unit_step.tolist() == [step for step in range(policy.chunk_size) for _ in range(7)]


def test_every_shard_unit_is_a_layer_of_the_policy(make_policy):
    policy = make_policy("openvla")
    classes = {type(module).__name__ for module in policy.modules()}
    assert set(policy.shard_units) <= classes


def test_the_stop_token_of_oft_can_be_chosen(make_policy):
    policies = [make_policy("openvla-oft", append_stop_token=stop) for stop in (None, True, False)]
    batch = batch_of(policies[0])
    with torch.no_grad():
        usual, on, off = (policy(batch.inputs, batch.trace).log_prob for policy in policies)
    assert torch.equal(usual, on)
    assert not torch.allclose(on, off, atol=1e-4)
