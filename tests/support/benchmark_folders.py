"""Writes small data sets of all public benchmarks in LLaVA's layout, with images of shapes."""

import base64
import itertools
import shutil

from benchmark_files import write_json, write_lines

from experiments.shapes import write_world
from stepprune_jax.benchmarks.mme import COGNITION, PERCEPTION

SHORT = "\nAnswer the question using a single word or phrase."
# Tasks of MME with separate folders for images and texts.
NESTED = ("artwork", "celebrity", "landmark", "posters", "scene")
# Number of questions of each benchmark.
SIZES = {"gqa": 3, "mmbench": 5, "mmbench_cn": 2, "mme": 28, "pope": 6, "scienceqa": 4, "vqav2": 3}
SIZES["textvqa"] = 4


def write_benchmarks(root):
    """Writes the data sets of all benchmarks, and returns the root."""
    world = write_world(root.parent / "world", seed=5, train=0, validation=0, test=4)
    images = itertools.cycle(sorted((world / "images").glob("*.png")))

    def put(path):
        """Copies the next image to a path that does not exist yet, and returns the path."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file():
            shutil.copy(next(images), path)
        return path

    for write in (write_gqa, write_vqav2, write_textvqa, write_pope, write_mme, write_scienceqa):
        write(root, put)
    write_mmbench(root, images)
    return root


def people(*texts):
    """Returns the answers of ten people in VQAv2's format, which repeat these texts."""
    return [{"answer": text} for text in (texts * 10)[:10]]


def list_line(question_id, image, text, category="default"):
    """Returns a line of one of LLaVA's lists of questions."""
    return {"question_id": question_id, "image": image, "text": text, "category": category}


def write_gqa(root, put):
    rows, official = [], {}
    for number, text in enumerate(("Is it red?", "What shape is it?", "Is it a circle?")):
        name = put(root / "gqa/data/images" / f"n{number % 2}.jpg").name
        rows.append(list_line(f"20{number}", name, text + SHORT))
        official[f"20{number}"] = {
            "question": text,
            "imageId": name[:-4],
            "answer": "yes",
            "isBalanced": True,
            "types": {"structural": "verify", "semantic": "attr"},
            "semantic": [],
            "groups": {"global": None, "local": "x"},
        }
    write_lines(root / "gqa/llava_gqa_testdev_balanced.jsonl", rows)
    write_json(root / "gqa/data/testdev_balanced_questions.json", official)


def write_vqav2(root, put):
    lines = [
        list_line(900 + n, f"COCO_test2015_{n:012d}.jpg", f"Is it {n}?{SHORT}") for n in range(5)
    ]
    for line in lines[1:4]:
        put(root / "vqav2/test2015" / line["image"])
    write_lines(root / "vqav2/llava_vqav2_mscoco_test2015.jsonl", lines)
    write_lines(root / "vqav2/llava_vqav2_mscoco_test-dev2015.jsonl", lines[1:4])
    questions = [
        {"image_id": 7 + n, "question": "What colour is it?", "question_id": 70 + n}
        for n in range(2)
    ]
    for question in questions:
        put(root / "vqav2/val2014" / f"COCO_val2014_{question['image_id']:012d}.jpg")
    write_json(
        root / "vqav2/v2_OpenEnded_mscoco_val2014_questions.json",
        {"data_subtype": "val2014", "questions": questions},
    )
    types = {"question_type": "what color", "answer_type": "other"}
    annotations = [
        {"question_id": question["question_id"], "answers": people("red", "blue"), **types}
        for question in questions
    ]
    write_json(root / "vqav2/v2_mscoco_val2014_annotations.json", {"annotations": annotations})


def write_textvqa(root, put):
    """Writes two questions about each of two images. The question ids are the image ids."""
    rows, data = [], []
    for image, text in itertools.product(("00ab", "00cd"), ("What is written?", "What number?")):
        put(root / "textvqa/train_images" / f"{image}.jpg")
        text_ocr = f"{text}\nReference OCR token: A, 7{SHORT}"
        rows.append(list_line(image, f"{image}.jpg", text_ocr))
        data.append({"image_id": image, "question": text, "answers": ["seven", "7"] * 5})
    write_lines(root / "textvqa/llava_textvqa_val_v051_ocr.jsonl", rows)
    write_json(root / "textvqa/TextVQA_0.5.1_val.json", {"data": data})


def write_pope(root, put):
    rows = []
    for start, split in ((0, "adversarial"), (10**7, "random"), (2 * 10**7, "popular")):
        labels = []
        for number, (thing, label) in enumerate((("circle", "yes"), ("kite", "no")), start=1):
            image = put(root / "pope/val2014" / f"COCO_val2014_{number:012d}.jpg").name
            text = f"Is there a {thing} in the image?"
            rows.append(list_line(start + number, image, text + SHORT, split))
            labels.append({"question_id": number, "image": image, "text": text, "label": label})
        write_lines(root / f"pope/coco/coco_pope_{split}.json", labels)
    write_lines(root / "pope/llava_pope_test.jsonl", rows)


def write_mme(root, put):
    release, rows = root / "MME/MME_Benchmark_release_version", []
    for task in (*PERCEPTION, *COGNITION):
        inner = f"{task}/images" if task in NESTED else task
        put(release / inner / "1.png")
        texts = release / task / ("questions_answers_YN" if task in NESTED else "")
        texts.mkdir(parents=True, exist_ok=True)
        questions = {f"Is this {task}?": "Yes", "Is this a kite?": "No"}
        lines = [f"{text} Please answer yes or no.\t{truth}" for text, truth in questions.items()]
        (texts / "1.txt").write_text("\n".join(lines))
        name = f"{inner}/1.png"
        rows += [list_line(name, name, text + SHORT, task) for text in questions]
    write_lines(root / "MME/llava_mme.jsonl", rows)


def write_scienceqa(root, put):
    """Writes four questions. The second and the fourth have no image."""
    problems, rows = {}, []
    for number, has_image in enumerate((True, False, True, False)):
        name = str(11 + number)
        text = "Context: Look.\nWhich one is it?\nA. north\nB. south"
        row = {"id": name, "conversations": [{"from": "human", "value": text}]}
        if has_image:
            put(root / "scienceqa/images/test" / name / "image.png")
            row["image"] = f"{name}/image.png"
            row["conversations"][0]["value"] = f"<image>\n{text}"
        problems[name] = {
            "choices": ["north", "south"],
            "answer": 1,
            "image": "image.png" if has_image else None,
        }
        rows.append(row)
    write_json(root / "scienceqa/llava_test_CQM-A.json", rows)
    write_json(root / "scienceqa/problems.json", problems)
    write_json(root / "scienceqa/pid_splits.json", {"test": list(problems)})


def write_mmbench(root, images):
    """Writes a question with three rotations and one with two.

    The Chinese file has only the second question.
    """
    columns = ["index", "question", "hint", "A", "B", "C", "D", "answer", "category", "image"]
    columns += ["source", "l2-category", "comment", "split"]
    questions = [
        (5, "Which way?", "Look at\nthe arrow.", ("up", "down", "None of it", ""), "A"),
        (1000005, "Which way?", "Look at\nthe arrow.", ("None of it", "up", "down", ""), "B"),
        (2000005, "Which way?", "", ("down", "None", "up", ""), "C"),
        (6, "Is it?", "nan", ("yes", "no", "", ""), "A"),
        (1000006, "Is it?", "", ("no", "yes", "", ""), "B"),
    ]
    rows = []
    for index, question, hint, options, letter in questions:
        image = base64.b64encode(next(images).read_bytes()).decode()
        hint_cell = f'"{hint}"' if "\n" in hint else hint
        last_cells = (letter, "north", image, "made-up", "fine", "", "dev")
        rows.append("\t".join((str(index), question, hint_cell, *options, *last_cells)))
    for folder, name, file_rows in (
        ("mmbench", "mmbench_dev_20230712.tsv", rows),
        ("mmbench", "mmbench_dev_cn_20231003.tsv", rows[3:]),
    ):
        (root / folder).mkdir(parents=True, exist_ok=True)
        text = "\n".join(["\t".join(columns), *file_rows]) + "\n"
        (root / folder / name).write_text(text, encoding="utf-8")
