"""The benchmarks refuse bad flags in one line with status 2, before anything is compiled."""

import json

import pytest

from stepprune_jax.bench import backbone, memory, policy, update
from stepprune_jax.command_line import exit_with
from stepprune_jax.testing import tiny_hf_config

ODD = "is not an integer from"


@pytest.mark.parametrize(
    ("command", "given", "message"),
    [
        (backbone, "--preset huge", "invalid choice: 'huge'"),
        (backbone, "--repeats 0", f"argument --repeats: '0' {ODD} 1"),
        (backbone, "--length 8 x", f"argument --length: 'x' {ODD} 1"),
        (backbone, "--load_gb nan", "--load_gb is nan, expected a number from 0"),
        (backbone, "--peak_tflops -1", "--peak_tflops is -1.0, expected a number above 0"),
        (backbone, "--preset tiny --hidden_size 7", "text: head_dim "),
        (memory, "--batch 99999999999", f"argument --batch: '99999999999' {ODD} 1, below 2**31"),
        (memory, "--model absent.json", "--model 'absent.json' is neither a file nor one of ll"),
        (memory, "--model {file}", "text_config: tie_word_embeddings is 'x', expected true or fal"),
        (memory, "--model {folder}", "not JSON"),
        (update, "--mesh daata=2", "mesh axes ['daata'] are unknown"),
        (update, "--mesh data=x", "mesh 'data=x': expected sizes by axis"),
        (update, "--mesh data=64", "do not fit 8 devices"),
        (update, "--ids -1", f"argument --ids: '-1' {ODD} 1"),
        (update, "--colour red", "unrecognized arguments: --colour red"),
        (policy, "--parts loops", "invalid choice: 'loops'"),
        (policy, "--dtype int8", "invalid choice: 'int8'"),
        (policy, "--steps 3", f"argument --steps: '3' {ODD} 4"),
        (policy, "--kept 289", "expected --kept (289) <= --steps (288) <= --num_tokens (576)"),
        (policy, "--width 1023", "PolicyConfig.num_heads is "),
        (policy, "--parts agreement --run {folder}", "no policy file at "),
    ],
)
def test_bad_flags_are_refused(command, given, message, tmp_path, capsys):
    file, folder = tmp_path / "config.json", tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text("{")
    file.write_text(json.dumps(tiny_hf_config(text={"tie_word_embeddings": "x"})))
    arguments = given.format(file=file, folder=folder).split()
    with pytest.raises(SystemExit) as ended:
        exit_with(command.__name__, lambda: command.main(arguments))
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith(f"{command.__name__}: error: "), said
    assert said.count("\n") == 1 and message in said, said
