"""The built wheel works in a new environment and an empty folder."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import stepprune_jax
from experiments.shapes import write_world

ROOT = Path(__file__).resolve().parents[1]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"
# Flags that make a training run of the shapes world short.
SMALL = [
    "--config.steps=2",
    "--config.optimizer.warmup=0",
    "--config.batch_size=4",
    "--config.cpu_devices=1",
    "--config.data.stats_images=4",
]


def test_all_files_have_the_version_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"version: {project['version']}\n" in (ROOT / "CITATION.cff").read_text()
    assert stepprune_jax.__version__ in (project["version"], "unknown")


def test_links_of_the_readme_become_links_to_the_repository():
    readme = runpy.run_path(str(ROOT / "setup.py"))["readme"]
    text = readme("https://example.org/stepprune")
    assert "](https://example.org/stepprune/raw/HEAD/docs/images/overlay.png)" in text
    assert "](https://example.org/stepprune/blob/HEAD/docs/two-gpus.md)" in text
    assert "](https://arxiv.org/" in text and not re.search(r"\]\((?!https?:|#)", text)
    assert readme(None) == (ROOT / "README.md").read_text()


def build(kind, source, out):
    command = [sys.executable, "-c", BUILD.format(kind), str(out)]
    process = subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    # Part of setuptools' warning about packages that it would not include.
    assert "would be ignored" not in process.stdout + process.stderr
    (archive,) = out.iterdir()
    return archive


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """Returns the scripts folder of an environment with the wheel.

    The wheel is built from the source distribution.
    """
    work = tmp_path_factory.mktemp("release")
    ignored = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "__pycache__")
    source = shutil.copytree(ROOT, work / "source", ignore=ignored)
    (source / "docs" / "_build").mkdir(exist_ok=True)
    (source / "docs" / "_build" / "index.html").touch()
    (work / "sdist").mkdir(), (work / "wheel").mkdir()
    with tarfile.open(build("sdist", source, work / "sdist")) as archive:
        archive.extractall(work / "unpacked", filter="data")
    (unpacked,) = (work / "unpacked").iterdir()
    for name in ("docs/paper.md", "configs/shapes.py", "tests/conftest.py"):
        assert (unpacked / name).is_file(), name
    assert not (unpacked / "docs" / "_build").exists()
    wheel = build("wheel", unpacked, work / "wheel")
    entries = zipfile.ZipFile(wheel).infolist()
    names = {entry.filename.partition("/")[0] for entry in entries}
    assert {name for name in names if not name.endswith(".dist-info")} == {"stepprune_jax"}
    assets = [x.compress_size for x in entries if x.filename.startswith("stepprune_jax/assets/")]
    assert 1e6 < sum(assets) < 7e6  # models and policies
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", work / "env"], check=True)
    variables = {"base": str(work / "env"), "platbase": str(work / "env")}
    packages = Path(sysconfig.get_path("purelib", vars=variables))
    scripts = Path(sysconfig.get_path("scripts", vars=variables))
    pip = [sys.executable, "-m", "pip", "--python", scripts / "python", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--no-compile", wheel], check=True)
    # Dependencies come from this environment, after the packages of the new one.
    folders = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(folders))
    return scripts


@pytest.mark.slow
def test_the_installed_wheel_trains_evaluates_and_answers(scripts, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def run(name, *arguments, status=0):
        process = subprocess.run(
            [scripts / name, *arguments],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.returncode == status, process.stdout
        return process.stdout

    code = "import stepprune_jax as s; print(s.__file__, s.__version__)"
    file, version = run("python", "-c", code).split()
    assert Path(file).is_relative_to(scripts.parent) and version == stepprune_jax.__version__
    assert Path(file).with_name("py.typed").is_file()

    output = run("stepprune-train", "--config=nonsense", status=2)
    assert output.startswith("stepprune-train: error: ") and "llava7b" in output

    write_world(tmp_path / "data/shapes", seed=0, train=8, validation=2, test=2)
    assert "Done: " in run("stepprune-train", "--config=shapes", *SMALL)
    methods = "--config.eval.methods=all,stepprune"
    output = run("stepprune-eval", "--config=shapes", *SMALL, methods)
    assert output.splitlines()[-1] == "report: runs/shapes/report/index.html"
    page = (tmp_path / "runs" / "shapes" / "report" / "index.html").read_text()
    assert "stepprune-eval --config=shapes" in page

    Image.fromarray(np.zeros((96, 96, 3), np.uint8)).save(tmp_path / "x.png")
    model = Path(file).parent / "assets" / "shapes_llava"
    flags = ["--image=x.png", "--prompt=is there a red circle ?", f"--model={model}", "--json"]
    answer = run("stepprune-generate", *flags, "--policy=runs/shapes/policy.safetensors")
    assert '"kept"' in answer
    output = run("stepprune-export", "runs/shapes", "--out=release")
    assert output.splitlines() == ["release/policy.safetensors", "release/README.md"]
