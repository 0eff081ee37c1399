import io

import pytest
from benchmark_files import write_lines
from benchmark_folders import SIZES, write_benchmarks
from PIL import Image

from stepprune_jax.benchmarks import BENCHMARKS

SHORT = "\nAnswer the question using a single word or phrase."
LETTER = "\nAnswer with the option's letter from the given choices directly."


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_benchmarks(tmp_path_factory.mktemp("eval") / "eval")


def read(root, name, *arguments, **options):
    return BENCHMARKS[name].read_questions(root, *arguments, **options)


def test_every_benchmark_is_read(root):
    assert {name: len(read(root, name)) for name in SIZES} == SIZES


def test_lines_are_asked_as_they_stand(root):
    first = read(root, "pope")[2]
    assert first.question_id == 10_000_001 and first.fields == {}
    assert first.text == first.prompt == "Is there a circle in the image?" + SHORT
    assert first.image == root / "pope/val2014/COCO_val2014_000000000001.jpg"
    assert read(root, "mme")[8].image.parts[-3:] == ("posters", "images", "1.png")


def test_scienceqa_asks_for_a_letter_and_marks_the_picture_in_the_prompt(root):
    with_picture, without = read(root, "scienceqa")[:2]
    text = "Context: Look.\nWhich one is it?\nA. north\nB. south" + LETTER
    assert with_picture.text == without.text == without.prompt == text
    assert with_picture.prompt == f"<image>\n{text}" and without.image is None
    assert with_picture.image == root / "scienceqa/images/test/11/image.png"


def test_mmbench_has_hint_question_and_options_up_to_the_first_empty_one(root):
    first, second, third, fourth, _ = read(root, "mmbench")
    prompt = "Look at\nthe arrow.\nWhich way?\nA. up\nB. down\nC. None of it"
    assert first.prompt == prompt and first.text == prompt + LETTER
    assert first.fields == {
        "round_id": 0,
        "options": ["up", "down", "None of it"],
        "option_char": ["A", "B", "C"],
    }
    assert second.question_id == 1_000_005
    assert third.prompt == "Which way?\nA. down" and third.fields["option_char"] == ["A"]
    assert fourth.prompt == "Is it?\nA. yes\nB. no"
    assert Image.open(io.BytesIO(first.image)).size == (96, 96)
    assert read(root, "mmbench_cn")[0].text == "Is it?\nA. yes\nB. no\n请直接回答选项字母。"


def test_ocr_tokens_can_be_left_out(root):
    with_ocr, without = read(root, "textvqa")[0], read(root, "textvqa", ocr=False)[0]
    assert with_ocr.text == "What is written?\nReference OCR token: A, 7" + SHORT
    assert without.text == without.prompt == "What is written?" + SHORT
    assert with_ocr.question_id == without.question_id == "00ab"


def test_the_official_questions_of_vqav2_are_asked_as_llavas(root):
    found = read(root, "vqav2", "vqav2/v2_OpenEnded_mscoco_val2014_questions.json")
    assert [q.question_id for q in found] == [70, 71]
    assert found[0].text == "What colour is it?" + SHORT
    assert found[1].image.name == "COCO_val2014_000000000008.jpg"


def test_a_list_of_vqav2_finds_the_images_of_its_split(tmp_path):
    names = {"COCO_val2014_000000000008.jpg": "val2014", "9.jpg": "test2015"}
    for name, split in names.items():
        (tmp_path / "vqav2" / split).mkdir(parents=True)
        (tmp_path / "vqav2" / split / name).write_bytes(b"")
    rows = [{"question_id": n, "image": name, "text": "What?"} for n, name in enumerate(names)]
    write_lines(tmp_path / "vqav2" / "val.jsonl", rows)
    found = read(tmp_path, "vqav2", "vqav2/val.jsonl")
    assert [(q.image.name, q.image.parent.name) for q in found] == list(names.items())
