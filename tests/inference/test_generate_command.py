import io
import json
import subprocess
import sys
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from generation_reference import random_image, request
from PIL import Image
from quick import quick_or_slow

from stepprune_jax import PolicyConfig, init_policy, testing
from stepprune_jax.checkpoints import load_vlm
from stepprune_jax.checkpoints.policy import Policy, load_policy, save_policy
from stepprune_jax.data.prompts import IMAGE_TOKEN
from stepprune_jax.generate import main
from stepprune_jax.inference import generate as answer
from stepprune_jax.pruning import PRUNERS, AutoSelectConfig
from stepprune_jax.pruning.calibration import Calibration

CONFIG = PolicyConfig(feature_width=32, text_width=48, width=16, num_heads=2, mlp_ratio=2)
FAST = ["--max_tokens", "6", "--dtype", "float32"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a model, two images and policies."""
    folder = tmp_path_factory.mktemp("command")
    testing.tiny_llava(folder / "model")
    for number in (1, 2):
        random_image(number).save(folder / f"{number}.png")
    (folder / "broken.png").write_bytes((folder / "1.png").read_bytes()[:80])
    save_policy(Policy(init_policy(jax.random.key(0), CONFIG), CONFIG, None), folder / "policy")
    scorer = AutoSelectConfig(feature_width=32, text_width=48, width=16, num_heads=2, mlp_ratio=2)
    save_policy(Policy.init(jax.random.key(0), scorer, None), folder / "scorer")
    other = PolicyConfig(feature_width=16, text_width=48, num_heads=2)
    save_policy(Policy(init_policy(jax.random.key(0), other), other, None), folder / "other_policy")
    return folder


def command(files, *arguments, image=True):
    shown = ["--image", str(files / "1.png")] if image else []
    return ["--model", str(files / "model"), *shown, *FAST, *map(str, arguments)]


def test_the_answer_and_then_the_figures(files, capfd):
    pruned = ("--policy", files / "policy", "--budget", 3)
    assert main(command(files, "--prompt", "red dog?", *pruned)) == 0
    *text, figures = capfd.readouterr().out.rstrip("\n").split("\n")
    model = load_vlm(files / "model", dtype=jnp.float32, progress=False)
    policy = Policy(init_policy(jax.random.key(0), CONFIG), CONFIG, None)
    (expected,) = answer(
        model, ["red dog?"], [files / "1.png"], policy=policy, budget=3, max_tokens=6
    )
    assert "\n".join(text) == expected.text
    assert figures.startswith("[kept 3 of 9 visual tokens, first token after ")
    assert figures.endswith("tokens/s]")


def test_one_json_object_and_nothing_else(files, capfd):
    second = ["--image", str(files / "2.png")]
    assert main([*command(files, "--prompt", "two?", "--json"), *second]) == 0
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert list(found) == [
        *("text", "token_ids", "visual_tokens", "kept", "kept_indices", "grids"),
        *("ttft_ms", "tokens_per_s"),
    ]
    model = load_vlm(files / "model", dtype=jnp.float32, progress=False)
    (expected,) = answer(model, ["two?"], [[files / "1.png", files / "2.png"]], max_tokens=6)
    assert found["text"] == expected.text and found["token_ids"] == list(expected.token_ids)
    assert found["visual_tokens"] == found["kept"] == 18
    assert found["kept_indices"] == [list(range(9))] * 2 and found["grids"] == [[3, 3]] * 2
    assert found["ttft_ms"] > 0 and found["tokens_per_s"] > 0
    assert "loading model" in err


def test_an_overlay_shows_each_image_with_what_was_kept(files, capsys):
    second = ["--image", str(files / "2.png")]
    sizes = []
    for shown in ([], second):
        drawn = files / "kept.png"
        options = ("--pruner", "cls", "--budget", 3, "--overlay", drawn)
        assert main([*command(files, "--prompt", "two?", *options), *shown]) == 0
        with Image.open(drawn) as image:
            sizes.append(image.size)
        drawn.unlink()
    assert "kept 6 of 18" in capsys.readouterr().out
    assert sizes[1][0] > 1.9 * sizes[0][0] and sizes[1][1] == sizes[0][1]


def test_a_mean_budget_is_a_bias_of_the_calibration(files, capsys):
    policy = load_policy(files / "policy")
    table = Calibration((1.0, 4.0), (6.0, -6.0), (1.0, 0.0), (0.0, 1.0), 9.0, 5)
    save_policy(policy.replace(calibration=table), files / "calibrated")
    found = []
    for how in (("--mean_budget", 2.5), ("--stop_bias", 0.0), ("--budget", "mean:2.5")):
        options = ("--prompt", "two?", "--json", "--policy", files / "calibrated", *how)
        assert main(command(files, *options)) == 0
        found.append(json.loads(capsys.readouterr().out)["kept_indices"])
    assert found[0] == found[1] == found[2] and len(found[0][0]) in range(1, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        calibrated = ("--policy", files / "calibrated", "--mean_budget", 3.99)
        assert main(command(files, "--prompt", "two?", *calibrated)) == 0
    assert capsys.readouterr().err.count("warning: at a mean of 3.99 tokens the count of") == 1


class Traced(NamedTuple):
    """What `--json --trace` gave, and what the row is made of."""

    answer: dict
    arrays: dict
    ids: list
    places: list  # of the images in the ids


def traced(files, capsys, *arguments, images=1):
    file = files / "trace.npz"
    shown = [part for number in range(images) for part in ("--image", files / f"{number + 1}.png")]
    options = ("--prompt", "red dog?", "--json", "--trace", file, *shown, *arguments)
    assert main(command(files, *options, image=False)) == 0
    model = load_vlm(files / "model", dtype=jnp.float32, progress=False)
    found = json.loads(capsys.readouterr().out)
    ids = request(model, "red dog?", [files / f"{n + 1}.png" for n in range(images)]).ids[0]
    with np.load(file) as arrays:
        arrays = dict(arrays)
    assert {name: str(array.dtype) for name, array in arrays.items() if array.dtype != "int32"} == {
        "logits": "float32"
    }
    # The first token of the answer, drawn from them.
    assert arrays["logits"].shape == (model.config.text.vocab_size,)
    assert arrays["logits"].argmax() == found["token_ids"][0]
    last = max(int(name[5:]) for name in arrays if name.startswith("kept_"))
    assert len(arrays[f"kept_{last}"]) == found["kept"]
    return Traced(found, arrays, ids, [at for at, token in enumerate(ids) if token == IMAGE_TOKEN])


@pytest.fixture(scope="module")
def reference(files):
    """The torch model, whose attention can be seen."""
    return transformers.LlavaForConditionalGeneration.from_pretrained(
        files / "model", attn_implementation="eager"
    ).eval()


@torch.no_grad()
def class_attention(reference, files, number):
    """From the class token of the block whose output is projected, [heads, patches]."""
    model = load_vlm(files / "model", dtype=jnp.float32, progress=False)
    pixels = torch.tensor(request(model, "?", [files / f"{number}.png"]).pixels)
    attentions = reference.model.vision_tower(pixels, output_attentions=True).attentions
    return attentions[-2][0, :, 0, 1:].numpy()


def best(scores, count):
    return np.sort(np.argsort(-scores, kind="stable")[:count]).tolist()


def test_a_trace_of_a_plain_pruner_and_two_images(files, capsys, reference):
    options = ("--pruner", "cls", "--budget", "1/3")
    found = traced(files, capsys, *options, images=2)
    arrays, (first, second) = found.arrays, found.places
    assert set(arrays) == {"kept_0", "image_0", "slot_0", "position_0", "logits"}
    kept = [best(class_attention(reference, files, n).mean(0), 3) for n in (1, 2)]
    assert arrays["kept_0"].tolist() == kept[0] + kept[1]
    assert arrays["image_0"].tolist() == [0] * 3 + [1] * 3
    slots = [*range(first, first + 3), *range(second + 2, second + 5)]
    assert arrays["slot_0"].tolist() == slots
    # Text and kept tokens have the position ids of the row with all nine tokens of each image.
    whole = [*range(first), *(first + place for place in kept[0])]
    whole += [*range(first + 9, second + 8), *(second + 8 + place for place in kept[1])]
    whole += range(second + 17, len(found.ids) + 16)
    assert arrays["position_0"].tolist() == whole
    compact = traced(files, capsys, *options, "--positions", "compact", images=2).arrays
    assert compact["position_0"].tolist() == list(range(len(whole)))
    assert compact["kept_0"].tolist() == arrays["kept_0"].tolist()


def test_a_trace_of_a_cut_between_layers(files, capsys, reference):
    options = ("--pruner", "fastv", "--budget", "3", "--pruner_options", "layer=1")
    found = traced(files, capsys, *options)
    arrays, (first,) = found.arrays, found.places
    names = ("kept", "image", "slot", "position")
    assert set(arrays) == {*(f"{name}_{stage}" for name in names for stage in (0, 1)), "logits"}
    assert arrays["kept_0"].tolist() == list(range(9)) and not arrays["image_0"].any()
    assert arrays["slot_0"].tolist() == list(range(first, first + 9))
    row = list(range(len(found.ids) + 8))
    assert arrays["position_0"].tolist() == row
    ids = [reference.config.image_token_index] * 9
    ids = [*found.ids[:first], *ids, *found.ids[first + 1 :]]
    model = load_vlm(files / "model", dtype=jnp.float32, progress=False)
    with torch.no_grad():
        whole = reference(
            input_ids=torch.tensor([ids]),
            output_attentions=True,
            pixel_values=torch.tensor(request(model, "?", [files / "1.png"]).pixels),
        )
    everything = traced(files, capsys).arrays["logits"]
    expected = whole.logits[0, -1, : len(everything)]
    np.testing.assert_allclose(everything, expected, rtol=1e-4, atol=1e-5)
    assert np.abs(arrays["logits"] - everything).max() > 0.01
    kept = best(whole.attentions[0][0].mean(0)[-1, first : first + 9].numpy(), 3)
    assert arrays["kept_1"].tolist() == kept
    assert arrays["image_1"].tolist() == [0] * 3
    assert arrays["slot_1"].tolist() == list(range(first, first + 3))
    left = [*range(first), *(first + place for place in kept), *range(first + 9, len(row))]
    assert arrays["position_1"].tolist() == left
    assert found.answer["visual_tokens"] == 9 and found.answer["kept"] == 3


def test_a_trace_of_merged_tokens(files, capsys, reference):
    options = ("--pruner", "visionzip", "--budget", "4", "--pruner_options", "contextual=1")
    own = traced(files, capsys, *options).arrays["position_0"]
    assert own.tolist() == list(range(len(own)))
    found = traced(files, capsys, *options, "--positions", "original")
    arrays, (first,) = found.arrays, found.places
    # The class token, two patches, and one that the rest is merged into.
    dominant = best(class_attention(reference, files, 1).sum(0), 2)
    assert arrays["kept_0"].tolist() == [-1, *dominant, -1]
    assert arrays["image_0"].tolist() == [0] * 4
    assert arrays["slot_0"].tolist() == list(range(first, first + 4))
    target = min(set(range(9)) - set(dominant))
    places = [first, *(first + place for place in (*dominant, target))]
    after = list(range(first + 9, len(found.ids) + 8))
    assert arrays["position_0"].tolist() == [*range(first), *places, *after]


# The contract runs all of them; what is this command's own are options, budgets and policies.
QUICK = ("fastv", "pyramiddrop", "sparsevlm", "autoselect", "prumerge")


@pytest.mark.parametrize("name", quick_or_slow(PRUNERS, QUICK))
def test_every_pruner_answers_from_the_command_line(files, capsys, name):
    options = {
        "all": (),
        "stepprune": ("--policy", files / "policy", "--budget", "1/3"),
        "autoselect": ("--policy", files / "scorer", "--budget", "1/3"),
        "fastv": ("--budget", 3, "--pruner_options", "layer=1", "average=False"),
        "dart": ("--budget", 3, "--pruner_options", "layer=1", "pivot_image_token=2"),
        "topv": ("--budget", 3, "--pruner_options", "layer=0", "sigma=5"),
        "pyramiddrop": ("--pruner_options", "layer_list=[1]", "image_token_ratio_list=[.4]"),
        "sparsevlm": ("--pruner_options", "pruning_loc=[0]", "sparse_token_list=[2]", "noise=0"),
        "sparsevlm_v2": ("--budget", 3, "--pruner_options", "average=False"),
    }.get(name, ("--budget", "33.3%"))
    assert main(command(files, "--prompt", "two?", "--json", "--pruner", name, *options)) == 0
    found = json.loads(capsys.readouterr().out)
    # DART's two pivots of the image are not counted, and six pivots share nothing out of three.
    kept = {"all": 9, "dart": 2}.get(name, 3)
    assert found["visual_tokens"] == 9 and found["kept"] == kept
    assert 1 <= len(found["token_ids"]) <= 6


def test_sampling_is_repeatable_from_the_command_line(files, capsys):
    texts = []
    for seed in (1, 1, 2):
        options = ("--temperature", 1.5, "--top_p", 0.95, "--seed", seed, "--json")
        assert main(command(files, "--prompt", "two?", *options)) == 0
        texts.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert texts[0] == texts[1] != texts[2]


def test_a_conversation_until_exit(files, capsys, monkeypatch):
    lines = b"What is this?\n\n<image> <image> dog\nr\xffd\nred\nexit\nnot asked\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), "utf-8"))
    assert main(command(files, "--interactive", "--positions", "compact")) == 0
    out, err = capsys.readouterr()
    assert out.count("[kept 9 of 9 visual tokens") == 2
    assert "2 <image>, but 1 image(s) are given" in err
    assert "the prompt is not UTF-8 text: '\\udcff'" in err
    model = load_vlm(files / "model", dtype=jnp.float32, progress=False)
    images, options = [files / "1.png"], {"max_tokens": 6, "positions": "compact"}
    (first,) = answer(model, ["What is this?"], images, **options)
    (second,) = answer(model, [["What is this?", first.text, "red"]], images, **options)
    said = [line for line in out.split("\n") if line and not line.startswith("[kept")]
    assert "\n".join(said) == "\n".join(
        line for text in (first.text, second.text) for line in text.split("\n") if line
    )


def test_a_closed_stdin_asks_nothing(files, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(command(files, "--interactive")) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["", "~no-such-user/model"])
def test_a_model_without_a_folder_is_one_line(files, capsys, name):
    assert main(["--model", name, "--prompt", "two?"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_end_of_stdin_ends_the_conversation_after_the_first_prompt(files, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(command(files, "--interactive", "--prompt", "two?", image=False)) == 0
    assert capsys.readouterr().out.count("[kept 0 of 0 visual tokens") == 1


def test_a_mesh_by_name(files, capsys):
    tokens = []
    for mesh in ([], ["--mesh", "data_tensor"]):
        assert main(command(files, "--prompt", "two?", "--json", *mesh)) == 0
        tokens.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert tokens[0] == tokens[1]
    assert main(command(files, "--prompt", "two?", "--mesh", "tensor")) == 2
    out, err = capsys.readouterr()
    assert out == "" and "not divisible by the 8 devices" in err


MISTAKES = {
    "no model": (["--prompt", "a", "--model", "/absent/model"], "no folder /absent/model"),
    "no prompt": ([], "--prompt is missing"),
    "marks": (["--prompt", "<image> <image> a"], "2 <image>, but 1 image"),
    "no image": (["--prompt", "a", "--image", "absent.png"], "no image file at absent.png"),
    "lines": (["--prompt", "a", "--image", "a\nb\x1b.png"], r"no image file at a b\x1b.png"),
    "broken image": (["--prompt", "a", "--image", "{}/broken.png"], "damaged image"),
    "not an image": (["--prompt", "a", "--image", "{}/policy"], "not an image in a format"),
    "wrong folder": (["--prompt", "a", "--model", "{}"], "no config.json"),
    "no policy": (["--prompt", "a", "--policy", "{}/absent"], "no policy file at"),
    "not a policy": (["--prompt", "a", "--policy", "{}/1.png"], "not a safetensors file"),
    "weights": (["--prompt", "a", "--policy", "{}/model/model.safetensors"], "not a policy"),
    "other policy": (["--prompt", "a", "--policy", "{}/other_policy"], "feature_width is 16"),
    "budget": (["--prompt", "a", "--policy", "{}/policy", "--budget", "5"], "from 1 to 4"),
    "budget 0": (["--prompt", "a", "--policy", "{}/policy", "--budget", "0"], "budget is '0'"),
    "budget alone": (["--prompt", "a", "--budget", "5"], "--budget) needs a pruner (--pruner)"),
    "words": (["--prompt", "a", "--pruner", "grid", "--budget", "many"], "budget is 'many', expec"),
    "no budget": (["--prompt", "a", "--pruner", "cls"], "'cls' needs a budget (--budget)"),
    "too much": (["--prompt", "a", "--pruner", "cls", "--budget", "10"], "integer from 1 to 9"),
    "percent": (["--prompt", "a", "--pruner", "cls", "--budget", "120%"], "budget is '120%', "),
    "pruner": (["--prompt", "a", "--pruner", "fastw"], "Did you mean fastv?"),
    "no policy file": (["--prompt", "a", "--pruner", "stepprune"], "needs a policy (--policy)"),
    "layer": (["--prompt", "a", "--pruner", "fastv", "--budget", "3"], "layer is 2, expected 1 to"),
    "option": (
        ["--prompt", "a", "--pruner", "cls", "--budget", "3", "--pruner_options", "depth=2"],
        "cls has no option 'depth'",
    ),
    "value": (
        ["--prompt", "a", "--pruner", "fastv", "--budget", "3", "--pruner_options", "layer=one"],
        "fastv: option layer is 'one', expected int",
    ),
    "no value": (
        ["--prompt", "a", "--pruner", "fastv", "--budget", "3", "--pruner_options", "layer"],
        "'layer', expected KEY=VALUE",
    ),
    "twice": (
        ["--prompt", "a", "--pruner", "fastv", "--pruner_options", "layer=1", "layer=2"],
        "--pruner_options: layer is given twice",
    ),
    "trace alone": (["--prompt", "a", "--trace", "{}/t.npz"], "--trace requires --json"),
    "trace suffix": (["--prompt", "a", "--json", "--trace", "{}/t.txt"], "expected a .npz file"),
    "trace folder": (["--prompt", "a", "--json", "--trace", "{}/no/t.npz"], "expected a .npz file"),
    "overlay suffix": (["--prompt", "a", "--overlay", "{}/o.jpg"], "expected a .png file"),
    "overlay talk": (["--interactive", "--overlay", "{}/o.png"], "requires one --prompt"),
    "no calibration": (
        ["--prompt", "a", "--policy", "{}/policy", "--mean_budget", "3"],
        "no calibration, which a mean budget (--mean_budget) needs: create one with python -m",
    ),
    "mean 0": (["--prompt", "a", "--policy", "{}/policy", "--mean_budget", "0"], "mean_budget is"),
    "two budgets": (
        ["--prompt", "a", "--policy", "{}/policy", "--mean_budget", "3", "--budget", "3"],
        "budget and mean_budget are given, expected one of them",
    ),
    "mean of none": (
        ["--prompt", "a", "--pruner", "cls", "--mean_budget", "3"],
        "cls does not support the budget mean:3",
    ),
    "bias alone": (["--prompt", "a", "--stop_bias", "1"], "needs a policy (--policy)"),
    "top_p": (["--prompt", "a", "--top_p", "2"], "top_p is 2.0"),
    "temperature": (["--prompt", "a", "--temperature", "-1"], "temperature is -1.0"),
    "max_tokens": (["--prompt", "a", "--max_tokens", "0"], "max_tokens is 0"),
    "long": (
        ["--prompt", "a", "--max_tokens", "1000000000"],
        "an integer from 1 to 256, the",
    ),
    "seed": (["--prompt", "a", "--seed", str(2**70)], "expected an integer from 0, below 2**32"),
    "bias": (["--prompt", "a", "--policy", "{}/policy", "--stop_bias", "nan"], "stop_bias is nan"),
    "bytes": (["--prompt", "a\udcff"], "the prompt is not UTF-8 text: '\\udcff' at character 1"),
    "json talk": (["--json", "--interactive"], "cannot be combined with --interactive"),
    "vision": (["--prompt", "a", "--vision_folder", "{}"], "with a separate tower"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_line_before_weights_are_loaded(files, capsys, monkeypatch, case):
    arguments, message = MISTAKES[case]

    def refuse(*_):
        raise AssertionError("weights were loaded")

    monkeypatch.setitem(main.__globals__, "load_params", refuse)
    assert main(command(files, *(argument.format(files) for argument in arguments))) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("stepprune_jax.generate: error: ") and err.count("\n") == 1
    assert message in err


def test_mistakes_in_flags_are_one_line(files, capsys):
    for arguments in (["--seed", "many"], ["--colour", "red"], ["--positions", "mixed"]):
        with pytest.raises(SystemExit) as stop:
            main(command(files, "--prompt", "a", *arguments))
        assert stop.value.code == 2
        err = capsys.readouterr().err
        assert err.startswith("stepprune_jax.generate: error: ") and err.count("\n") == 1


def test_a_mistake_leaves_no_traceback_in_the_shell(files):
    found = subprocess.run(
        [sys.executable, "-m", "stepprune_jax.generate", "--model", files, "--prompt", "a"],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 2 and found.stdout == ""
    assert "Traceback" not in found.stderr and "no config.json" in found.stderr
