"""Downloads of policies and models from a fake hub, and uploads of policies."""

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
    with serving(tmp_path / "cache", monkeypatch) as hub:
        yield hub


@pytest.fixture
def published(server, policy, tmp_path):
    """Commits two versions of a policy to the hub, and returns the hash of the first commit."""
    files = [
        save_policy(policy.replace(stop_bias=bias), tmp_path / f"{bias}").read_bytes()
        for bias in (0.5, 1.5)
    ]
    first = server.commit("org/name", {NAME: files[0], "README.md": b"A card."})
    server.commit("org/name", {NAME: files[1]})
    server.commit("org/name", {NAME: files[0]}, "tuned")
    return first


def test_a_policy_is_downloaded_at_the_requested_revision(server, published, policy):
    loaded = load_policy("hub:org/name")
    assert (loaded.config, loaded.stop_bias) == (CONFIG, 1.5)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, policy.params)
    assert not any("README" in path for path in server.asked)
    assert load_policy(f"hub:org/name@{published}").stop_bias == 0.5
    assert load_policy("hub:org/name@tuned").stop_bias == 0.5
    # The evaluation accepts a hub id without a prefix in place of a policy's file.
    assert own_policy("runs/none", "org/name") == policy_file("hub:org/name")


def test_downloaded_files_are_used_without_a_network(server, published, monkeypatch):
    load_policy("hub:org/name@tuned")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    server.asked.clear()
    assert load_policy("hub:org/name@tuned").stop_bias == 0.5 and not server.asked
    with pytest.raises(FileNotFoundError, match=r"'org/other' from .* failed: .*Without a network"):
        load_policy("hub:org/other")


def test_a_one_line_error_names_what_the_hub_lacks(server, published):
    server.commit("org/empty", {"README.md": b"A card."})
    for name, message in (
        ("hub:org/none", "'org/none' from .*Repository Not Found"),
        ("hub:org/name@v9", "'org/name@v9' from .*Revision Not Found"),
        ("hub:org/empty", r"org/empty .* has no policy\.safetensors"),
        ("hub:a/b/c", "no policy file at hub:a/b/c"),
        ("hub:org/name@", "no policy file at hub:org/name@"),
    ):
        with pytest.raises(FileNotFoundError, match=message) as error:
            load_policy(name)
        assert "\n" not in str(error.value)


def test_a_hub_id_needs_no_prefix_unless_it_may_be_a_path(server, published, tmp_path):
    assert load_policy("org/name@tuned").stop_bias == 0.5
    server.asked.clear()
    (tmp_path / "org").mkdir()
    for path in ("org/name", "runs/a/p.safetensors", "runs/p.safetensors"):
        with pytest.raises(FileNotFoundError, match=f"no policy file at {path}"):
            load_policy(path)
    assert not server.asked


def test_a_model_is_downloaded_at_a_revision_with_its_weights_last_and_in_one_format(
    server, llava_folder, capsys
):
    files = {path.name: path.read_bytes() for path in llava_folder.iterdir()}
    unused = ("pytorch_model.bin", "consolidated.safetensors", "model-1-of-1.safetensors")
    first = server.commit("org/model", files | dict.fromkeys(unused, b"the same"))
    server.commit("org/model", {"config.json": b"{}"})
    model = load_vlm(f"hub:org/model@{first}", progress=False)
    assert sorted(path.name for path in model.folder.iterdir()) == sorted(files)
    names = [path.rpartition("/")[2] for path in server.asked]
    weights_position = names.index("model.safetensors")
    assert all(names.index(name) < weights_position for name in files if name.endswith(".json"))
    assert f"org/model@{first} is not a local folder; looking it up" in capsys.readouterr().out
    assert (find_folder("hub:org/model") / "config.json").read_text() == "{}"


def test_only_the_shards_of_the_index_are_downloaded(server, llava_folder, tmp_path):
    folder = shutil.copytree(llava_folder, tmp_path / "model")
    to_shards(folder, 2)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    server.commit("org/shards", files | {"model-00001-of-00001.safetensors": b"an older one"})
    model = load_vlm("hub:org/shards", progress=False)
    assert sorted(path.name for path in model.folder.iterdir()) == sorted(files)


def test_pickles_are_downloaded_if_a_repository_has_no_safetensors(server, llava_folder, tmp_path):
    folder = shutil.copytree(llava_folder, tmp_path / "model")
    to_pickles(folder, 2)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    unused = dict.fromkeys(("training_args.bin", "optimizer.safetensors"), b"no weights")
    server.commit("org/old", files | unused)
    source = inspect_folder("hub:org/old")
    assert model_identity(source) == model_identity(inspect_folder(folder))
    assert sorted(path.name for path in source.folder.iterdir()) == sorted(files)
    # Further training changes numbers, but neither names nor sizes.
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
    files = server.files["me/mine", server.find_commit("me/mine", "main")]
    assert {*files} == {NAME, "README.md"}
    text = files["README.md"].decode()
    assert "--policy hub:me/mine --image" in text and "\nbase_model: org/model\n" in text
    assert load_policy("hub:me/mine").stop_bias == 2


def test_a_failed_upload_is_reported_in_one_line(server, trained, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "wrong")
    arguments = ("run", "--out", "release", "--push=me/mine")
    code = status("stepprune-export", export.main, *arguments)
    message = capsys.readouterr().err
    assert code == 2 and message.count("\n") == 1
    assert "uploading to me/mine failed: " in message and "401" in message
    assert "The files are in release; `hf upload me/mine release` also uploads them" in message
    assert load_policy(tmp_path / "release" / NAME).config == CONFIG
