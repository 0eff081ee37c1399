import json
import shutil

import pytest
import sentencepiece

from stepprune_jax import testing
from stepprune_jax.checkpoints import folder as folders
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.checkpoints.shipped import SHAPES_MODEL


def _config(folder, **fields):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_paths_are_not_taken_for_hub_ids(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder owner/name; .* use hub:owner/name;"):
        folders.find_folder("owner/name")
    for name in (tmp_path / "none", "none", ""):
        with pytest.raises(FileNotFoundError, match="no folder"):
            folders.find_folder(name)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(NotADirectoryError, match="give its folder"):
        folders.find_folder(tmp_path / "model.safetensors")


def test_a_folder_comes_before_a_shipped_model_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert folders.find_folder("shapes") == SHAPES_MODEL
    (tmp_path / "shapes").mkdir()
    assert folders.find_folder("shapes").resolve() == tmp_path / "shapes"
    with pytest.raises(FileNotFoundError, match=r"no folder shape, .*\(shapes, shapes_qwen\)"):
        folders.find_folder("shape")


def test_folders_of_another_kind_are_refused(tmp_path):
    (tmp_path / "checkpoint_10").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no config\.json.*it holds checkpoint_10"):
        folders.inspect_folder(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="merge the adapter"):
        folders.inspect_folder(tmp_path)
    for text in ("{", "[]", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json"):
            folders.inspect_folder(tmp_path)


def test_an_adapter_beside_a_model_is_not_ignored(tmp_path, llava_folder, capsys):
    folder = shutil.copytree(llava_folder, tmp_path / "model")
    (folder / "adapter_model.safetensors").write_bytes(b"")  # alone, `transformers` ignores it too
    load_vlm(folder, progress=False)
    said = capsys.readouterr().err
    assert (
        f"{folder / 'adapter_model.safetensors'} is not applied" in said and said.count("\n") == 1
    )
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no weights: .*it holds adapter_model\.safetens"):
        load_vlm(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"adapter_config\.json.* not applied: merge it") as error:
        folders.inspect_folder(folder)
    assert "\n" not in str(error.value)


def test_weights_of_another_name_are_refused(tmp_path, llava_folder):
    raw = json.loads((llava_folder / "config.json").read_text())
    _config(tmp_path, **raw, transformers_weights="other.safetensors")
    with pytest.raises(ValueError, match=r"config\.json: transformers_weights is 'other\.saf"):
        folders.inspect_folder(tmp_path)


def test_the_clip_folder_of_an_original_model_must_be_given(tmp_path, llava_folder):
    fields = {"model_type": "llava_llama", "mm_projector_type": "mlp2x_gelu"}
    with pytest.raises(FileNotFoundError, match=r"mm_vision_tower .* Pass vision_folder="):
        folders.inspect_folder(_config(tmp_path, **fields))
    tower = _config(tmp_path / "tower", hidden_act="relu")
    with pytest.raises(ValueError, match=f"with the tower of {tower}: .*act is 'relu'"):
        folders.inspect_folder(tmp_path, tower)
    with pytest.raises(ValueError, match=r"vision_folder is for checkpoints"):
        folders.inspect_folder(llava_folder, llava_folder)


def test_missing_and_damaged_companions_are_named_before_weights_are_read(tmp_path):
    folder = testing.tiny_llava(tmp_path)
    (folder / "model.safetensors").unlink()  # would fail too, but only later
    path = folder / "tokenizer_config.json"  # what fails when the tokenizer is used
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": "x"}))
    with pytest.raises(ValueError, match=r"tokenizer, with tokenizer_config\.json"):
        load_vlm(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json could not be read"):
        load_vlm(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer: expected tokenizer\.json"):
        load_vlm(folder)


def test_a_tokenizer_without_its_reader_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    monkeypatch.setattr(folders.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install sentencepiece protobuf"):
        folders.load_tokenizer(tmp_path)


@pytest.fixture(scope="module")
def sentencepiece_folder(tmp_path_factory):
    """A folder with a small `tokenizer.model` of Llama's kind, as the original LLaVA has it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["USER: What is in this picture? ASSISTANT: a red dog"] * 20),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=320,
        hard_vocab_limit=False,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return folder


# A text-only prefix, both pieces around an image, a leading blank, runs of blanks, bytes.
TEXTS = ("What is this?", "A chat. USER: ", "\nWhat is in this", " What", "a  dog\n\n", "é 狗", "")


@pytest.mark.parametrize("fields", [{}, {"legacy": True, "add_bos_token": True}])
def test_a_tokenizer_model_alone_gives_the_ids_of_sentencepiece(sentencepiece_folder, fields):
    written = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (sentencepiece_folder / "tokenizer_config.json").write_text(json.dumps(written | fields))
    # A model type that `transformers` knows changes nothing here, though it does there.
    (sentencepiece_folder / "config.json").write_text(json.dumps({"model_type": "llava"}))
    tokenizer = folders.load_tokenizer(sentencepiece_folder)
    reference = sentencepiece.SentencePieceProcessor(
        model_file=str(sentencepiece_folder / "tokenizer.model")
    )
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        assert ids == [1, *reference.encode(text)], text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    # The earlier rule puts a blank behind every special token, too.
    again = tokenizer("a</s>USER").input_ids
    assert again == [1, *reference.encode("a"), 2, *reference.encode("USER")]


def test_the_newer_rule_puts_no_blank_behind_special_tokens(sentencepiece_folder):
    (sentencepiece_folder / "tokenizer_config.json").write_text(json.dumps({"legacy": False}))
    tokenizer = folders.load_tokenizer(sentencepiece_folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer("\nWhat").input_ids)[:3] == [
        *("<s>", "▁", "<0x0A>")
    ]
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("a</s>USER").input_ids)
    assert pieces[:3] == ["<s>", "▁a", "</s>"] and not pieces[3].startswith("▁")
