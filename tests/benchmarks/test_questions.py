import io

import pytest
from benchmark_files import write_lines
from benchmark_folders import SIZES, write_benchmarks
from PIL import Image

from stepprune_jax.benchmarks import BENCHMARKS
from stepprune_jax.benchmarks.questions import BenchmarkQuestion, check_images

SHORT = "\nAnswer the question using a single word or phrase."
LETTER = "\nAnswer with the option's letter from the given choices directly."


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_benchmarks(tmp_path_factory.mktemp("eval") / "eval")


def read(root, name, *arguments, **options):
    return BENCHMARKS[name].read_questions(root, *arguments, **options)


def test_the_questions_of_every_benchmark_are_read(root):
    assert {name: len(read(root, name)) for name in SIZES} == SIZES


def test_texts_of_question_files_are_used_unchanged(root):
    first = read(root, "pope")[2]
    assert first.question_id == 10_000_001 and first.fields == {}
    assert first.text == first.prompt == "Is there a circle in the image?" + SHORT
    assert first.image == root / "pope/val2014/COCO_val2014_000000000001.jpg"
    assert read(root, "mme")[8].image.parts[-3:] == ("posters", "images", "1.png")


def test_an_image_name_that_no_file_can_have_is_a_missing_image(tmp_path):
    question = BenchmarkQuestion(1, "What?", "What?", tmp_path / ("x" * 5000))
    with pytest.raises(FileNotFoundError, match=r"1 of 1 images are missing.*: get them"):
        check_images([question], "the site")


def test_scienceqa_asks_for_a_letter_and_marks_the_image_in_the_prompt(root):
    with_image, without_image = read(root, "scienceqa")[:2]
    text = "Context: Look.\nWhich one is it?\nA. north\nB. south" + LETTER
    assert with_image.text == without_image.text == without_image.prompt == text
    assert with_image.prompt == f"<image>\n{text}" and without_image.image is None
    assert with_image.image == root / "scienceqa/images/test/11/image.png"


def test_mmbench_shows_hint_question_and_options_up_to_the_first_empty_one(root):
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


def test_ocr_tokens_can_be_removed(root):
    with_ocr, without_ocr = read(root, "textvqa")[0], read(root, "textvqa", ocr=False)[0]
    assert with_ocr.text == "What is written?\nReference OCR token: A, 7" + SHORT
    assert without_ocr.text == without_ocr.prompt == "What is written?" + SHORT
    assert with_ocr.question_id == without_ocr.question_id == "00ab"


def test_official_questions_of_vqav2_get_llavas_request(root):
    questions = read(root, "vqav2", "vqav2/v2_OpenEnded_mscoco_val2014_questions.json")
    assert [question.question_id for question in questions] == [70, 71]
    assert questions[0].text == "What colour is it?" + SHORT
    assert questions[1].image.name == "COCO_val2014_000000000008.jpg"


def test_the_name_of_a_vqav2_image_determines_its_folder(tmp_path):
    names = {"COCO_val2014_000000000008.jpg": "val2014", "9.jpg": "test2015"}
    for name, split in names.items():
        (tmp_path / "vqav2" / split).mkdir(parents=True)
        (tmp_path / "vqav2" / split / name).write_bytes(b"")
    rows = [{"question_id": n, "image": name, "text": "What?"} for n, name in enumerate(names)]
    write_lines(tmp_path / "vqav2" / "val.jsonl", rows)
    questions = read(tmp_path, "vqav2", "vqav2/val.jsonl")
    paths = [question.image for question in questions]
    assert [(path.name, path.parent.name) for path in paths] == list(names.items())
