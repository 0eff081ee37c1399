"""The command that checks a data folder finds what training would find, and damaged images."""

import json

from PIL import ExifTags, Image

from experiments.shapes import write_world
from stepprune_jax.cli.check import main
from stepprune_jax.data.check import check_folder


def test_a_good_folder_has_counts_and_no_faults(tmp_path, capsys):
    write_world(tmp_path / "w", seed=0, train=3, validation=1, test=2)
    assert main([str(tmp_path / "w")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "train.json: 3 samples" and lines[-1] == "images: 6 images decoded"
    names = [line.partition(":")[0] for line in lines[1:-1]]
    kinds = ("", "_answers")
    assert names == [f"{s}{kind}.jsonl" for s in ("validation", "test") for kind in kinds]


def test_every_kind_of_fault_is_counted_and_the_first_are_shown(tmp_path, capsys):
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
    found = {part.name: part for part in check_folder(folder)}
    assert (found["train.json"].count, len(found["train.json"].faults)) == (1, 3)
    assert (found["images"].count, len(found["images"].faults)) == (1, 2)
    assert "nested too deep" in found["test_answers.jsonl"].faults[0]
    assert main([str(folder), "--faults", "1"]) == 1
    out = capsys.readouterr().out
    assert "train.json: 1 samples, 3 faults\n" in out and "sample 0" in out and "gone" not in out
    assert main([str(folder)]) == 1
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 4 + 6 and r"gone \x1b[31m.png" in out
    (folder / "train.json").write_text("{}")
    assert "expected a JSON list" in check_folder(folder)[0].faults[0]


def test_images_that_only_answers_read_as_they_are_shown_are_listed(tmp_path, capsys):
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
    said = capsys.readouterr().out.splitlines()
    assert "images: 4 images decoded, 2 not for all runs" in said
    assert [x for x in said if "as stored" in x] == [*said[-2:]]
    assert turned.name in said[-2] and clear.name in said[-1]


def test_no_file_is_passed_over(tmp_path, capsys):
    folder = write_world(tmp_path / "w", seed=0, train=1, validation=1, test=1)
    for name in ("train.json", "validation.jsonl"):
        (folder / name).unlink()
    (folder / "train.json").mkdir()
    assert main([str(folder)]) == 1
    said = capsys.readouterr().out
    assert f"no file at {folder}/train.json" in said and f"{folder}/validation.jsonl" in said
