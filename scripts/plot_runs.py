"""Draw one metric of several runs into one picture, a panel per model and a line per run.

python scripts/plot_runs.py --runs runs/openvla-seed0 runs/openvla-seed1 --out docs/learning.png
"""

import dataclasses
import json
from pathlib import Path

import tyro


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Draw one metric of several runs."""

    runs: tuple[str, ...]
    """Output folders of runs."""
    out: str
    """The picture, a PNG."""
    metric: str = "rollout/success"
    """Name of a metric in metrics.jsonl."""


def main(options: Options) -> None:
    """Read the runs and write the picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    configs = {run: json.loads((Path(run) / "config.json").read_text(encoding="utf-8")) for run in options.runs}
    models = sorted({config["model"] for config in configs.values()})
    figure = Figure(figsize=(4.6 * len(models), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = dict(zip(models, figure.subplots(1, len(models), squeeze=False, sharey=True)[0], strict=True))
    for run, config in configs.items():
        rows = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        points = [(row["iteration"], row[options.metric]) for row in rows if options.metric in row]
        label = f"seed {config['run']['seed']}, rate {config['ppo']['learning_rate']:g}"
        panels[config["model"]].plot(*zip(*points, strict=True), label=label, linewidth=1.5)
    for model, axes in panels.items():
        axes.set(title=model, xlabel="iteration", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    next(iter(panels.values())).set_ylabel(options.metric)
    figure.savefig(options.out, dpi=110)


if __name__ == "__main__":
    main(tyro.cli(Options))
