"""The training loop of all minis: schedule, reports, checkpoints on the way."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from minis.data import DOMAINS, Batch, Rows
from minis.optim import Optimiser

WARMUP, FLAT, FLOOR = 80, 0.45, 0.02
MARKS = (0.12, 0.4, 0.7)  # of a run: held-out losses, and at the first the check of the fast path
UNEQUAL = 0.05  # nats between the compiled and the plain forward pass


class Trainable(Protocol):
    """What the loop drives. `reports`: names of the values that a step returns."""

    p: dict[str, Tensor]
    opt: Optimiser
    gpu: bool
    reports: tuple[str, ...]

    def batch(self, rows: Rows, size: int) -> Batch: ...

    def progress(self, done: float) -> None:
        """Sets whatever changes during a run; `done` from 0 to 1."""

    def step(self, b: Batch) -> Tensor: ...

    def capture(self, b: Batch) -> None: ...

    def run(self, b: Batch) -> Tensor:
        """A step, as a graph where one was captured."""

    def held_out(self, rows: Rows, size: int) -> dict[str, float]: ...

    def self_check(self, rows: Rows, size: int) -> tuple[float, float]: ...


def arguments(description: str | None) -> argparse.ArgumentParser:
    args = argparse.ArgumentParser(description=description)
    args.add_argument("--data", type=Path, required=True)
    args.add_argument("--out", type=Path, required=True)
    args.add_argument("--seconds", type=float, default=520, help="time for steps, without compilation")
    args.add_argument("--until", type=float, help="seconds after the start, compilation included, when steps end")
    args.add_argument("--steps", type=int, default=10**9)
    args.add_argument("--done", type=float, default=0.0, help="part of the schedule that lies behind an earlier run")
    args.add_argument("--batch", type=int, default=32)
    args.add_argument("--row", type=int, default=1024)
    args.add_argument("--seed", type=int, default=7)
    args.add_argument("--no-graph", action="store_true")
    return args


def rate_at(progress: float, step: int) -> float:
    warm = min(1.0, (step + 1) / WARMUP)
    if progress < FLAT:
        return warm
    return warm * max(FLOOR, 1 - (1 - FLOOR) * (progress - FLAT) / (1 - FLAT))


def save(p: dict[str, Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({n: w.detach().cpu().contiguous() for n, w in p.items()}, path)


def train(trainer: Trainable, rows: Rows, test: Rows, a: argparse.Namespace, began: float) -> None:
    """Compiles, captures and trains for `a.seconds` or until `a.until`; leaves masters.safetensors and training.json in
    `a.out`."""
    trainer.opt.set_rate(1e-3)
    trainer.step(trainer.batch(rows, a.batch))
    print(f"compiled {time.monotonic() - began:.0f} s", flush=True)
    if trainer.gpu and not a.no_graph:
        try:
            trainer.capture(trainer.batch(rows, a.batch))
            print(f"captured {time.monotonic() - began:.0f} s", flush=True)
        except RuntimeError as error:  # slower, but training must not fail for the want of a graph
            print(f"no graph: {error}", flush=True)
            torch.cuda.synchronize()
    history: list[dict[str, object]] = []
    start, step, marks = time.monotonic(), 0, [*(mark for mark in MARKS if mark > a.done), 2.0]
    first = marks[0]
    seconds = a.seconds if a.until is None else max(1.0, began + a.until - start)
    while step < a.steps:
        share = max((time.monotonic() - start) / seconds, step / a.steps)
        if share >= 1:
            break
        progress = a.done + (1 - a.done) * share
        trainer.opt.set_rate(rate_at(progress, step))
        trainer.progress(progress)
        report = trainer.run(trainer.batch(rows, a.batch))
        step += 1
        if step % 50 == 0 or step == a.steps:
            history.append(_line(trainer, report, step, time.monotonic() - start, a))
            if step % 200 == 0 or step <= 100 or step == a.steps:
                print(json.dumps(history[-1]), flush=True)
        if progress >= marks[0]:
            if marks.pop(0) == first and trainer.gpu:
                _check(trainer, test, a.batch)
            print("held-out", step, trainer.held_out(test, a.batch), flush=True)
            if len(marks) == 1:
                save(trainer.p, a.out / "part.safetensors")
    trainer.progress(1.0)
    save(trainer.p, a.out / "masters.safetensors")
    final = trainer.held_out(test, a.batch)
    print("held-out at the end", final, flush=True)
    summary = {"steps": step, "tokens": step * a.batch * a.row, "seconds": round(time.monotonic() - start, 1)}
    epochs = {d: round(rows.used[d] / len(rows.order[d]), 2) for d in DOMAINS}
    summary |= {"epochs": epochs, "held_out": final, "history": history[:: max(1, len(history) // 60)]}
    (a.out / "training.json").write_text(json.dumps(summary) + "\n", "utf-8")
    print("done", {k: v for k, v in summary.items() if k != "history"}, f"{time.monotonic() - began:.0f} s", flush=True)


def _line(trainer: Trainable, report: Tensor, step: int, seconds: float, a: argparse.Namespace) -> dict[str, object]:
    values = [round(v, 4) for v in report.tolist()]
    if not np.isfinite(values).all():
        raise SystemExit("training diverged")
    line: dict[str, object] = {"step": step, "s": round(seconds, 1), "tokens": step * a.batch * a.row}
    return line | dict(zip(trainer.reports, values, strict=True))


def _check(trainer: Trainable, test: Rows, size: int) -> None:
    fast, plain = trainer.self_check(test, size)
    print(f"self check: {fast:.4f} compiled, {plain:.4f} plain", flush=True)
    if abs(fast - plain) > UNEQUAL:
        raise SystemExit("the fast path computes something else than the plain one")
