"""The command on a tiny Qwen2.5-VL: pruners on two images of different size, and bad input."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image
from quick import quick_or_slow

from stepprune_jax import testing
from stepprune_jax.cli.generate import main

SIZES = ((50, 70), (20, 90))  # height and width in pixels: 35 and 22 tokens
RUN = ("random", "grid", "fastv", "sparsevlm", "pyramiddrop", "dart", "holov", "visionzip")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Model folders, of which two are not supported, and images."""
    folder = tmp_path_factory.mktemp("files")
    testing.tiny_qwen(folder / "model", num_hidden_layers=8)
    for number, (height, width) in enumerate(SIZES):
        noise = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(noise).save(folder / f"{number}.png")
    for name in ("qwen2", "no_processor"):
        shutil.copytree(folder / "model", folder / name)
    (folder / "no_processor" / "preprocessor_config.json").unlink()
    config = folder / "qwen2" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "qwen2_vl"}))
    return folder


def run(files, *flags, model="model", prompt="Red?"):
    images = [f"--image={files / name}" for name in ("0.png", "1.png")]
    given = ["--model", str(files / model), *images, "--prompt", prompt, "--json", *flags]
    return main([*given, "--max_tokens", "2", "--dtype", "float32"])


@pytest.mark.parametrize("name", quick_or_slow(RUN, ("dart", "visionzip")))
def test_a_pruner_keeps_half_of_each_image(files, capsys, name):
    assert run(files, "--pruner", name, "--budget", "50%") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["visual_tokens"] == 35 + 22
    # DART keeps eight pivots' shares and the image's four pivots; means over layers are lower last.
    if name == "dart":
        assert answer["kept"] == (16 + 4) + (8 + 4)
    elif name in ("sparsevlm", "pyramiddrop"):
        assert 0 < answer["kept"] <= 18 + 11
    else:
        assert answer["kept"] == 18 + 11


@pytest.mark.parametrize(
    ("flags", "changes", "message"),
    [
        (("--pruner=cls", "--budget=50%"), {}, "cls: the model's tower has no [CLS] attention"),
        ((), {"prompt": "<|image_pad|>Red?"}, "the prompt has <|image_pad|>, which the template"),
        ((), {"model": "qwen2"}, "model_type 'qwen2_vl'"),
        ((), {"model": "no_processor"}, "has no preprocessor_config.json"),
    ],
)
def test_bad_input_is_one_line(files, capsys, flags, changes, message):
    assert run(files, *flags, **changes) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err
