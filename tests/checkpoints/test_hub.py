"""Policies and models from a stand-in of the hub, and policies to it."""

import shutil

import jax
import numpy as np
import pytest
import torch
from commands import status
from hub_server import serving
from huggingface_hub import constants
from shards import to_pickles, to_shards

from stepprune_jax.checkpoints.folder import find_folder, inspect_folder
from stepprune_jax.checkpoints.identity import model_identity
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.checkpoints.policy import load_policy, policy_file, save_policy
from stepprune_jax.cli import export
from stepprune_jax.evaluation.settings import own_policy
from stepprune_jax.policy import PolicyConfig, init_policy
from stepprune_jax.selectors import StepPrune

CONFIG = PolicyConfig(feature_width=4, text_width=4, num_heads=1, mlp_ratio=1, encoder_layers=1)
NAME = "policy.safetensors"


@pytest.fixture(scope="module")
def policy():
    return StepPrune(
        params=init_policy(jax.random.key(0), CONFIG), config=CONFIG, stats=None, stop_bias=0.5
    )


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with serving(tmp_path / "cache", monkeypatch) as running:
        yield running


@pytest.fixture
def published(server, policy, tmp_path):
    """Two versions on the hub; the hash of the first."""
    files = [
        save_policy(policy.replace(stop_bias=bias), tmp_path / f"{bias}").read_bytes()
        for bias in (0.5, 1.5)
    ]
    first = server.commit("org/name", {NAME: files[0], "README.md": b"A card."})
    server.commit("org/name", {NAME: files[1]})
    server.commit("org/name", {NAME: files[0]}, "tuned")
    return first


def test_a_policy_comes_from_the_hub_at_the_revision_that_is_asked_for(server, published, policy):
    found = load_policy("hub:org/name")
    assert (found.config, found.stop_bias) == (CONFIG, 1.5)
    jax.tree.map(np.testing.assert_array_equal, found.params, policy.params)
    assert not any("README" in path for path in server.asked)
    assert load_policy(f"hub:org/name@{published}").stop_bias == 0.5
    assert load_policy("hub:org/name@tuned").stop_bias == 0.5
    # Where a program takes a policy's file, it takes that, without a prefix too.
    assert own_policy("runs/none", "org/name") == policy_file("hub:org/name")


def test_without_a_network_what_was_downloaded_is_used(server, published, monkeypatch):
    load_policy("hub:org/name@tuned")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    server.asked.clear()
    assert load_policy("hub:org/name@tuned").stop_bias == 0.5 and not server.asked
    with pytest.raises(FileNotFoundError, match=r"'org/other' from .* failed: .*Without a network"):
        load_policy("hub:org/other")


def test_what_the_hub_does_not_have_is_named_in_one_line(server, published):
    server.commit("org/empty", {"README.md": b"A card."})
    for given, message in (
        ("hub:org/none", "'org/none' from .*Repository Not Found"),
        ("hub:org/name@v9", "'org/name@v9' from .*Revision Not Found"),
        ("hub:org/empty", r"org/empty .* has no policy\.safetensors"),
        ("hub:a/b/c", "no policy file at hub:a/b/c"),
        ("hub:org/name@", "no policy file at hub:org/name@"),
    ):
        with pytest.raises(FileNotFoundError, match=message) as error:
            load_policy(given)
        assert "\n" not in str(error.value)


def test_a_policy_needs_no_prefix_where_no_path_is_meant(server, published, tmp_path):
    assert load_policy("org/name@tuned").stop_bias == 0.5
    server.asked.clear()
    (tmp_path / "org").mkdir()
    for path in ("org/name", "runs/a/p.safetensors", "runs/p.safetensors"):
        with pytest.raises(FileNotFoundError, match=f"no policy file at {path}"):
            load_policy(path)
    assert not server.asked


def test_a_model_comes_at_a_revision_with_its_weights_last_and_no_needless_pickle(
    server, llava_folder, capsys
):
    files = {path.name: path.read_bytes() for path in llava_folder.iterdir()}
    needless = ("pytorch_model.bin", "consolidated.safetensors", "model-1-of-1.safetensors")
    first = server.commit("org/model", files | dict.fromkeys(needless, b"the same"))
    server.commit("org/model", {"config.json": b"{}"})
    model = load_vlm(f"hub:org/model@{first}", progress=False)
    assert sorted(path.name for path in model.folder.iterdir()) == sorted(files)
    names = [path.rpartition("/")[2] for path in server.asked]
    weights = names.index("model.safetensors")
    assert all(names.index(name) < weights for name in files if name.endswith(".json"))
    assert f"org/model@{first} is not a local folder; looking it up" in capsys.readouterr().out
    assert (find_folder("hub:org/model") / "config.json").read_text() == "{}"


def test_shards_come_by_their_index(server, llava_folder, tmp_path):
    folder = shutil.copytree(llava_folder, tmp_path / "model")
    to_shards(folder, 2)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    server.commit("org/shards", files | {"model-00001-of-00001.safetensors": b"an older one"})
    model = load_vlm("hub:org/shards", progress=False)
    assert sorted(path.name for path in model.folder.iterdir()) == sorted(files)


def test_pickles_come_from_a_repository_without_safetensors(server, llava_folder, tmp_path):
    folder = shutil.copytree(llava_folder, tmp_path / "model")
    to_pickles(folder, 2)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    others = dict.fromkeys(("training_args.bin", "optimizer.safetensors"), b"no weights")
    server.commit("org/old", files | others)
    source = inspect_folder("hub:org/old")
    assert model_identity(source) == model_identity(inspect_folder(folder))
    assert sorted(path.name for path in source.folder.iterdir()) == sorted(files)
    # More training: every weight a little different, names and sizes the same.
    first = min(folder.glob("*.bin"))
    tensors = torch.load(first)
    torch.save({name: tensor + 1 for name, tensor in tensors.items()}, first)
    assert model_identity(inspect_folder(folder)) != model_identity(source)


@pytest.fixture
def trained(policy, monkeypatch):
    config = {
        "model.folder": "hub:org/model@v1",
        "data.train_file": "",
        "data.folder": "data",
        "steps": 3,
        "batch_size": 2,
    }
    about = {"config": config, "model": "0a", "data": "0b"}
    monkeypatch.setattr(export, "latest_policy", lambda workdir: (3, policy, about))


def test_an_exported_policy_is_uploaded_with_its_card(server, trained, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "right")
    export.main(["run", "--out", "release", "--stop_bias=2", "--push", "me/mine", "--private"])
    file, card, commit = capsys.readouterr().out.split()
    assert (file, card) == (f"release/{NAME}", "release/README.md")
    assert "/me/mine/commit/" in commit and server.private
    files = server.files["me/mine", server.at("me/mine", "main")]
    assert {*files} == {NAME, "README.md"}
    text = files["README.md"].decode()
    assert "--policy hub:me/mine --image" in text and "\nbase_model: org/model\n" in text
    assert load_policy("hub:me/mine").stop_bias == 2


def test_a_failed_upload_is_reported_in_one_line(server, trained, monkeypatch, capsys, tmp_path):
    def error(*arguments):
        code = status("stepprune-export", export.main, "run", "--out", "release", *arguments)
        said = capsys.readouterr().err
        assert code == 2 and said.count("\n") == 1
        return said

    assert "--push is 'mine', expected owner/name" in error("--push=mine")
    assert not (tmp_path / "release").exists()
    monkeypatch.setenv("HF_TOKEN", "wrong")
    said = error("--push=me/mine")
    assert "uploading to me/mine failed: " in said and "401" in said
    assert "The files are in release; `hf upload me/mine release` also uploads them" in said
    assert load_policy(tmp_path / "release" / NAME).config == CONFIG
