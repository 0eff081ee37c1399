import json

import jax
import jax.numpy as jnp
import pytest
from PIL import Image

from experiments.pretrain.run import pretrain
from experiments.pretrain.settings import Pretraining, ShapeSettings
from experiments.pretrain.structure import init_tower
from stepprune_jax.checkpoints import load_vlm


def small_run(folder):
    sizes = {"vision_width": 16, "vision_mlp": 16, "vision_layers": 1, "vision_heads": 2}
    sizes |= {name.replace("vision", "text"): size for name, size in sizes.items()}
    return Pretraining().replace(
        {
            "data.folder": str(folder),
            "micro_batch": 2,
            "dtype": "float32",
            "model": ShapeSettings(image_size=16, patch_size=8, **sizes),
            "language.steps": 2,
            "language.batch_size": 2,
            "language.thinned_share": 0.0,
            "language.train_tower": True,
            "noise.thinned_share": 0.0,
            "noise.steps": 0,
        }
    )


@pytest.mark.slow
def test_a_folder_without_labels_of_patches_trains_the_tower_with_the_rest(tmp_path):
    folder = tmp_path / "data"
    (folder / "images").mkdir(parents=True)
    samples = []
    for number, color in enumerate(("red", "blue", "green")):
        Image.new("RGB", (20, 12), color).save(folder / "images" / f"{number}.png")
        said = [
            {"from": "human", "value": "<image>\nWhich color?"},
            {"from": "gpt", "value": color},
        ]
        samples.append({"id": color, "image": f"{number}.png", "conversations": said})
    (folder / "train.json").write_text(json.dumps(samples))

    made = pretrain(small_run(folder), tmp_path / "run", folder)

    model = load_vlm(made, dtype=jnp.float32)
    assert model.config.max_image_tokens == 4
    before = init_tower(jax.random.key(0), model.config.vision)
    kernels = [tower["layers"]["mlp"]["up"]["kernel"] for tower in (before, model.params["vision"])]
    assert float(jnp.abs(kernels[1] - kernels[0]).max()) > 1e-4


def test_samples_without_an_image_and_empty_files_are_refused(tmp_path):
    (tmp_path / "images").mkdir()
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    for samples, message in (
        ([{"id": "x", "conversations": turns}], r"sample 0 \(x\) has no image; all must have one"),
        ([], "expected at least one sample, got an empty list"),
    ):
        (tmp_path / "train.json").write_text(json.dumps(samples))
        with pytest.raises(ValueError, match=message):
            pretrain(small_run(tmp_path), tmp_path / "run", tmp_path)
