"""A tiny model with a folder of questions, made in a second."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from benchmark_files import write_lines
from PIL import Image

from stepprune_jax import PolicyConfig, configurations, testing
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.checkpoints.policy import save_policy
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
    """Questions about random pictures, three each; the answers are still to be written."""
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
    known = [
        {"question_id": i, "complexity": n % 4, "relevant": list(range(n % 3))}
        for n, i in enumerate(ids)
    ]
    write_lines(folder / f"{name}_scenes.jsonl", known)
    return questions


def drawn(specs, seed):
    """Large random weights without a compilation; policies are sharp, so counts differ."""
    random = np.random.default_rng(seed)

    def draw(spec):
        mean = float(spec.init == "ones")
        return jnp.asarray(mean + 0.5 * random.standard_normal(spec.shape, np.float32))

    return jax.tree.map(draw, specs, is_leaf=lambda leaf: isinstance(leaf, ParamSpec))


def stepprune(seed=1, **fields):
    config = PolicyConfig(**(WIDTHS | {"decoder_layers": 1} | fields))
    return StepPrune(params=drawn(param_specs(config), seed), config=config, stats=STATS)


def one_shot(seed=2):
    config = AutoSelectConfig(**WIDTHS)
    return AutoSelect(
        params=drawn(AutoSelect(config=config).specs(), seed), config=config, stats=STATS
    )


def glimpse(**fields):
    """A configuration of GlimpsePrune for a tiny LLaVA."""
    widths = {"feature_width": 32, "text_width": 48, "num_attention_heads": 4, "vision_width": 32}
    layers = {"le_layers": (0, 1), "selected_layers": (0, 1), "reduce_layer": 1}
    sizes = {"selected_visual_layers": (2, 1), "attn_fuse_size": 16, "visual_cond_size": 16}
    return GlimpsePruneConfig(**(widths | layers | sizes | fields))


def tiny_model(folder, **sizes):
    return load_vlm(testing.tiny_llava(folder, **sizes), dtype=jnp.float32, progress=False)


def broken_at(model, token):
    """The model with an embedding of one token, "▁dog" or its id, that is not a number."""
    if isinstance(token, str):
        token = model.tokenizer.convert_tokens_to_ids(token)
    language = model.params["language"]
    embedding = language["embed"]["embedding"].at[token].set(jnp.nan)
    language = language | {"embed": {"embedding": embedding}}
    return model._replace(params=model.params | {"language": language})


def small_run(model: Path, data: Path, /, **fields) -> EvaluationRun:
    """The settings of an evaluation of the default configuration on a tiny model and split."""
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
    """The run with other settings of its evaluation."""
    return dataclasses.replace(run, eval=dataclasses.replace(run.eval, **fields))


def save_all(workdir: Path) -> dict[str, str]:
    """The run's own policy, and two more rows."""
    save_policy(stepprune(), workdir / "policy.safetensors")
    rows = {"AutoSelect-like": one_shot(), "StepPrune literal": stepprune(5, min_tokens=0)}
    return {
        name: str(save_policy(policy, workdir / "rows" / f"{number}.safetensors"))
        for number, (name, policy) in enumerate(rows.items())
    }


def one_width(patch) -> None:
    """One width for all prompts, which the tiny tokenizer makes long, to compile less."""
    for module in (encode, generate_stage):
        patch.setattr(module, "WIDTHS", (192,))
