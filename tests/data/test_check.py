"""The command `stepprune-check` finds faults of training files, questions and images."""

import json

from PIL import ExifTags, Image

from experiments.shapes import write_world
from stepprune_jax.cli.check import main
from stepprune_jax.data.check import check_folder


def test_a_valid_folder_has_counts_and_no_faults(tmp_path, capsys):
    write_world(tmp_path / "w", seed=0, train=3, validation=1, test=2)
    assert main([str(tmp_path / "w")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "train.json: 3 samples" and lines[-1] == "images: 6 images decoded"
    names = [line.partition(":")[0] for line in lines[1:-1]]
    kinds = ("", "_answers")
    assert names == [f"{s}{kind}.jsonl" for s in ("validation", "test") for kind in kinds]


def test_all_faults_are_counted_and_the_first_ones_are_printed(tmp_path, capsys):
    folder = write_world(tmp_path / "w", seed=0, train=4, validation=0, test=2)
    samples = json.loads((folder / "train.json").read_text())
    samples[0]["image"] = "../out.png"
    samples[1]["image"] = "gone\n\x1b[31m.png"
    samples[2]["conversations"] = "none"
    (folder / "train.json").write_text(json.dumps(samples))
    image = folder / "images" / samples[3]["image"]
    image.write_bytes(image.read_bytes()[:-30])
    Image.new("1", (70_000, 1)).save(next((folder / "images").glob("test_*")))
    (folder / "test_answers.jsonl").write_text("[" * 100_000)
    results = {result.name: result for result in check_folder(folder)}
    assert (results["train.json"].num_valid, len(results["train.json"].faults)) == (1, 3)
    assert (results["images"].num_valid, len(results["images"].faults)) == (1, 2)
    assert "nested too deep" in results["test_answers.jsonl"].faults[0]
    assert main([str(folder), "--faults", "1"]) == 1
    out = capsys.readouterr().out
    assert "train.json: 1 samples, 3 faults\n" in out and "sample 0" in out and "gone" not in out
    assert main([str(folder)]) == 1
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 4 + 6 and r"gone \x1b[31m.png" in out
    (folder / "train.json").write_text("{}")
    assert "expected a JSON list" in check_folder(folder)[0].faults[0]


def test_images_that_viewers_show_differently_are_listed(tmp_path, capsys):
    folder = write_world(tmp_path / "w", seed=0, train=4, validation=0, test=0)
    turned, clear, opaque, plain = sorted((folder / "images").iterdir())
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.open(turned).save(turned, exif=exif)
    exif[ExifTags.Base.Orientation] = 1
    Image.open(plain).save(plain, exif=exif)
    Image.new("RGBA", (4, 4)).save(clear)
    Image.new("RGBA", (4, 4), "red").save(opaque)
    assert main([str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "images: 4 images decoded, 2 not for all runs" in lines
    assert [line for line in lines if "as stored" in line] == [*lines[-2:]]
    assert turned.name in lines[-2] and clear.name in lines[-1]


def test_a_missing_file_is_reported(tmp_path, capsys):
    folder = write_world(tmp_path / "w", seed=0, train=1, validation=1, test=1)
    for name in ("train.json", "validation.jsonl"):
        (folder / name).unlink()
    (folder / "train.json").mkdir()
    assert main([str(folder)]) == 1
    output = capsys.readouterr().out
    assert f"no file at {folder}/train.json" in output and f"{folder}/validation.jsonl" in output


def test_images_and_questions_of_two_splits_are_faults(tmp_path, capsys):
    folder = write_world(tmp_path / "w", seed=0, train=2, validation=2, test=2)
    images = folder / "images"
    lines = (folder / "validation.jsonl").read_text().splitlines()
    validation = [json.loads(line) for line in lines[:2]]
    (folder / "validation.jsonl").write_text("\n".join(lines[:2]))
    samples = json.loads((folder / "train.json").read_text())
    # A copy of a training image has another name. The question about it is another one.
    (images / "copy.png").write_bytes((images / samples[1]["image"]).read_bytes())
    test = [validation[0], {**validation[1], "image": "copy.png", "text": "Is this a copy?"}]
    (folder / "test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in test))
    answers = (folder / "validation_answers.jsonl").read_text().splitlines()[:2]
    for split in ("validation", "test"):
        (folder / f"{split}_answers.jsonl").write_text("\n".join(answers))
    shared = {result.name: result.faults for result in check_folder(folder)}["splits"]
    name, text = validation[0]["image"], validation[0]["text"]
    assert sorted(shared) == sorted(
        [
            f"{images / samples[1]['image']} of train.json and {images / 'copy.png'} of test.jsonl "
            "have the same content",
            f"{images / name} is in validation.jsonl and test.jsonl, with the question {text!r}",
        ]
    )
    assert main([str(folder)]) == 1
    assert ", 2 faults\n" in capsys.readouterr().out


def test_each_line_of_a_question_file_and_an_answer_file_is_checked(tmp_path, capsys):
    folder = write_world(tmp_path / "w", seed=0, train=0, validation=3, test=4)
    lines = (folder / "validation.jsonl").read_text().splitlines()
    (folder / "validation.jsonl").write_text("\n".join([lines[0], "{}", lines[2]]))
    answers = (folder / "test_answers.jsonl").read_text().splitlines()
    (folder / "test_answers.jsonl").write_text("\n".join(answers[:-2]))
    assert main([str(folder)]) == 1
    output = capsys.readouterr().out
    assert "validation.jsonl: 2 questions, 1 fault\n" in output
    assert f"test_answers.jsonl: {len(answers) - 2} answers, 2 faults\n" in output
    assert output.count("no answer for question_id") == 2
