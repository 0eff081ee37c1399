"""Loading of GlimpsePrune's weights from files as its authors' program writes them."""

import json

import numpy as np
import pytest
import torch
from hub_server import serving
from visual import noise

from stepprune_jax import load_policy, save_policy
from stepprune_jax.checkpoints.policy import policy_file
from stepprune_jax.cli.generate import main
from stepprune_jax.models.weights import flatten
from stepprune_jax.selectors import GlimpsePrune, GlimpsePruneConfig

# Widths of text and vision, attention heads, and the authors' fusion and condition widths.
E, VISION, HEADS, F, C = 48, 32, 4, 8, 16
CONFIG = {
    "model_type": "llava_llama_gp",
    "hidden_size": E,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 3,
    "rms_norm_eps": 1e-5,
    "le_layers": [0, 1, 2],
    "le_length": 1,
    "selected_layers": [1],
    "reduce_layer": 1,
    "use_attention_logits": False,
    "attn_fuse_type": "AttnFuserV1",
    "attn_fuse_size": F,
    "attn_fuse_num_heads": 2,
    "attn_fuse_hidden_act": "silu",
    "visual_cond_size": C,
    "selected_visual_layers": [3, 1],
    "deep_supervision": False,
    "reduce_threshold": 0.5,
}
QWEN = CONFIG | {
    "model_type": "qwen2_5_vl_gp",
    "use_attention_logits": True,
    "le_norm_type": "rmsnorm",
    "attn_fuse_global": True,
    "selected_visual_layers": [2, 0],
}


def modules():
    """Returns random weights under the authors' names, matrices as [out, in]."""
    block = {f"attn.{name}_proj.weight": (F + C, F + C) for name in "qk"}
    block |= {f"attn.{name}_proj.weight": (F, F) for name in "vo"}
    block |= {"mlp.down_proj.weight": (F, 2 * F), "mlp.down_proj.bias": (F,)}
    for name in ("gate", "up"):
        block |= {f"mlp.{name}_proj.weight": (2 * F, F), f"mlp.{name}_proj.bias": (2 * F,)}
    block |= {"norm1.weight": (F,), "norm2.weight": (F,)}
    fuser = {"attn_in_proj.weight": (F, HEADS), "attn_in_proj.bias": (F,)}
    for i in range(2):
        fuser |= {f"layers.{i}.{name}": shape for name, shape in block.items()}
        fuser |= {f"cond_in_projs.{i}.weight": (C, VISION), f"cond_in_projs.{i}.bias": (C,)}
    fuser |= {"attn_out_projs.1.weight": (1, F), "attn_out_projs.1.bias": (1,)}
    generator = torch.Generator().manual_seed(0)

    def random_state(shapes):
        tensors = {n: torch.randn(s, generator=generator).bfloat16() for n, s in shapes.items()}
        return torch.nn.Module().state_dict() | tensors

    return {
        "attn_fuser": random_state(fuser),
        "learnable_embeddings": random_state({"": (3, 1, E)})[""],
        "le_proj": random_state({"weight": (E, E), "bias": (E,)}),
        "le_norm": random_state({"weight": (E,)}),
    }


def write(folder, config=CONFIG):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(modules(), folder / "new_modules_gp.pt")
    return folder


EXPECTED = GlimpsePruneConfig(
    *(VISION, E, HEADS, VISION),
    le_layers=(0, 1, 2),
    selected_layers=(1,),
    reduce_layer=1,
    selected_visual_layers=(3, 1),
    attn_fuse_size=F,
    visual_cond_size=C,
    attn_fuse_num_heads=2,
)


def check(policy):
    """Checks that every weight of the authors' modules is at its path in the policy."""
    assert policy.config == EXPECTED and policy.stats is None
    tree = modules()
    expected = {
        "glimpse/embeddings": tree["learnable_embeddings"],
        "glimpse/scale": tree["le_norm"]["weight"],
    }

    def expect_linear(path, state, prefix=""):
        expected[f"{path}/kernel"] = state[f"{prefix}weight"].T
        if f"{prefix}bias" in state:
            expected[f"{path}/bias"] = state[f"{prefix}bias"]

    fuser = tree["attn_fuser"]
    expect_linear("glimpse", tree["le_proj"])
    expect_linear("attention_in", fuser, "attn_in_proj.")
    expect_linear("out", fuser, "attn_out_projs.1.")
    for i in range(2):
        expect_linear(f"state_{i}", fuser, f"cond_in_projs.{i}.")
        for name in ("query", "key", "value", "out"):
            expect_linear(f"block_{i}/{name}", fuser, f"layers.{i}.attn.{name[0]}_proj.")
        for name in ("gate", "up", "down"):
            expect_linear(f"block_{i}/{name}", fuser, f"layers.{i}.mlp.{name}_proj.")
        for name in ("norm1", "norm2"):
            expected[f"block_{i}/{name}"] = fuser[f"layers.{i}.{name}.weight"]
    params = flatten(policy.params)
    assert params.keys() == expected.keys()
    for name, tensor in expected.items():
        assert params[name].dtype == np.float32
        np.testing.assert_array_equal(params[name], tensor.float().numpy(), err_msg=name)


def test_the_authors_folder_and_file_and_a_policy_file_give_equal_policies(tmp_path):
    folder = write(tmp_path / "folder")
    for path in (folder, folder / "new_modules_gp.pt"):
        check(load_policy(path))
        assert policy_file(path) == folder / "new_modules_gp.pt"
    saved = save_policy(load_policy(folder), tmp_path / "saved" / "policy.safetensors")
    check(load_policy(saved))


def test_only_necessary_files_of_a_repository_are_downloaded(tmp_path, monkeypatch):
    folder = write(tmp_path / "folder")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "cache", monkeypatch) as server:
        server.commit("org/modules", files | {"other.bin": b"something else"})
        check(load_policy("org/modules"))
        assert not any(path.endswith("other.bin") for path in server.asked)


def test_the_layer_numbers_of_qwens_tower_are_converted_to_states(tmp_path):
    config = load_policy(write(tmp_path / "folder", QWEN)).config
    assert config.selected_visual_layers == (3, 1)  # blocks 2 and 0
    assert (config.feature_width, config.vision_width) == (E, VISION)
    assert config.use_attention_logits


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama', expected one of llava_llama_gp"),
        ({"deep_supervision": True}, "deep_supervision is True, expected False"),
        ({"anchor_positions": ["tl"]}, "anchor_positions is .*, expected none"),
        (QWEN | {"attn_fuse_global": False}, "attn_fuse_global is False, expected True"),
        ({"selected_visual_layers": None}, "NoneType"),
        ({"reduce_layer": 0}, "reduce_layer is 0, expected at least 1"),
    ],
)
def test_errors_name_unsupported_fields_of_the_configuration(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        load_policy(write(tmp_path / "folder", CONFIG | changes))
    assert str(tmp_path / "folder" / "config.json") in str(error.value)


def test_a_missing_configuration_is_an_error(tmp_path):
    folder = write(tmp_path / "folder")
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_policy(folder)


def test_the_generate_command_prunes_with_published_weights(tmp_path, qwen_folder, capsys):
    noise(0, (40, 56)).save(tmp_path / "x.png")
    flags = [*("--model", qwen_folder, "--image", tmp_path / "x.png", "--prompt", "What?")]
    flags += ["--pruner", GlimpsePrune.name, "--policy", write(tmp_path / "folder", QWEN)]
    main([*map(str, flags), "--max_tokens", "2", "--dtype", "float32", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert 1 <= answer["kept"] <= answer["visual_tokens"]
