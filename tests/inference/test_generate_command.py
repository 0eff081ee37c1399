import io
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from generation_reference import picture

from stepprune_jax import PolicyConfig, init_policy, testing
from stepprune_jax.checkpoints import load_vlm
from stepprune_jax.checkpoints.policy import Policy, save_policy
from stepprune_jax.generate import main
from stepprune_jax.inference import generate as answer

CONFIG = PolicyConfig(feature_width=32, text_width=48, width=16, num_heads=2, mlp_ratio=2)
FAST = ["--max_tokens", "6", "--dtype", "float32"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a model, two pictures and policies."""
    folder = tmp_path_factory.mktemp("command")
    testing.tiny_llava(folder / "model")
    for number in (1, 2):
        picture(number).save(folder / f"{number}.png")
    (folder / "broken.png").write_bytes((folder / "1.png").read_bytes()[:80])
    save_policy(Policy(init_policy(jax.random.key(0), CONFIG), CONFIG), folder / "policy")
    other = PolicyConfig(feature_width=16, text_width=48, num_heads=2)
    save_policy(Policy(init_policy(jax.random.key(0), other), other), folder / "other_policy")
    return folder


def command(files, *arguments, image=True):
    picture = ["--image", str(files / "1.png")] if image else []
    return ["--model", str(files / "model"), *picture, *FAST, *map(str, arguments)]


def test_the_answer_and_then_the_figures(files, capfd):
    pruned = ("--policy", files / "policy", "--budget", 3)
    assert main(command(files, "--prompt", "red dog?", *pruned)) == 0
    *text, figures = capfd.readouterr().out.rstrip("\n").split("\n")
    model = load_vlm(files / "model", dtype=jnp.float32, progress=False)
    policy = Policy(init_policy(jax.random.key(0), CONFIG), CONFIG)
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
    assert list(found) == ["text", "token_ids", "visual_tokens", "kept", "ttft_ms", "tokens_per_s"]
    model = load_vlm(files / "model", dtype=jnp.float32, progress=False)
    (expected,) = answer(model, ["two?"], [[files / "1.png", files / "2.png"]], max_tokens=6)
    assert found["text"] == expected.text and found["token_ids"] == list(expected.token_ids)
    assert found["visual_tokens"] == found["kept"] == 18
    assert found["ttft_ms"] > 0 and found["tokens_per_s"] > 0
    assert "loaded" in err


def test_sampling_is_repeatable_from_the_command_line(files, capsys):
    texts = []
    for seed in (1, 1, 2):
        options = ("--temperature", 1.5, "--top_p", 0.95, "--seed", seed, "--json")
        assert main(command(files, "--prompt", "two?", *options)) == 0
        texts.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert texts[0] == texts[1] != texts[2]


def test_a_conversation_until_exit(files, capsys, monkeypatch):
    lines = "What is this?\n\n<image> <image> dog\nred\nexit\nnot asked\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert main(command(files, "--interactive", "--positions", "compact")) == 0
    out, err = capsys.readouterr()
    assert out.count("[kept 9 of 9 visual tokens") == 2
    assert "2 <image>, but 1 image(s) are given" in err
    model = load_vlm(files / "model", dtype=jnp.float32, progress=False)
    pictures, options = [files / "1.png"], {"max_tokens": 6, "positions": "compact"}
    (first,) = answer(model, ["What is this?"], pictures, **options)
    (second,) = answer(model, [["What is this?", first.text, "red"]], pictures, **options)
    said = [line for line in out.split("\n") if line and not line.startswith("[kept")]
    assert "\n".join(said) == "\n".join(
        line for text in (first.text, second.text) for line in text.split("\n") if line
    )


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
    "broken image": (["--prompt", "a", "--image", "{}/broken.png"], "damaged image"),
    "not an image": (["--prompt", "a", "--image", "{}/policy"], "not an image in a format"),
    "wrong folder": (["--prompt", "a", "--model", "{}"], "no config.json"),
    "no policy": (["--prompt", "a", "--policy", "{}/absent"], "no policy file at"),
    "not a policy": (["--prompt", "a", "--policy", "{}/1.png"], "not a safetensors file"),
    "weights": (["--prompt", "a", "--policy", "{}/model/model.safetensors"], "not a policy"),
    "other policy": (["--prompt", "a", "--policy", "{}/other_policy"], "feature_width is 16"),
    "budget": (["--prompt", "a", "--policy", "{}/policy", "--budget", "5"], "from 1 to 4"),
    "budget 0": (["--prompt", "a", "--policy", "{}/policy", "--budget", "0"], "from 1 to 4"),
    "budget alone": (["--prompt", "a", "--budget", "5"], "--budget) needs a policy (--policy)"),
    "bias alone": (["--prompt", "a", "--stop_bias", "1"], "needs a policy (--policy)"),
    "top_p": (["--prompt", "a", "--top_p", "2"], "top_p is 2.0"),
    "temperature": (["--prompt", "a", "--temperature", "-1"], "temperature is -1.0"),
    "max_tokens": (["--prompt", "a", "--max_tokens", "0"], "max_tokens is 0"),
    "json talk": (["--json", "--interactive"], "not with --interactive"),
    "vision": (["--prompt", "a", "--vision_folder", "{}"], "original LLaVA-v1.5 layout only"),
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
    for arguments in (["--budget", "many"], ["--colour", "red"], ["--positions", "mixed"]):
        with pytest.raises(SystemExit) as stop:
            main(command(files, "--prompt", "a", *arguments))
        assert stop.value.code == 2
        err = capsys.readouterr().err
        assert err.startswith("stepprune_jax.generate: error: ") and err.count("\n") == 1


def test_a_mistake_leaves_no_traceback_in_the_shell(files):
    found = subprocess.run(
        [sys.executable, "-m", "stepprune_jax.generate", "--model", files, "--prompt", "a"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert found.returncode == 2 and found.stdout == ""
    assert "Traceback" not in found.stderr and "no config.json" in found.stderr
