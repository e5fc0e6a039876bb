"""Online reinforcement learning for vision-language-action policies, on Hugging Face Accelerate.

The public names below come from their modules when they are first asked for, so that `import vla_accel` costs nothing.
`vla_accel.train` and `vla_accel.evaluate` are the functions; what else their modules hold is imported from these, as
in `from vla_accel.train import check_run`.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_NAMES_OF = {
    "advantages": "gae normalize",
    "batch": "make_batch",
    "checkpoint": "export_policy load_checkpoint save_checkpoint",
    "cli": "parse_args",
    "commands": "export record_demos run_evaluation",
    "config": (
        "DataConfig EnvConfig EvalConfig ExportConfig OFTPolicyConfig PPOConfig PPOOptions Pi0PolicyConfig "
        "PolicyConfig RecordConfig RolloutConfig RunConfig SFTConfig SFTOptions"
    ),
    "demos": "Demonstrations record",
    "distributed": "global_sum make_accelerator policy_of prepare_policy seed_weights",
    "envs.base": "ActionChunk EpisodeQueue check_env to_observation",
    "envs.jobs": "evaluation_jobs training_jobs",
    "envs.make": "make_env make_vector_env",
    "evaluate": "Evaluation Film evaluate film",
    "models": "load_vla peek_vla register_vla_models save_vla",
    "modes": "full_params rollout_mode train_mode",
    "policies": "load_policy peek_policy",
    "policies.base": "Policy PolicySpec ValueHead",
    "ppo": "ppo_loss rescore update",
    "rollout": "collect start",
    "sft": "finetune",
    "train": "train",
    "types": "Episode Job Observation PolicySample PolicyScore Rollout",
}
"""Module -> its public names."""

_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names.split()}

__all__ = ["__version__", *sorted(_MODULE_OF)]  # noqa: PLE0604 - names of a table


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Importing a submodule binds it to the package; a public name stays the function of that name instead."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
