"""The package and its commands work without torch."""

from processes import run_python
from shards import to_pickles

from stepprune_jax import testing

# Makes imports of torch fail, and `find_spec` return None for it.
_HIDE_TORCH = """
import importlib.machinery, sys
find = importlib.machinery.PathFinder.find_spec

def find_spec(name, path=None, target=None):
    hidden = name.partition(".")[0] in ("torch", "torchvision", "torchaudio")
    return None if hidden else find(name, path, target)

importlib.machinery.PathFinder.find_spec = staticmethod(find_spec)
"""

_USE = """
import pkgutil, importlib, stepprune_jax
other = "stepprune_jax.integrations.lmms_eval"  # needs lmms-eval, which needs torch
page = "stepprune_jax.demo.app"  # needs Gradio, which may not be installed, either
plugin = "stepprune_jax.integrations.vllm_plugin."  # runs inside vLLM, which needs torch
for module in pkgutil.walk_packages(stepprune_jax.__path__, "stepprune_jax."):
    if module.name not in (other, page) and not module.name.startswith(plugin):
        importlib.import_module(module.name)
try:
    importlib.import_module(other)
except ImportError as error:
    assert "pip install" in str(error) and "[lmms-eval]" in str(error), error
else:
    raise AssertionError("imported lmms-eval without torch")
from PIL import Image
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.checkpoints.save import save_vlm

model = load_vlm(sys.argv[1], progress=False)
save_vlm(model, sys.argv[2])
from stepprune_jax.inference import RunOptions, generate
options = RunOptions(2)
(answer,) = generate(model, ["a dog?"], [Image.new("L", (30, 20))], options=options)
assert answer.kept == 9 and 1 <= len(answer.token_ids) <= 2
assert "torch" not in sys.modules
"""

# Runs last, because it ends the process.
_COMMAND = """
from stepprune_jax.cli.command_line import exit_with
from stepprune_jax.cli.generate import main
exit_with("stepprune-generate", lambda: main([f"--model={sys.argv[1]}", "--prompt=a <image>"]))
"""


def test_the_package_and_its_commands_work_without_torch(tmp_path):
    folder = testing.tiny_llava(tmp_path / "model")
    to_pickles(folder)
    script = _HIDE_TORCH + _USE + _COMMAND
    process = run_python("-c", script, folder, tmp_path / "saved")
    assert process.returncode == 2, process.stderr
    last_line = process.stderr.splitlines()[-1]
    assert last_line.startswith("stepprune-generate: error:"), process.stderr
