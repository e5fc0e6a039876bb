.PHONY: style format test test-dist smoke

style:  ## what CI checks beside the tests; needs pip install -e ".[dev]"
	ruff check .
	ruff format --check .
	codespell vla_accel scripts tests docs *.md
	mypy

format:  ## put right what can be put right automatically
	ruff check --fix .
	ruff format .

test:  ## the default tests: no network, no GPU, minutes on two cores
	pytest

test-dist:  ## the tests that start several processes, and the long ones
	pytest -m "slow or dist"

smoke:  ## two iterations of the default command
	accelerate launch scripts/ppo_vla.py --model openvla --run.iterations 2 --run.eval-episodes 8
