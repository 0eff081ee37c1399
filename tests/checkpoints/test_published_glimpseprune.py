"""GlimpsePrune's new modules, in files as its authors' program saves them."""

import json

import jax
import numpy as np
import pytest
import torch
from hub_server import serving
from visual import noise

from stepprune_jax import load_policy, save_policy, testing
from stepprune_jax.cli.generate import main
from stepprune_jax.evaluation.settings import find_policy
from stepprune_jax.pruning import GlimpsePrune, GlimpsePruneConfig

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


def modules(seed=0):
    """The modules of the authors' program: [out, in]."""
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
    generator = torch.Generator().manual_seed(seed)

    def drawn(shapes):
        made = {n: torch.randn(s, generator=generator).bfloat16() for n, s in shapes.items()}
        return torch.nn.Module().state_dict() | made

    return {
        "attn_fuser": drawn(fuser),
        "learnable_embeddings": drawn({"": (3, 1, E)})[""],
        "le_proj": drawn({"weight": (E, E), "bias": (E,)}),
        "le_norm": drawn({"weight": (E,)}),
    }


def write(folder, config=CONFIG, tree=None):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(modules() if tree is None else tree, folder / "new_modules_gp.pt")
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


def check(policy, tree):
    """Every weight is where its name says."""
    assert policy.config == EXPECTED and policy.stats is None
    params, fuser = policy.params, tree["attn_fuser"]

    def same(ours, theirs):
        assert ours.dtype == np.float32
        np.testing.assert_array_equal(ours, theirs.float().numpy())

    same(params["glimpse"]["embeddings"], tree["learnable_embeddings"])
    same(params["glimpse"]["scale"], tree["le_norm"]["weight"])
    same(params["glimpse"]["kernel"], tree["le_proj"]["weight"].T)
    same(params["glimpse"]["bias"], tree["le_proj"]["bias"])
    same(params["attention_in"]["kernel"], fuser["attn_in_proj.weight"].T)
    same(params["out"]["bias"], fuser["attn_out_projs.1.bias"])
    for i in range(2):
        same(params[f"state_{i}"]["kernel"], fuser[f"cond_in_projs.{i}.weight"].T)
        block, theirs = params[f"block_{i}"], f"layers.{i}"
        for ours, name in zip(("query", "key", "value", "out"), "qkvo", strict=True):
            same(block[ours]["kernel"], fuser[f"{theirs}.attn.{name}_proj.weight"].T)
        for name in ("gate", "up", "down"):
            same(block[name]["kernel"], fuser[f"{theirs}.mlp.{name}_proj.weight"].T)
            same(block[name]["bias"], fuser[f"{theirs}.mlp.{name}_proj.bias"])
        same(block["norm2"], fuser[f"{theirs}.norm2.weight"])
    count = sum(
        x.numel() for part in (fuser, tree["le_proj"], tree["le_norm"]) for x in part.values()
    )
    assert (
        sum(x.size for x in jax.tree.leaves(params)) == count + tree["learnable_embeddings"].numel()
    )


def test_a_folder_its_file_and_our_own_format_are_read(tmp_path):
    folder = write(tmp_path / "folder")
    for path in (folder, folder / "new_modules_gp.pt"):
        check(load_policy(path), modules())
        assert find_policy(path) == folder / "new_modules_gp.pt"
    own = save_policy(load_policy(folder), tmp_path / "own" / "policy.safetensors")
    check(load_policy(own), modules())


def test_a_repository_of_the_hub_is_read(tmp_path, monkeypatch):
    folder = write(tmp_path / "folder")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "cache", monkeypatch) as server:
        server.commit("org/modules", files | {"other.bin": b"something else"})
        check(load_policy("org/modules"), modules())
        assert not any(path.endswith("other.bin") for path in server.asked)


def test_states_of_qwens_tower_are_numbered_by_the_block_before(tmp_path):
    config = load_policy(write(tmp_path / "folder", QWEN)).config
    assert config.selected_visual_layers == (3, 1)  # blocks 2 and 0
    assert (config.feature_width, config.vision_width) == (E, VISION)
    assert config.use_attention_logits


def test_every_weight_is_there_and_used(tmp_path):
    tree = modules()
    del tree["le_proj"]["bias"]
    fuser = tree["attn_fuser"]
    fuser["layers.0.norm1.weight"] = fuser["layers.0.norm1.weight"][:5].clone()
    fuser["attn_out_projs.0.weight"] = torch.zeros(1, F)
    with pytest.raises(ValueError, match="do not fit their GlimpsePruneConfig") as error:
        load_policy(write(tmp_path / "folder", tree=tree))
    for line in (
        "missing: glimpse/bias",
        f"wrong shape: block_0/norm1 is [5], expected [{F}]",
        "unused: attn_fuser.attn_out_projs.0.weight",
    ):
        assert line in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama', expected one of llava_llama_gp"),
        ({"model_type": ["llava_llama_gp"]}, "model_type is .*, expected one of llava_llama_gp"),
        ({"attn_fuse_type": "AttnFuserV2"}, "attn_fuse_type is 'AttnFuserV2', expected"),
        ({"deep_supervision": True}, "deep_supervision is True, expected False"),
        ({"anchor_positions": ["tl"]}, "anchor_positions is .*, expected none"),
        ({"le_length": 2}, "le_length is 2, expected 1"),
        (QWEN | {"attn_fuse_global": False}, "attn_fuse_global is False, expected True"),
        ({"le_layers": None}, "le_layers"),
        ({"selected_visual_layers": None}, "NoneType"),
        ({"selected_visual_layers": []}, "selected_visual_layers"),
        ({"reduce_layer": 0}, "reduce_layer is 0, expected at least 1"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        load_policy(write(tmp_path / "folder", CONFIG | changes))
    assert str(tmp_path / "folder" / "config.json") in str(error.value)


def test_a_configuration_belongs_to_it(tmp_path):
    folder = write(tmp_path / "folder")
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_policy(folder)


@pytest.fixture
def answer(tmp_path, capsys):
    """What the command answers about an image, given a policy, a model and more flags."""
    noise(0, (40, 56)).save(tmp_path / "x.png")

    def ask(policy, folder, *more):
        given = [*("--model", folder, "--image", tmp_path / "x.png", "--prompt", "What?", "--json")]
        given += ["--pruner", GlimpsePrune.name, "--policy", policy, "--max_tokens", "2"]
        main([str(part) for part in (*given, "--dtype", "float32", *more)])
        return json.loads(capsys.readouterr().out)

    return ask


def test_the_command_prunes_with_it(tmp_path, answer):
    policy = write(tmp_path / "folder")
    model = testing.tiny_llava(tmp_path / "model", text={"num_hidden_layers": 3})
    own = answer(policy, model)
    assert 1 <= own["kept"] <= own["visual_tokens"]
    assert answer(policy, model, "--budget", "2")["kept"] == 2
    least = answer(policy, model, "--pruner_options", "max_remain_ratio=0.1")["kept"]
    assert least == max(1, min(own["kept"], int(0.1 * own["visual_tokens"])))


def test_the_command_prunes_a_qwen_with_it(tmp_path, answer):
    own = answer(write(tmp_path / "folder", QWEN), testing.tiny_qwen(tmp_path / "model"))
    assert 1 <= own["kept"] <= own["visual_tokens"]
