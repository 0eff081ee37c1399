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


def _merge(path, **fields):
    """Changes fields of a JSON file, which need not exist."""
    written = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(written | fields))


@pytest.fixture(params=["llava_folder", "qwen_folder"])
def copy(request, tmp_path):
    """A folder of either family, to write to."""
    return shutil.copytree(request.getfixturevalue(request.param), tmp_path / "copy")


def _generation(folder):
    """What `transformers` generates with, by the rule of its `from_pretrained`."""
    read, own = transformers.GenerationConfig.from_pretrained, folder / "generation_config.json"
    legacy = {} if own.is_file() else {"config_file_name": "config.json"}
    found = read(folder, _from_model_config=not own.is_file(), **legacy)
    ends = found.eos_token_id
    return (ends,) if isinstance(ends, int) else tuple(ends), found.repetition_penalty or 1.0


@pytest.mark.parametrize("ends", [5, [5, 7]])
def test_stop_ids_are_those_that_transformers_reads(copy, tmp_path, ends):
    def agrees(folder):
        source = folders.inspect_folder(folder)
        found = source.config.eos_token_ids, source.repetition_penalty
        assert found == _generation(folder)
        return found

    _merge(copy / "config.json", repetition_penalty=1.25, eos_token_id=9)
    assert agrees(copy) == ((9,), 1.25)  # where older versions kept such fields
    _merge(copy / "generation_config.json", eos_token_id=ends)
    assert agrees(copy) == ((5, 7) if isinstance(ends, list) else (5,), 1.0)
    model = load_vlm(copy, dtype=jnp.float32, progress=False)
    save_vlm(model, tmp_path / "saved")
    assert agrees(tmp_path / "saved") == agrees(copy)
    # A file that says nothing of them would let answers run on there.
    (copy / "generation_config.json").write_text('{"eos_token_id": null}')
    assert folders.inspect_folder(copy).config.eos_token_ids == (9,)


# Neutral, followed, of sampling, or of no consequence: as in the published folders.
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
LOUD = {
    "suppress_tokens": [7],
    "begin_suppress_tokens": [7],
    "bad_words_ids": [[7]],
    "no_repeat_ngram_size": 2,
    "min_new_tokens": 1,
    "forced_eos_token_id": 0,
    "num_beams": 2,
    "sequence_bias": [[[7], 1.0]],
}


def test_what_of_the_generation_config_is_not_followed_is_named_once(copy, caplog):
    own = copy / "generation_config.json"
    _merge(own, **SILENT)
    folders.inspect_folder(copy)
    assert not caplog.messages
    _merge(own, **LOUD)
    folders.inspect_folder(copy)
    (message,) = caplog.messages
    assert message.startswith(f"{own}: ") and all(name in message for name in LOUD)
    assert not any(name in message for name in SILENT.keys() - LOUD.keys())


# As the published templates are, with what they use of the language of templates.
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
PLAIN_TEMPLATE = (  # the authors' program for text alone
    "{{ bos_token }}A chat between a curious user and an artificial intelligence assistant. The "
    "assistant gives helpful, detailed, and polite answers to the user's questions. {% for message "
    "in messages %}{% if message.role == 'user' %}{{ 'USER: ' + message.content + ' ASSISTANT:' }}"
    "{% else %}{{ ' ' + message.content + eos_token }}{% endif %}{% endfor %}"
)


def _said(folder, caplog, template):
    """What is said of a template in each of the files where a folder may have it."""
    said = []
    for name in ("tokenizer_config", "chat_template.jinja", "chat_template", "processor_config"):
        file = folder / (name if "." in name else f"{name}.json")
        before = file.read_bytes() if file.is_file() else None
        if "." in name:
            file.write_text(template)
        else:
            several = [
                {"name": "tools", "template": "x"},
                {"name": "default", "template": template},
            ]
            _merge(file, chat_template=several if name.startswith("tokenizer") else template)
        caplog.clear()
        make_vlm(folders.inspect_folder(folder), {}, folders.load_tokenizer(folder), None)
        said += caplog.messages
        assert all(x.startswith(f"{file}: the chat template ") for x in caplog.messages)
        file.unlink() if before is None else file.write_bytes(before)
    return said


def test_a_chat_template_that_is_not_followed_is_named_once(copy, caplog):
    qwen = folders.inspect_folder(copy).backbone.name == "qwen2_5_vl"
    own, other = (LLAVA_TEMPLATE, QWEN_TEMPLATE)[:: -1 if qwen else 1]
    for known in (own, own if qwen else PLAIN_TEMPLATE):
        assert not _said(copy, caplog, known)
    for another in (other, own.replace("helpful", "curt") if qwen else PLAIN_TEMPLATE + "."):
        said = _said(copy, caplog, another)
        assert len(said) == 4 and all("writes other prompts and is not" in line for line in said)
    for broken in ("{% if %}", "{{ messages[0].no.more() }}", "{{ raise_exception('no\n') }}"):
        said = _said(copy, caplog, broken)
        assert len(said) == 4 and all(" cannot be used (" in line for line in said)
        assert not any("\n" in line for line in said)


def _ends_every_text(folder, end):
    """Gives a folder's `tokenizer.json` a post-processor that appends an end token."""
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


def _encoded(folder):
    """The ids of prompts with none, one and two images, and the row of a training sample."""
    source = folders.inspect_folder(folder)
    tokenizer, backbone = folders.load_tokenizer(folder), source.backbone
    prompts = [
        backbone.conversation([backbone.place_images(text, count), "no", "two?"], "Be brief.")
        for text, count in (("red?", 0), ("red?", 1), ("is <image> or <image> red?", 2))
    ]
    encoder = ConversationEncoder(tokenizer, backbone.place_images, backbone.conversation)
    rows = [encoder.encode(["red?", "a dog", "two?", "no"], count) for count in range(3)]
    return [tokenize_with_images(tokenizer, prompt) for prompt in prompts], rows


def test_a_tokenizer_that_ends_every_text_changes_no_prompt_and_is_named_once(copy, caplog):
    expected = _encoded(copy)
    end = "</s>" if "llava" in (copy / "config.json").read_text() else "<|im_end|>"
    _ends_every_text(copy, end)
    raw = transformers.PreTrainedTokenizerFast.from_pretrained(copy)
    assert raw("red").input_ids[-1] == raw.convert_tokens_to_ids(end)
    assert not caplog.messages
    assert _encoded(copy) == expected == _encoded(copy)
    (message,) = caplog.messages
    assert message.startswith(f"{copy / 'tokenizer.json'}: ") and f" {end} " in message


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


# As published files list their special tokens: some with "normalized", some without.
LISTED = {
    str(number): {"content": token, "normalized": True, "special": True}
    for number, token in enumerate(("<unk>", "<s>", "</s>"))
}


@pytest.mark.parametrize(
    "fields", [{}, {"legacy": True, "add_bos_token": True}, {"added_tokens_decoder": LISTED}]
)
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


@pytest.mark.parametrize("legacy", [True, False])
def test_a_tokenizer_model_that_ends_every_text_changes_no_prompt(
    sentencepiece_folder, caplog, legacy
):
    prompt, all_ids = "USER: <image>\na<image>dog</s>USER", []
    for ends in (False, True):
        fields = {"legacy": legacy, "add_eos_token": ends}
        (sentencepiece_folder / "tokenizer_config.json").write_text(json.dumps(fields))
        tokenizer = folders.load_tokenizer(sentencepiece_folder)
        assert (tokenizer("a").input_ids[-1] == 2) == ends
        all_ids.append(tokenize_with_images(tokenizer, prompt))
    assert all_ids[0] == all_ids[1] and all_ids[0].count(2) == 1
    user_input.warn_once.cache_clear()
    folders.load_tokenizer(sentencepiece_folder)
    assert f"{sentencepiece_folder / 'tokenizer.model'}: the tokenizer appends </s>" in caplog.text


def test_the_newer_rule_puts_no_blank_behind_special_tokens(sentencepiece_folder):
    (sentencepiece_folder / "tokenizer_config.json").write_text(json.dumps({"legacy": False}))
    tokenizer = folders.load_tokenizer(sentencepiece_folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer("\nWhat").input_ids)[:3] == [
        *("<s>", "▁", "<0x0A>")
    ]
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("a</s>USER").input_ids)
    assert pieces[:3] == ["<s>", "▁a", "</s>"] and not pieces[3].startswith("▁")


@pytest.mark.parametrize("legacy", [True, False])
def test_the_log_says_where_ids_differ_from_the_processor_of_transformers(
    sentencepiece_folder, caplog, legacy
):
    """Expects one more blank piece after each image, with a tokenizer of `legacy: false`."""
    (sentencepiece_folder / "tokenizer_config.json").write_text(json.dumps({"legacy": legacy}))
    with caplog.at_level("INFO"):
        tokenizer = folders.load_tokenizer(sentencepiece_folder)
    file = sentencepiece_folder / "tokenizer.model"
    named = f"{file}: text after an image begins with a blank piece" in caplog.text
    assert named == (not legacy)
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    images = LlavaImageProcessorPil(size={"shortest_edge": 14}, crop_size=14)
    one_token = {"patch_size": 14, "vision_feature_select_strategy": "default"}
    one_token["num_additional_image_tokens"] = 1
    processor = transformers.LlavaProcessor(images, tokenizer, **one_token)
    prompt, image = "USER: <image>\n<image>\nred dog", Image.new("RGB", (14, 14))
    (theirs,) = processor([image, image], prompt).input_ids
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    ours = [image_token if x == IMAGE_TOKEN else x for x in tokenize_with_images(tokenizer, prompt)]
    if not legacy:
        blank = tokenizer.convert_tokens_to_ids("▁")
        for place in reversed([n for n, x in enumerate(theirs) if x == image_token]):
            theirs.insert(place + 1, blank)
    assert ours == theirs
