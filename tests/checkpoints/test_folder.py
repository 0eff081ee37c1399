import json
import re

import huggingface_hub
import pytest
import sentencepiece

from stepprune_jax import testing
from stepprune_jax.checkpoints import folder as folders
from stepprune_jax.checkpoints import load_vlm
from stepprune_jax.checkpoints.shipped import SHAPES_MODEL


def _config(folder, **fields):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_hub_ids_are_fetched_and_folders_are_not(tmp_path, monkeypatch, capsys):
    here = testing.tiny_llava(tmp_path / "here")
    asked = []

    def download(name, revision, allow_patterns):
        assert revision is None
        asked.append((name, allow_patterns))
        return str(here)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert folders.find_folder(here) == here and asked == []
    model = load_vlm("hub:owner/name", progress=False)
    assert model.folder == here
    assert [name for name, _ in asked] == ["owner/name", "owner/name"]
    # The weights come last, and pickles never.
    assert asked[1][1] == ["*.safetensors"] and "*.safetensors" not in asked[0][1]
    said = "owner/name is not a local folder; looking it up on the Hugging Face hub\n"
    assert capsys.readouterr().out == said
    assert folders.find_folder("llava-hf/llava-1.5-7b-hf") == here
    with pytest.raises(FileNotFoundError, match=r"no folder owner/name; .* use hub:owner/name;"):
        folders.find_folder("owner/name")
    assert len(asked) == 3
    assert not any(pattern.endswith((".bin", ".pt")) for _, given in asked for pattern in given)


def test_a_hub_out_of_reach_is_explained(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=r"fetching 'owner/none' from .* hub failed"):
        folders.find_folder("hub:owner/none")


def test_paths_are_not_taken_for_hub_ids(tmp_path):
    for name in (tmp_path / "none", "./none", "none", "a/b/c", ""):
        with pytest.raises(FileNotFoundError, match="no folder"):
            folders.find_folder(name)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(NotADirectoryError, match="give its folder"):
        folders.find_folder(tmp_path / "model.safetensors")


def test_the_small_model_has_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert folders.find_folder("shapes") == SHAPES_MODEL
    with pytest.raises(FileNotFoundError, match=r"nor a shipped model of that name \(shapes, sh"):
        folders.find_folder("shape")
    (tmp_path / "shapes").mkdir()  # a folder of that name comes first
    assert folders.find_folder("shapes").resolve() == tmp_path / "shapes"


def test_folders_of_another_kind_are_refused(tmp_path):
    (tmp_path / "checkpoint_10").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no config\.json.*it holds checkpoint_10"):
        folders.inspect_folder(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="merge the adapter"):
        folders.inspect_folder(tmp_path)
    for text in ("{", "[]", "[" * 100_000, '{"quantization_config": "int4"}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json"):
            folders.inspect_folder(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [{"model_type": "llava_next", "text_config": {}, "vision_config": {}}, {"model_type": "llama"}],
)
def test_unsupported_architectures_are_named_with_the_supported(tmp_path, fields):
    with pytest.raises(ValueError, match=rf"{fields['model_type']}.*supported: LLaVA-1\.5"):
        folders.inspect_folder(_config(tmp_path, **fields))


@pytest.mark.parametrize("penalty", ["0", '"x"', "1e400"])
def test_a_penalty_that_is_none_is_refused(tmp_path, penalty):
    testing.tiny_llava(tmp_path)
    (tmp_path / "generation_config.json").write_text(f'{{"repetition_penalty": {penalty}}}')
    with pytest.raises(ValueError, match=r"generation_config.json: repetition_penalty"):
        folders.inspect_folder(tmp_path)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text_config": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}}, "text_config"),
        ({"vision_config": {"model_type": "siglip_vision_model"}}, "vision_config"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    ],
)
def test_parts_of_another_kind_are_refused(tmp_path, fields, field):
    raw = testing.tiny_hf_config()
    for name, value in fields.items():
        raw[name] = {**raw[name], **value} if isinstance(value, dict) else value
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path))}/config.json: {field}"):
        folders.inspect_folder(_config(tmp_path, **raw))


def test_the_clip_folder_of_an_original_model_must_be_given(tmp_path):
    fields = {"model_type": "llava_llama", "mm_projector_type": "mlp2x_gelu"}
    with pytest.raises(FileNotFoundError, match=r"mm_vision_tower .* Pass vision_folder="):
        folders.inspect_folder(_config(tmp_path, **fields))
    tower = _config(tmp_path / "tower", hidden_act="relu")
    with pytest.raises(ValueError, match=f"with the tower of {tower}: .*act is 'relu'"):
        folders.inspect_folder(tmp_path, tower)
    plain = testing.tiny_llava(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"vision_folder is for checkpoints"):
        folders.inspect_folder(plain, plain)


def test_missing_and_damaged_companions_are_named_before_weights_are_read(tmp_path):
    folder = testing.tiny_llava(tmp_path)
    (folder / "model.safetensors").unlink()  # would fail too, but only later
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no preprocessor_config\.json"):
        load_vlm(folder)
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
