"""Records the tokens that the program of MMTok's authors keeps.

The program (https://github.com/Ironieser/MMTok, Apache-2.0) is not a part of this project. With a
checkout of it, and a package or a stand-in for its import `loguru`, this command prints a new
record:

    python tests/support/mmtok_authors.py CHECKOUT > tests/support/recorded/mmtok.json
"""

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import NamedTuple

import numpy as np
import transformers

from stepprune_jax import testing

# Wide embeddings have small cosines, so several tokens cover a word, as in a real model.
WIDTH, TOWER_WIDTH = 256, 20
INSTRUCTION = "\nAnswer the question using a single word or phrase."
# Questions with stop words, punctuation, an instruction, and nothing but stop words. In the longest
# question a word weighs as little as a token, so the choice depends on the weights of both.
QUESTIONS = (
    "What is in this picture?",
    "Is the red dog in a chat or no",
    f"The user's questions: two, yes!{INSTRUCTION}",
    "What is it?",
    "USER asks: a polite, helpful assistant and an intelligence?",
    "Which curious chat gives detailed answers between two users? Red dogs, artificial pictures, "
    "yes: seven zebras jump over lazy brown foxes, quick green boxes hold milk, eleven birds sing, "
    "no knight walks under bridges near cold rivers, grey clouds drift above tiny villages.",
)


class Case(NamedTuple):
    """An input of the program.

    Attributes:
        family: "llava"; "tiles" for LLaVA-NeXT; or "qwen" for Qwen2.5-VL.
        question: the user's question.
        num_tokens: number of tokens of the image, or of each of three tiles.
        seed: seed of the image's tokens.
    """

    family: str
    question: str
    num_tokens: int
    seed: int

    @property
    def budgets(self) -> tuple[int, int, int]:
        """Three numbers of tokens to keep of the image, or of each tile."""
        return self.num_tokens // 8, self.num_tokens // 4, self.num_tokens // 2


CASES = (
    *(Case("llava", question, 80 - 9 * i, i) for i, question in enumerate(QUESTIONS)),
    Case("llava", QUESTIONS[-1], 576, 6),
    *(Case("qwen", question, 40 + 7 * i, 7 + i) for i, question in enumerate(QUESTIONS)),
    *(Case("tiles", question, 36, 13 + i) for i, question in enumerate(QUESTIONS)),
)


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Returns the tokenizer of all cases."""
    tokenizer = testing.tiny_tokenizer()
    tokenizer.pad_token = "</s>"
    return tokenizer


def make_table(num_ids: int) -> np.ndarray:
    """Returns the word embeddings of all cases."""
    return np.random.default_rng(100).standard_normal((num_ids, WIDTH), np.float32)


def make_tokens(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Returns projected tokens [t, n, e] and features in the tower [t, n, d] of t tiles."""
    random = np.random.default_rng(case.seed)
    shape = 3 if case.family == "tiles" else 1, case.num_tokens
    tokens = random.standard_normal((*shape, WIDTH), np.float32)
    return tokens, random.standard_normal((*shape, TOWER_WIDTH), np.float32)


def main() -> None:
    """Runs the program, and prints its commit, its stop words and its choices."""
    import torch

    checkout = Path(sys.argv[1])
    # The package's own __init__ needs LLaVA, which the selection does not.
    sys.modules["mmtok"] = package = types.ModuleType("mmtok")
    package.__path__ = [str(checkout / "mmtok")]
    from mmtok.core.mmtok_core import MMTokCore
    from mmtok.core.text_processor import NON_VISUAL_WORDS

    tokenizer = make_tokenizer()
    table = torch.tensor(make_table(len(tokenizer)))
    choices = []
    for case in CASES:
        tokens, features = map(torch.tensor, make_tokens(case))
        chosen_of_budgets = []
        for budget in case.budgets:
            temperature = 0.01 if case.family == "qwen" else 0.02
            core = MMTokCore(budget, softmax_tv_temperature=temperature, device="cpu")
            core._language_tokenizer = tokenizer
            core._main_model_embed_tokens = torch.nn.Embedding.from_pretrained(table)
            if case.family == "qwen":
                arguments = tokens[0], features[0], case.question, budget
                chosen = [core.apply_selection_preprocess_qwen(*arguments)[0]]
            else:
                class_tokens = torch.full((len(features), 1, TOWER_WIDTH), 3.0)
                with_class_token = torch.cat([class_tokens, features], dim=1)
                arguments = tokens, with_class_token, None, case.question
                chosen = core.apply_selection(*arguments)[1]
            chosen_of_budgets.append(chosen)
        choices.append(chosen_of_budgets)
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()
    record = {"commit": commit, "stop_words": sorted(NON_VISUAL_WORDS), "choices": choices}
    print(json.dumps(record))


if __name__ == "__main__":
    main()
