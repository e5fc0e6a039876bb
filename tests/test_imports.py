"""Who may import whom, and what `import vla_accel` costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import vla_accel

PACKAGE = Path(vla_accel.__file__).parent

# From the ground up: a module imports from lower levels and, where the line says so, from its own.
# A name stands for the module and, where it is a package, for everything in it that is not named elsewhere.
LEVELS = [
    ("rules types", "apart"),
    ("options", "apart"),
    ("config", "apart"),
    ("roll_call gathering restoring sharding optim distributed modes advantages", "together"),
    ("models", "together"),
    ("policies.base envs.base envs.checks envs.jobs", "together"),
    ("policies.token policies.flow envs", "together"),
    ("policies", "together"),
    ("rollout batch ppo evaluate", "together"),
    ("track checkpoint demos", "together"),
    ("train", "apart"),
    ("sft commands", "apart"),
    ("cli", "apart"),
]

# What no level can say.
FORBIDDEN = [
    ("models", "policies", "models know nothing of reinforcement learning"),
    ("models", "envs", "models know nothing of simulators"),
    ("policies", "envs", "a policy does not know where it acts"),
    ("envs", "models", "a simulator does not know who acts in it"),
    ("envs", "policies", "a simulator does not know who acts in it"),
    *((m, "policies.openvla", "the loop takes any policy") for m in ("train", "rollout", "ppo", "evaluate", "sft")),
    *((m, "policies.pi0", "the loop takes any policy") for m in ("train", "rollout", "ppo", "evaluate", "sft")),
    *((m, "envs.tabletop", "the loop takes any simulator") for m in ("train", "rollout", "ppo", "evaluate", "sft")),
]


def modules():
    """Name without the package -> file, e.g. `policies.base`."""
    files = sorted(PACKAGE.rglob("*.py"))
    names = [".".join(file.relative_to(PACKAGE).with_suffix("").parts) for file in files]
    return {name.removesuffix(".__init__"): file for name, file in zip(names, files, strict=True)}


MODULES = modules()


def is_in(module, name):
    return module == name or module.startswith(f"{name}.")


def level_of(module):
    """Index of the line with the longest name that holds the module."""
    fitting = [(len(name), n) for n, (names, _) in enumerate(LEVELS) for name in names.split() if is_in(module, name)]
    assert fitting, f"vla_accel/{module.replace('.', '/')}.py has no level: add it to LEVELS"
    return max(fitting)[1]


def imports_of(module):
    """Modules of the package that a module imports, anywhere in it but for type annotations alone."""
    return sorted(_imports(ast.parse(MODULES[module].read_text())))


def _imports(tree):
    found = set()
    for node in _without_typing(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name.removeprefix("vla_accel.") in MODULES else node.module for name in full}
    return {name.removeprefix("vla_accel.") for name in found if name.startswith("vla_accel.")}


def _without_typing(tree):
    """All nodes outside `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        yield node
        yield from _without_typing(node)


def violation(module, imported):
    """Why a module must not import another, or None."""
    for user, used, reason in FORBIDDEN:
        if is_in(module, user) and is_in(imported, used):
            return f"{module} imports {imported}: {reason}"
    upper, lower = level_of(module), level_of(imported)
    if lower > upper:
        return f"{module} (level {upper}) imports {imported} (level {lower}), which stands above it"
    if lower == upper and LEVELS[upper][1] == "apart":
        return f"{module} imports {imported}, and the modules of level {upper} do not know each other"
    return None


@pytest.mark.parametrize("module", [name for name in MODULES if name != "__init__"])
def test_a_module_imports_only_from_below(module):
    assert [text for imported in imports_of(module) if (text := violation(module, imported))] == []


def test_the_levels_find_an_import_from_above():
    assert violation("ppo", "train") == "ppo (level 8) imports train (level 10), which stands above it"
    assert violation("models.openvla.modeling", "policies.base").endswith(
        "models know nothing of reinforcement learning"
    )
    assert violation("rules", "types").endswith("do not know each other")
    assert violation("train", "ppo") is None
    tree = ast.parse("def f():\n    from vla_accel.train import train\n    import vla_accel.sft\n    import torch")
    assert _imports(tree) == {"train", "sft"}


def test_every_name_in_the_levels_exists():
    names = {name for line, _ in LEVELS for name in line.split()}
    assert names <= set(MODULES)


# --------------------------------------------------------------------------------------------------------------------
# The package itself
# --------------------------------------------------------------------------------------------------------------------


def in_a_new_process(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_the_package_loads_nothing_heavy():
    loaded = in_a_new_process("import sys, vla_accel; print(*sys.modules)")
    heavy = {"torch", "transformers", "accelerate", "timm", "gymnasium", "datasets", "numpy", "PIL", "tyro"}
    assert heavy & set(loaded) == set()


def test_reading_a_command_line_loads_no_torch():
    code = "import sys; from vla_accel.cli import parse_args; from vla_accel.config import PPOConfig\n"
    loaded = in_a_new_process(code + "parse_args(PPOConfig, ['--run.seed', '1']); print(*sys.modules)")
    assert {"torch", "transformers", "accelerate", "gymnasium", "numpy"} & set(loaded) == set()


@pytest.mark.parametrize("name", sorted(set(vla_accel.__all__) - {"__version__"}))
def test_a_public_name_comes_from_the_module_that_defines_it(name):
    value = getattr(vla_accel, name)
    assert value.__name__ == name
    assert value.__module__.startswith("vla_accel.")
    assert name in dir(vla_accel)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'vla_accel' has no attribute 'trane'"):
        _ = vla_accel.trane


def test_train_and_evaluate_are_functions_also_after_their_modules_were_imported():
    code = "import vla_accel.train, vla_accel.evaluate\nfrom vla_accel import train, evaluate\nprint(train.__module__, "
    assert in_a_new_process(code + "evaluate.__module__)") == ["vla_accel.train", "vla_accel.evaluate"]
