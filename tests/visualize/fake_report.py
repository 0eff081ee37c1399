"""A made-up evaluation: pictures with coloured discs, and a selection that walks over the grid."""

import numpy as np
from PIL import Image, ImageDraw

from stepprune_jax.data.llava import Question, Scene
from stepprune_jax.evaluation.records import Records
from stepprune_jax.evaluation.report import Report

COLOURS = {"red": "#d62728", "green": "#2ca02c", "blue": "#1f77b4", "yellow": "#ffd21f"}
FAMILIES = ("colour", "count", "exists", "left of", "shape")
N, SIDE, PATCH, STEPS = 144, 12, 8, 72
BUDGETS = (48, 32, 16)
SKILL = {
    "random": 0.5,
    "grid": 0.55,
    "[CLS] top-K": 0.62,
    "AutoSelect-like": 0.8,
    "StepPrune literal": 0.76,
    "StepPrune": 0.9,
}


def paint(path, rng, objects):
    """Writes a picture of discs on a light ground; returns the patches that discs touch."""
    image = Image.new("RGB", (96, 96), tuple(int(c) for c in rng.integers(205, 240, 3)))
    draw, touched = ImageDraw.Draw(image), set()
    for _ in range(objects):
        x, y, r = (int(v) for v in (*rng.integers(10, 86, 2), rng.integers(6, 13)))
        draw.ellipse((x - r, y - r, x + r, y + r), fill=str(rng.choice(list(COLOURS.values()))))
        cells = range(SIDE)
        touched |= {
            row * SIDE + column
            for row in cells
            for column in cells
            if (row * PATCH + 4 - y) ** 2 + (column * PATCH + 4 - x) ** 2 < (r + 3) ** 2
        }
    image.save(path)
    return tuple(sorted(touched))


def walk(rng, relevant):
    """T_max tokens: those that matter first, then the rest."""
    rest = np.setdiff1d(np.arange(N), relevant)
    return np.concatenate([rng.permutation(relevant), rng.permutation(rest)])[:STEPS].astype(int)


def record(rng, method, mode, budget, order, count, relevant, skill, right):
    kept = np.arange(order.shape[1]) < count[:, None]
    found = np.array(
        [np.isin(r, o[k]).mean() for r, o, k in zip(relevant, order, kept, strict=False)]
    )
    correct = rng.random(len(count)) < skill * (0.35 + 0.65 * found)
    answer = [a if c else "grey" for a, c in zip(right, correct, strict=True)]
    return Records(method, mode, budget, N, count, np.where(kept, order, -1), answer, correct)


def rows(records):
    """The table of the records."""
    full = records[0].correct.mean()
    return [
        {
            "method": r.method,
            "mode": r.mode,
            "pruning_rate": r.pruning_rate,
            "accuracy": float(100 * r.correct.mean()),
            "retention": float(100 * r.correct.mean() / full),
            "mean_k": float(r.count.mean()),
            "ms": 1 + float(r.count.mean()) / 100,
            "gflops": 0.25 + float(r.count.mean()) / 500,
            "questions": len(r.count),
            "seed": 0,
        }
        for r in records
    ]


def adaptive(rng, relevant, mean):
    need = np.array([len(r) for r in relevant], float)
    count = need * mean / need.mean() + rng.normal(0, 2, len(need))
    return np.clip(count, 1, STEPS).round().astype(int)


def make(folder, questions=60, seed=0):
    """A report of `questions` questions, with its pictures in `folder`."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    asked, scenes = [], []
    for i in range(questions):
        objects = int(rng.integers(1, 9))
        family = FAMILIES[i % len(FAMILIES)]
        path = folder / f"{i // 3}.png"
        touched = scenes[-1].relevant if i % 3 else paint(path, rng, objects)
        objects = scenes[-1].complexity if i % 3 else objects
        asked.append(Question(f"q{i}", path, f"What is the {family} of the disc near it?", family))
        scenes.append(Scene(objects, touched or (0,)))
    answers = [str(rng.choice(list(COLOURS))) for _ in asked]
    relevant = [np.array(s.relevant) for s in scenes]
    every = np.tile(np.arange(N), (questions, 1))
    full = np.full(questions, N)
    records = [record(rng, "all tokens", "exact", N, every, full, relevant, 0.97, answers)]
    for method, skill in SKILL.items():
        learned = method.startswith(("Step", "Auto", "[CLS]"))
        order = np.stack([walk(rng, r if learned else np.array([0])) for r in relevant])
        for budget in BUDGETS:
            exact = np.full(questions, budget)
            args = (relevant, skill + 0.07, answers)
            records.append(record(rng, method, "exact", budget, order, exact, *args))
            if method.startswith("StepPrune"):
                count = adaptive(rng, relevant, budget)
                records.append(record(rng, method, "adaptive", budget, order, count, *args))
    count = adaptive(rng, relevant, 26)
    own = record(
        rng, "StepPrune, own stop", "adaptive", None, order, count, relevant, 0.97, answers
    )
    records.append(own)
    return Report(rows(records), records, asked, answers, scenes, [(SIDE, SIDE)] * questions)


def metrics(steps=400, every=5):
    """Lines of a training run, as dicts."""
    rng = np.random.default_rng(0)
    for step in range(every, steps + 1, every):
        t = step / steps
        yield {
            "step": step,
            "loss": 2 * np.exp(-4 * t) + 0.4 + rng.normal(0, 0.05),
            "lm_loss": 2 * np.exp(-4 * t) + 0.3,
            "k_mean": 30 + 10 * np.exp(-6 * t),
            "k_std": 4 + 6 * t,
            "k_soft": 32,
            "k_cap": 0.1 * t,
            "alpha_in": 0.5 + 0.45 * t,
            "alpha_out": 0.4 - 0.35 * t,
            "iou": 0.3 + 0.6 * t,
            "entropy": 4.5 - 3 * t,
            "grad_norm": 1.0,
            "grad_norm_stop": 0.02 + rng.random() * 0.02,
            "text_gate": t,
        }
