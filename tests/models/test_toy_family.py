"""A family with only the required methods can be loaded, pruned, queried, saved and trained.

Its tower multiplies the pixels of each patch by one matrix. The family is registered only in
`FAMILIES`.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from small_world import stepprune
from tiny_run import make_run, metrics, write_data

from stepprune_jax import testing
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.checkpoints.save import save_vlm
from stepprune_jax.inference import RunOptions, generate
from stepprune_jax.models import decoder, families
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.config import LLAMA, LlamaConfig, ModelConfig, write_fields
from stepprune_jax.models.images import read_processor
from stepprune_jax.models.weights import WeightRule, language_rules
from stepprune_jax.pruning import Budget, FastV
from stepprune_jax.registry import build_pruner
from stepprune_jax.training import train


class Tower(NamedTuple):
    hidden_size: int = 32
    num_layers: int = 1
    side: int = 24
    patch: int = 8


@dataclasses.dataclass(frozen=True)
class ToyConfig(ModelConfig):
    vision: Tower

    def to_hf(self, dtype):
        text = write_fields(self.text, LLAMA) | {"model_type": "llama"}
        fields = {"image_token_id": self.image_token_id, "eos_token_id": [*self.eos_token_ids]}
        return fields | {"model_type": "toy", "vision": self.vision._asdict(), "text_config": text}

    @property
    def feature_width(self):
        return self.vision.hidden_size

    @property
    def max_image_tokens(self):
        return (self.vision.side // self.vision.patch) ** 2


@dataclasses.dataclass(frozen=True)
class Toy(Backbone):
    config: ToyConfig
    name = "toy"
    SUPPORTED = "a toy (model_type 'toy')"
    CONTEXT_LIMIT = 512
    SHARDING_RULES = ((r".*", P()),)
    VISION_PREFIX = "tower."

    @classmethod
    def matches(cls, raw):
        return raw.get("model_type") == "toy"

    @classmethod
    def read(cls, raw, vision):
        text = LlamaConfig.from_hf(raw["text_config"])
        ids = raw["image_token_id"], None, tuple(raw["eos_token_id"])
        return cls(ToyConfig(Tower(**raw["vision"]), text, *ids))

    @classmethod
    def canonical_name(cls, name, of_vision_folder=False):
        return name

    @classmethod
    def image_settings(cls, folder):
        return read_processor(folder)[0]

    @classmethod
    def conversation(cls, turns, system=None):
        turns = [*turns] + [None] * (len(turns) % 2)
        ends = ("\n", "</s>") * (len(turns) // 2)
        texts = [f"{text}{end}" if text else "" for text, end in zip(turns, ends, strict=True)]
        return (system or "") + "".join(texts)

    def may_be_unused(self, name):
        return False

    def weight_rules(self):
        rules = (
            WeightRule(f"{part}/kernel", f"{part}.weight", "transpose") for part in ("tower", "in")
        )
        return (*rules, *language_rules("model.", "lm_head", False))

    def init_params(self, key):
        vision, e = self.config.vision, self.config.text.hidden_size
        sizes = {"tower": (3 * vision.patch**2, vision.hidden_size), "in": (vision.hidden_size, e)}
        params = {name: {"kernel": jax.random.normal(key, size)} for name, size in sizes.items()}
        return params | {"language": decoder.init_language(key, self.config.text)}

    def hf_processor(self, settings):
        return {"preprocessor_config.json": settings}

    def bound_images(self, folder, min_pixels=None, max_pixels=None):
        return self

    def resize(self, settings, image):
        side = self.config.vision.side
        return np.asarray(image.resize((side, side))).transpose(2, 0, 1)

    def largest_pixel_shapes(self, count):
        side = self.config.vision.side
        return jax.ShapeDtypeStruct((count, 3, side, side), np.uint8)

    def grids(self, pixels):
        side = self.config.vision.side // self.config.vision.patch
        return np.full((len(pixels), 2), side, np.int32)

    def encode_image(self, params, pixels, taps=(), execution=None):
        side, patch = self.config.vision.side // self.config.vision.patch, self.config.vision.patch
        patches = (
            self.normalise(pixels)
            .reshape(-1, 3, side, patch, side, patch)
            .transpose(0, 2, 4, 1, 3, 5)
        )
        return patches.reshape(len(pixels), side**2, -1) @ params["tower"]["kernel"], {}

    def project(self, params, features):
        return features @ params["in"]["kernel"]

    def image_positions(self, grid, place):
        return place[..., None, :], jnp.asarray(self.num_tokens(grid))

    def vision_flops(self, grid):
        vision, width = self.config.vision, self.config.text.hidden_size
        flops_per_value = 2 * grid[0] * grid[1] * vision.hidden_size
        return {
            "tower": flops_per_value * 3 * vision.patch**2,
            "projector": flops_per_value * width,
        }


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setitem(families.FAMILIES, "toy", Toy)
    tokenizer = testing.tiny_tokenizer()
    text = LlamaConfig(len(tokenizer), 48, 96, 2, 4, 2, 12, 1e4, 1e-5, max_positions=256)
    toy = Toy(ToyConfig(Tower(), text, len(tokenizer) - 1, None, (2,)))
    raw, tensors = toy.config.to_hf("float32"), testing.random_tensors(toy)
    return testing.write_folder(tmp_path / "toy", raw, {}, tensors, tokenizer)


def test_a_family_with_only_the_required_methods_works_from_loading_to_training(folder, tmp_path):
    model = load_vlm(folder, dtype=jnp.float32, progress=False)
    data = write_data(tmp_path / "data")
    images = [[data / "images" / "0.png"], [data / "images" / "1.png"]]
    questions = ["red?", "a dog?"]

    def answers(model, pruner):
        return generate(model, questions, images, pruner, options=RunOptions(4))

    policy = build_pruner("stepprune", 3, policy=stepprune())
    for pruner in (policy, FastV(Budget("count", 3), 1)):
        pruned = answers(model, pruner)
        assert [(answer.visual_tokens, answer.kept) for answer in pruned] == [(9, 3), (9, 3)]
    save_vlm(model, tmp_path / "saved")
    reloaded = load_vlm(tmp_path / "saved", dtype=jnp.float32, progress=False)
    assert reloaded.backbone == model.backbone and hash(reloaded.backbone) == hash(model.backbone)
    assert [answer.token_ids for answer in answers(reloaded, pruner)] == [
        answer.token_ids for answer in pruned
    ]
    run = make_run(folder, data, steps=2, method="autoselect", **{"optimizer.warmup": 1})
    train(run, tmp_path / "run")
    assert all(np.isfinite(row["lm_loss"]) for row in metrics(tmp_path / "run"))
