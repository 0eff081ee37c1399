import json
import shutil

import jax.numpy as jnp
import pytest
import sentencepiece
import transformers
from PIL import Image
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

from stepprune_jax import testing, user_input
from stepprune_jax.checkpoints import folder as folders
from stepprune_jax.checkpoints.load import load_vlm, make_vlm
from stepprune_jax.checkpoints.save import save_vlm
from stepprune_jax.checkpoints.shipped import SHAPES_MODEL
from stepprune_jax.data.encoding import ConversationEncoder
from stepprune_jax.data.prompts import IMAGE_TOKEN, tokenize_with_images


def _write_config(folder, **fields):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_missing_paths_are_not_treated_as_hub_ids(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder owner/name; .* use hub:owner/name;"):
        folders.find_folder("owner/name")
    for name in (tmp_path / "none", "none", ""):
        with pytest.raises(FileNotFoundError, match="no folder"):
            folders.find_folder(name)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(NotADirectoryError, match="give its folder"):
        folders.find_folder(tmp_path / "model.safetensors")


def test_a_local_folder_is_preferred_to_a_shipped_model_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert folders.find_folder("shapes") == SHAPES_MODEL
    (tmp_path / "shapes").mkdir()
    assert folders.find_folder("shapes").resolve() == tmp_path / "shapes"
    with pytest.raises(FileNotFoundError, match=r"no folder shape, .*\(shapes, shapes_qwen\)"):
        folders.find_folder("shape")


def test_folders_without_a_model_configuration_are_refused(tmp_path):
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


def test_an_adapter_in_a_model_folder_is_not_ignored(tmp_path, llava_folder, capsys):
    folder = shutil.copytree(llava_folder, tmp_path / "model")
    # Without adapter_config.json, `transformers` also ignores this file.
    (folder / "adapter_model.safetensors").write_bytes(b"")
    load_vlm(folder, progress=False)
    warning = capsys.readouterr().err
    assert f"{folder / 'adapter_model.safetensors'} is not applied" in warning
    assert warning.count("\n") == 1
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no weights: .*it holds adapter_model\.safetens"):
        load_vlm(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"adapter_config\.json.* not applied: merge it") as error:
        folders.inspect_folder(folder)
    assert "\n" not in str(error.value)


def test_a_configured_name_of_the_weights_is_refused(tmp_path, llava_folder):
    raw = json.loads((llava_folder / "config.json").read_text())
    _write_config(tmp_path, **raw, transformers_weights="other.safetensors")
    with pytest.raises(ValueError, match=r"config\.json: transformers_weights is 'other\.saf"):
        folders.inspect_folder(tmp_path)


def test_the_clip_folder_of_an_original_model_must_be_given(tmp_path, llava_folder):
    fields = {"model_type": "llava_llama", "mm_projector_type": "mlp2x_gelu"}
    with pytest.raises(FileNotFoundError, match=r"mm_vision_tower .* Pass vision_folder="):
        folders.inspect_folder(_write_config(tmp_path, **fields))
    tower = _write_config(tmp_path / "tower", hidden_act="relu")
    with pytest.raises(ValueError, match=f"with the tower of {tower}: .*act is 'relu'"):
        folders.inspect_folder(tmp_path, tower)
    with pytest.raises(ValueError, match=r"vision_folder is for checkpoints"):
        folders.inspect_folder(llava_folder, llava_folder)


def _merge(path, **fields):
    """Changes fields of a JSON file, and creates the file if it does not exist."""
    old_fields = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(old_fields | fields))


@pytest.fixture(params=["llava_folder", "qwen_folder"])
def copy(request, tmp_path):
    """Returns a writable copy of the tiny LLaVA or of the tiny Qwen2.5-VL."""
    return shutil.copytree(request.getfixturevalue(request.param), tmp_path / "copy")


def _read_with_transformers(folder):
    """Returns the stop ids and the repetition penalty that `transformers` reads."""
    has_file = (folder / "generation_config.json").is_file()
    options = {} if has_file else {"config_file_name": "config.json"}
    config = transformers.GenerationConfig.from_pretrained(
        folder, _from_model_config=not has_file, **options
    )
    stop_ids = config.eos_token_id
    stop_ids = (stop_ids,) if isinstance(stop_ids, int) else tuple(stop_ids)
    return stop_ids, config.repetition_penalty or 1.0


@pytest.mark.parametrize("stop_ids", [5, [5, 7]])
def test_stop_ids_and_penalty_are_read_as_by_transformers(copy, tmp_path, stop_ids):
    def read(folder):
        source = folders.inspect_folder(folder)
        settings = source.config.eos_token_ids, source.repetition_penalty
        assert settings == _read_with_transformers(folder)
        return settings

    # Older versions of `transformers` stored these fields in config.json.
    _merge(copy / "config.json", repetition_penalty=1.25, eos_token_id=9)
    assert read(copy) == ((9,), 1.25)
    _merge(copy / "generation_config.json", eos_token_id=stop_ids)
    assert read(copy) == ((5, 7) if isinstance(stop_ids, list) else (5,), 1.0)
    model = load_vlm(copy, dtype=jnp.float32, progress=False)
    save_vlm(model, tmp_path / "saved")
    assert read(tmp_path / "saved") == read(copy)
    # With null, `transformers` would never stop; here config.json then applies.
    (copy / "generation_config.json").write_text('{"eos_token_id": null}')
    assert folders.inspect_folder(copy).config.eos_token_ids == (9,)


# Fields of published folders without a warning: neutral, supported, or about sampling.
SILENT = {
    "do_sample": True,
    "temperature": 1e-6,
    "top_k": 1,
    "max_length": 4096,
    "repetition_penalty": 1.05,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "num_beams": 1,
    "guidance_scale": 1.0,
    "_from_model_config": True,
}
# Fields that change greedy answers of `transformers` and are not supported.
UNSUPPORTED = {
    "suppress_tokens": [7],
    "begin_suppress_tokens": [7],
    "bad_words_ids": [[7]],
    "no_repeat_ngram_size": 2,
    "min_new_tokens": 1,
    "forced_eos_token_id": 0,
    "num_beams": 2,
    "sequence_bias": [[[7], 1.0]],
}


def test_one_warning_lists_all_unsupported_generation_fields(copy, caplog):
    file = copy / "generation_config.json"
    _merge(file, **SILENT)
    folders.inspect_folder(copy)
    assert not caplog.messages
    _merge(file, **UNSUPPORTED)
    folders.inspect_folder(copy)
    (message,) = caplog.messages
    assert message.startswith(f"{file}: ") and all(name in message for name in UNSUPPORTED)
    assert not any(name in message for name in SILENT.keys() - UNSUPPORTED.keys())


# Templates with the language features that the published templates use.
ASSISTANT = "{% generation %}{{ part.text + ' ' }}{% endgeneration %}"
LLAVA_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}"
    "{{ message['role'].upper() + ': ' }}{% endif %}{# images first #}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% if message['role'] == 'assistant' %}" + ASSISTANT + "{% else %}"
    "{{ part['text'] + ' ' }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
QWEN_TEMPLATE = (
    "{% set count = namespace(value=0) %}{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{% set count.value = count.value + 1 %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN_TEMPLATE = (  # of the authors' program for conversations without images
    "{{ bos_token }}A chat between a curious user and an artificial intelligence assistant. The "
    "assistant gives helpful, detailed, and polite answers to the user's questions. {% for message "
    "in messages %}{% if message.role == 'user' %}{{ 'USER: ' + message.content + ' ASSISTANT:' }}"
    "{% else %}{{ ' ' + message.content + eos_token }}{% endif %}{% endfor %}"
)


def _warnings(folder, caplog, template):
    """Returns the warnings about a template in each file where a folder may have it."""
    warnings = []
    for name in ("tokenizer_config", "chat_template.jinja", "chat_template", "processor_config"):
        file = folder / (name if "." in name else f"{name}.json")
        old_contents = file.read_bytes() if file.is_file() else None
        if "." in name:
            file.write_text(template)
        else:
            templates = [
                {"name": "tools", "template": "x"},
                {"name": "default", "template": template},
            ]
            _merge(file, chat_template=templates if name.startswith("tokenizer") else template)
        caplog.clear()
        make_vlm(folders.inspect_folder(folder), {}, folders.load_tokenizer(folder), None)
        warnings += caplog.messages
        assert all(x.startswith(f"{file}: the chat template ") for x in caplog.messages)
        file.unlink() if old_contents is None else file.write_bytes(old_contents)
    return warnings


def test_a_different_chat_template_causes_one_warning(copy, caplog):
    is_qwen = folders.inspect_folder(copy).backbone.name == "qwen2_5_vl"
    published, foreign = (LLAVA_TEMPLATE, QWEN_TEMPLATE)[:: -1 if is_qwen else 1]
    for template in (published, published if is_qwen else PLAIN_TEMPLATE):
        assert not _warnings(copy, caplog, template)
    changed = published.replace("helpful", "curt") if is_qwen else PLAIN_TEMPLATE + "."
    for template in (foreign, changed):
        warnings = _warnings(copy, caplog, template)
        assert len(warnings) == 4
        assert all("writes other prompts and is not" in warning for warning in warnings)
    for template in ("{% if %}", "{{ messages[0].no.more() }}", "{{ raise_exception('no\n') }}"):
        warnings = _warnings(copy, caplog, template)
        assert len(warnings) == 4 and all(" cannot be used (" in warning for warning in warnings)
        assert not any("\n" in warning for warning in warnings)


def _append_end_token(folder, end):
    """Adds a post-processor to a folder's `tokenizer.json` that appends `end` to every text."""
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    number = next(x["id"] for x in raw["added_tokens"] if x["content"] == end)
    piece = {"SpecialToken": {"id": end, "type_id": 0}}
    template = raw["post_processor"] or {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {},
    }
    template["single"].append(piece)
    template["special_tokens"][end] = {"id": end, "ids": [number], "tokens": [end]}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    byte_level["use_regex"] = False
    raw["post_processor"] = {"type": "Sequence", "processors": [byte_level, template]}
    path.write_text(json.dumps(raw))


def _encode(folder):
    """Returns ids of prompts, and encoded training conversations, with 0, 1 and 2 images."""
    source = folders.inspect_folder(folder)
    tokenizer, backbone = folders.load_tokenizer(folder), source.backbone
    prompts = [
        backbone.conversation([backbone.place_images(text, count), "no", "two?"], "Be brief.")
        for text, count in (("red?", 0), ("red?", 1), ("is <image> or <image> red?", 2))
    ]
    encoder = ConversationEncoder(tokenizer, backbone.place_images, backbone.conversation)
    rows = [encoder.encode(["red?", "a dog", "two?", "no"], count) for count in range(3)]
    return [tokenize_with_images(tokenizer, prompt) for prompt in prompts], rows


def test_a_tokenizer_that_appends_an_end_token_causes_one_warning_and_equal_ids(copy, caplog):
    expected = _encode(copy)
    end = "</s>" if "llava" in (copy / "config.json").read_text() else "<|im_end|>"
    _append_end_token(copy, end)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(copy)
    assert reference("red").input_ids[-1] == reference.convert_tokens_to_ids(end)
    assert not caplog.messages
    assert _encode(copy) == expected == _encode(copy)
    (message,) = caplog.messages
    assert message.startswith(f"{copy / 'tokenizer.json'}: ") and f" {end} " in message


def test_a_missing_or_damaged_tokenizer_is_reported_before_weights_are_read(tmp_path):
    folder = testing.tiny_llava(tmp_path)
    (folder / "model.safetensors").unlink()  # a later error, which must not be reported
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": "x"}))
    with pytest.raises(ValueError, match=r"tokenizer, with tokenizer_config\.json"):
        load_vlm(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json could not be read"):
        load_vlm(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer: expected tokenizer\.json"):
        load_vlm(folder)


def test_the_error_for_a_tokenizer_model_says_which_packages_to_install(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    monkeypatch.setattr(folders.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install sentencepiece protobuf"):
        folders.load_tokenizer(tmp_path)


@pytest.fixture(scope="module")
def sentencepiece_folder(tmp_path_factory):
    """Returns a folder with a small `tokenizer.model` like Llama's, as in the original LLaVA."""
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


# A plain text, the pieces around an image, a leading blank, repeated blanks, and bytes.
TEXTS = ("What is this?", "A chat. USER: ", "\nWhat is in this", " What", "a  dog\n\n", "é 狗", "")


# Special tokens in the format of published files. Some set "normalized".
SPECIAL_TOKENS = {
    str(number): {"content": token, "normalized": True, "special": True}
    for number, token in enumerate(("<unk>", "<s>", "</s>"))
}


@pytest.mark.parametrize(
    "fields",
    [{}, {"legacy": True, "add_bos_token": True}, {"added_tokens_decoder": SPECIAL_TOKENS}],
)
def test_a_folder_with_only_a_tokenizer_model_gives_the_ids_of_sentencepiece(
    sentencepiece_folder, fields
):
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (sentencepiece_folder / "tokenizer_config.json").write_text(json.dumps(config | fields))
    # The model type changes the ids of the automatic class of `transformers`, but not ours.
    (sentencepiece_folder / "config.json").write_text(json.dumps({"model_type": "llava"}))
    tokenizer = folders.load_tokenizer(sentencepiece_folder)
    reference = sentencepiece.SentencePieceProcessor(
        model_file=str(sentencepiece_folder / "tokenizer.model")
    )
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        assert ids == [1, *reference.encode(text)], text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    # The legacy rule also inserts a blank after every special token.
    ids = tokenizer("a</s>USER").input_ids
    assert ids == [1, *reference.encode("a"), 2, *reference.encode("USER")]


@pytest.mark.parametrize("legacy", [True, False])
def test_a_tokenizer_model_that_appends_an_end_token_changes_no_prompt(
    sentencepiece_folder, caplog, legacy
):
    prompt, all_ids = "USER: <image>\na<image>dog</s>USER", []
    for appends_end in (False, True):
        fields = {"legacy": legacy, "add_eos_token": appends_end}
        (sentencepiece_folder / "tokenizer_config.json").write_text(json.dumps(fields))
        tokenizer = folders.load_tokenizer(sentencepiece_folder)
        assert (tokenizer("a").input_ids[-1] == 2) == appends_end
        all_ids.append(tokenize_with_images(tokenizer, prompt))
    assert all_ids[0] == all_ids[1] and all_ids[0].count(2) == 1
    user_input.warn_once.cache_clear()
    folders.load_tokenizer(sentencepiece_folder)
    assert f"{sentencepiece_folder / 'tokenizer.model'}: the tokenizer appends </s>" in caplog.text


def test_without_legacy_no_blank_follows_special_tokens(sentencepiece_folder):
    (sentencepiece_folder / "tokenizer_config.json").write_text(json.dumps({"legacy": False}))
    tokenizer = folders.load_tokenizer(sentencepiece_folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer("\nWhat").input_ids)[:3] == [
        *("<s>", "▁", "<0x0A>")
    ]
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("a</s>USER").input_ids)
    assert pieces[:3] == ["<s>", "▁a", "</s>"] and not pieces[3].startswith("▁")


@pytest.mark.parametrize("legacy", [True, False])
def test_the_log_mentions_ids_that_differ_from_the_processor_of_transformers(
    sentencepiece_folder, caplog, legacy
):
    """With `legacy: false`, our ids have another blank after each image."""
    (sentencepiece_folder / "tokenizer_config.json").write_text(json.dumps({"legacy": legacy}))
    with caplog.at_level("INFO"):
        tokenizer = folders.load_tokenizer(sentencepiece_folder)
    file = sentencepiece_folder / "tokenizer.model"
    is_logged = f"{file}: text after an image begins with a blank piece" in caplog.text
    assert is_logged == (not legacy)
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    image_processor = LlavaImageProcessorPil(size={"shortest_edge": 14}, crop_size=14)
    options = {"patch_size": 14, "vision_feature_select_strategy": "default"}
    options["num_additional_image_tokens"] = 1  # each image then has one token
    processor = transformers.LlavaProcessor(image_processor, tokenizer, **options)
    prompt, image = "USER: <image>\n<image>\nred dog", Image.new("RGB", (14, 14))
    (expected,) = processor([image, image], prompt).input_ids
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    ids = [image_token if x == IMAGE_TOKEN else x for x in tokenize_with_images(tokenizer, prompt)]
    if not legacy:
        blank = tokenizer.convert_tokens_to_ids("▁")
        for position in reversed([n for n, x in enumerate(expected) if x == image_token]):
            expected.insert(position + 1, blank)
    assert ids == expected
