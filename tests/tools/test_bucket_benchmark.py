"""The benchmark of padded sizes counts the programs of streams of images of all sizes."""

from tools.bench import buckets


def test_the_librarys_sizes_need_few_programs(capsys):
    rows = ["all", "random@2/9", "stepprune@adaptive"]
    flags = ["--models", "qwen3-vl-8b", "--images", "60", "--seeds", "2", "--rows", *rows]
    buckets.main(flags)
    printed = capsys.readouterr().out
    lines = [line.split(" | ") for line in printed.splitlines()]
    joint = [cells for cells in lines if cells[0] == "| the library's"]
    separate = [cells for cells in lines if cells[0] == "| image and row apart"]
    assert len(joint) == len(separate) == len(rows)
    for limit, cells, cells_before in zip((14, 14, 18), joint, separate, strict=True):
        programs, programs_before = (
            int(line[1].split(" to ")[1]) for line in (cells, cells_before)
        )
        assert programs <= limit < programs_before
        assert float(cells[3].rstrip("%")) < 40 and float(cells[4].rstrip(" |").rstrip("%")) < 15
