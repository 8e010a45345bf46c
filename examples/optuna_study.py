"""Run an Optuna study: each trial is a run, and several runs train at the same time.

If the study is killed and started again, it continues with the trials that have not finished.

    python optuna_study.py --trials 20 --at-once 4
"""

from __future__ import annotations

import argparse
import time

import optuna
from optuna.trial import TrialState

import trainkit

STUDY = "examples-lr"


def objective(lr: float, width: int) -> float:
    """Return the loss of a small model after a few steps; each call is a run and may use the run's GPUs."""
    import torch

    torch.manual_seed(0)
    inputs = torch.randn(256, 8)
    targets = inputs.sin().sum(1, keepdim=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(100):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def start(study: optuna.Study) -> tuple[int, trainkit.Run]:
    trial = study.ask()
    lr, width = trial.suggest_float("lr", 1e-4, 1e-1, log=True), trial.suggest_int("width", 4, 64)
    run = trainkit.submit(objective, lr, width, name=f"trial-{trial.number}")
    trial.set_user_attr("run", str(run.path))
    return trial.number, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=4)
    args = parser.parse_args()
    study = optuna.create_study(storage="sqlite:///study.db", study_name=STUDY, load_if_exists=True)
    live: dict[int, trainkit.Run] = {}
    for trial in study.get_trials(states=[TrialState.RUNNING]):
        if "run" not in trial.user_attrs:  # the study was killed before it stored the run
            study.tell(trial.number, state=TrialState.FAIL)
            continue
        live[trial.number] = trainkit.Run(trial.user_attrs["run"])
        if live[trial.number].status.state in ("died", "stopped", "cancelled"):
            live[trial.number].resume()  # the machine was rebooted, or a user cancelled the run
    while True:
        done = len(study.get_trials(states=[TrialState.COMPLETE]))
        while len(live) < args.at_once and done + len(live) < args.trials:
            number, run = start(study)
            live[number] = run
        if not live:
            break
        for number in [number for number, run in live.items() if run.done()]:
            run = live.pop(number)
            error = run.exception()
            if error is None:
                study.tell(number, run.result())
            else:
                study.tell(number, state=TrialState.FAIL)
                raise error
        time.sleep(0.5)
    print(f"best of {args.trials}: {study.best_value:.4f} with {study.best_params}")


if __name__ == "__main__":
    main()
