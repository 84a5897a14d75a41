"""How many steps Muon needs to reach AdamW's final loss on the debug job, each at its best of the same learning rates.

python -m benchmarks.muon_vs_adamw --jobs 6 --output benchmarks/results/muon_vs_adamw.json   # the sweep
python -m benchmarks.muon_vs_adamw --plot docs/muon_vs_adamw.png --output ...                # a picture of it
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parents[1]
OPTIMIZERS = ("Muon", "AdamW")
LEARNING_RATES = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
SEEDS = (0, 1, 2)
WINDOW = 10
"""Steps whose losses are averaged before they are compared: a single batch's loss is mostly noise."""


def run_job(optimizer: str, lr: float, seed: int, num_steps: int, folder: Path) -> list[float]:
    """Losses of each step of one job on one process."""
    dump = folder / f"{optimizer}-{lr}-{seed}"
    flags = {
        "optimizer.name": optimizer,
        "optimizer.lr": lr,
        "debug.seed": seed,
        "training.steps": num_steps,
        "training.local_batch_size": 8,  # what the job's two processes have together
        "training.sample_tokens": 0,
        "metrics.log_freq": 1,
        "metrics.enable_tensorboard": "false",
        "checkpoint.enable": "false",
        "job.dump_folder": dump,
    }
    command = [str(ROOT / "run_train.sh"), "--config", "debug_model.toml"]
    command += [part for key, value in flags.items() for part in (f"--{key}", str(value))]
    environment = os.environ | {"NPROC_PER_NODE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    # A rate so high that the loss overflows is a result, too: the run ends with status 5.
    if result.returncode not in (0, 5):
        raise RuntimeError(f"{' '.join(command)} ended with {result.returncode}:\n{result.stderr}")
    lines = [json.loads(line) for line in (dump / "metrics.jsonl").read_text().splitlines()]
    return [line["loss_metrics/global_avg_loss"] for line in lines if "loss_metrics/global_avg_loss" in line]


def smoothed(losses: list[float]) -> list[float]:
    """Mean of the last WINDOW losses at each step from the WINDOW-th on."""
    return [mean(losses[i - WINDOW : i]) for i in range(WINDOW, len(losses) + 1)]


def summarize(runs: list[dict[str, Any]], num_steps: int) -> dict[str, Any]:
    """Best rate of each optimizer by mean final loss over the seeds, and the step at which Muon is where AdamW ends."""
    final: dict[str, dict[float, float]] = {name: {} for name in OPTIMIZERS}
    for name, lr in itertools.product(OPTIMIZERS, LEARNING_RATES):
        of_seeds = [run["losses"] for run in runs if (run["optimizer"], run["lr"]) == (name, lr)]
        finished = all(len(losses) == num_steps for losses in of_seeds)
        final[name][lr] = mean(smoothed(losses)[-1] for losses in of_seeds) if finished else float("inf")
    best = {name: min(final[name], key=final[name].__getitem__) for name in OPTIMIZERS}
    reached = {}
    for seed in SEEDS:
        curves = {
            run["optimizer"]: smoothed(run["losses"])
            for run in runs
            if run["seed"] == seed and run["lr"] == best[run["optimizer"]]
        }
        target = curves["AdamW"][-1]
        steps = [index + WINDOW for index, loss in enumerate(curves["Muon"]) if loss <= target]
        reached[seed] = min(steps) if steps else None
    return {"final_loss": final, "best_lr": best, "step_at_adamw_final_loss": reached}


def sweep(num_jobs: int, num_steps: int) -> dict[str, Any]:
    from benchmarks.record import record

    cases = list(itertools.product(OPTIMIZERS, LEARNING_RATES, SEEDS))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(num_jobs) as pool:
        losses = list(pool.map(lambda case: run_job(case[0], case[1], case[2], num_steps, Path(folder)), cases))
    runs = [
        {"optimizer": name, "lr": lr, "seed": seed, "losses": found}
        for (name, lr, seed), found in zip(cases, losses, strict=True)
    ]
    return record("muon_vs_adamw", num_steps=num_steps, **summarize(runs, num_steps), runs=runs)


def plot(result: dict[str, Any], path: Path) -> None:
    """Loss over steps at the best rates, one line a seed; and final loss over learning rates."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    colours = {"Muon": "tab:blue", "AdamW": "tab:orange"}
    figure, (over_steps, over_rates) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name in OPTIMIZERS:
        best = result["best_lr"][name]
        curves = [smoothed(r["losses"]) for r in result["runs"] if (r["optimizer"], r["lr"]) == (name, best)]
        for index, curve in enumerate(curves):
            label = f"{name}, lr {best:g}" if index == 0 else None
            over_steps.plot(range(WINDOW, WINDOW + len(curve)), curve, color=colours[name], alpha=0.7, label=label)
        final = {float(lr): loss for lr, loss in result["final_loss"][name].items()}
        over_rates.plot(list(final), list(final.values()), "o-", color=colours[name], label=name)
    over_steps.set(xlabel="step", ylabel=f"training loss, mean of {WINDOW} steps", title="at the best rate, 3 seeds")
    over_rates.set(xlabel="learning rate", ylabel="final loss, mean of 3 seeds", xscale="log", title="final loss")
    over_rates.set_xticks(LEARNING_RATES, [f"{lr:g}" for lr in LEARNING_RATES])
    over_rates.minorticks_off()
    for axes in (over_steps, over_rates):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"debug model, {result['num_steps']} steps, commit {result['commit'][:10]}")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file of the sweep: written, or read by --plot")
    parser.add_argument("--plot", type=Path, help="draw the sweep of --output into this file instead of running it")
    parser.add_argument("--jobs", type=int, default=1, help="jobs at a time")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    if arguments.plot:
        plot(json.loads(arguments.output.read_text()), arguments.plot)
        return
    result = sweep(arguments.jobs, arguments.steps)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "runs"}))


if __name__ == "__main__":
    main()
