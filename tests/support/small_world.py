"""Builds a tiny model, policies and a folder of questions within a second."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from benchmark_files import write_lines
from PIL import Image

from stepprune_jax import PolicyConfig, configurations, testing
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.evaluation import generate_stage
from stepprune_jax.evaluation.settings import EvalSettings, EvaluationRun
from stepprune_jax.inference import encode
from stepprune_jax.policy import FeatureStats
from stepprune_jax.policy.params import ParamSpec, param_specs
from stepprune_jax.selectors import AutoSelect, AutoSelectConfig, GlimpsePruneConfig, StepPrune

ROOT = Path(__file__).parents[2]

TEXTS = ("What is this?", "red", "two yes no dog", "is the picture red or no")
WIDTHS = {
    "feature_width": 32,
    "text_width": 48,
    "width": 16,
    "num_heads": 2,
    "mlp_ratio": 2,
    "encoder_layers": 1,
}
STATS = FeatureStats(0.1 * jnp.ones(32), 2 * jnp.ones(32), jnp.float32(9))


def write_split(folder, name, pictures, seed):
    """Writes a split with three questions about each of `pictures` random images.

    Every answer is "dog"; tests replace the answers as needed.
    """
    random = np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    questions = []
    for picture in range(pictures):
        file = f"{name}{picture}.png"
        pixels = random.integers(0, 256, (24, 24, 3), np.uint8)
        Image.fromarray(pixels).save(folder / "images" / file)
        for text in random.choice(TEXTS, 3, replace=False).tolist():
            kind = "long" if len(text) > 10 else "short"
            number = f"{name}-{len(questions)}"
            questions.append({"question_id": number, "image": file, "text": text, "category": kind})
    write_lines(folder / f"{name}.jsonl", questions)
    ids = [question["question_id"] for question in questions]
    write_lines(
        folder / f"{name}_answers.jsonl", [{"question_id": i, "answer": "dog"} for i in ids]
    )
    scenes = [
        {"question_id": i, "complexity": n % 4, "relevant": list(range(n % 3))}
        for n, i in enumerate(ids)
    ]
    write_lines(folder / f"{name}_scenes.jsonl", scenes)
    return questions


def random_params(specs, seed):
    """Returns large random weights, without compiling an initializer.

    With such weights a policy's distributions are sharp, so its counts differ between images.
    """
    random = np.random.default_rng(seed)

    def make_leaf(spec):
        mean = float(spec.init == "ones")
        return jnp.asarray(mean + 0.5 * random.standard_normal(spec.shape, np.float32))

    return jax.tree.map(make_leaf, specs, is_leaf=lambda leaf: isinstance(leaf, ParamSpec))


def stepprune(seed=1, **fields):
    """Returns a tiny StepPrune with random weights."""
    config = PolicyConfig(**(WIDTHS | {"decoder_layers": 1} | fields))
    return StepPrune(params=random_params(param_specs(config), seed), config=config, stats=STATS)


def one_shot(seed=2):
    """Returns a tiny AutoSelect with random weights, a policy without a learned stop."""
    config = AutoSelectConfig(**WIDTHS)
    params = random_params(AutoSelect(config=config).specs(), seed)
    return AutoSelect(params=params, config=config, stats=STATS)


def glimpse(**fields):
    """Returns a configuration of GlimpsePrune for a tiny LLaVA."""
    widths = {"feature_width": 32, "text_width": 48, "num_attention_heads": 4, "vision_width": 32}
    layers = {"le_layers": (0, 1), "selected_layers": (0, 1), "reduce_layer": 1}
    sizes = {"selected_visual_layers": (2, 1), "attn_fuse_size": 16, "visual_cond_size": 16}
    return GlimpsePruneConfig(**(widths | layers | sizes | fields))


def tiny_model(folder, **sizes):
    """Writes a tiny LLaVA to a folder and loads it."""
    return load_vlm(testing.tiny_llava(folder, **sizes), dtype=jnp.float32, progress=False)


def broken_at(model, token):
    """Returns the model with NaN in the embedding of a token, which is given as text or id."""
    if isinstance(token, str):
        token = model.tokenizer.convert_tokens_to_ids(token)
    language = model.params["language"]
    embedding = language["embed"]["embedding"].at[token].set(jnp.nan)
    language = language | {"embed": {"embedding": embedding}}
    return model._replace(params=model.params | {"language": language})


def small_run(model: Path, data: Path, /, **fields) -> EvaluationRun:
    """Returns an evaluation run of the default configuration on a tiny model and a data folder."""
    return configurations.load(str(ROOT / "configs" / "shapes.py")).replace(
        {
            "seed": 3,
            "mesh": "single",
            "model.folder": str(model),
            "data.folder": str(data),
            "eval": EvalSettings(budgets=(4, 2), batch_size=4),
        }
        | {f"eval.{name}": value for name, value in fields.items()}
    )


def changed(run: EvaluationRun, **fields) -> EvaluationRun:
    """Returns the run with some fields of its evaluation settings replaced."""
    return dataclasses.replace(run, eval=dataclasses.replace(run.eval, **fields))


def one_width(patch) -> None:
    """Pads all prompts to one width, which reduces compilation."""
    for module in (encode, generate_stage):
        patch.setattr(module, "WIDTHS", (192,))
