"""The page that `help` shows of a policy."""

import inspect
import pydoc
import re

import pytest

import stepprune_jax as sp

METHODS = ("init", "prune", "select", "train_loss", "rloo_loss", "warm_start_loss", "diagnose")


@pytest.mark.parametrize("policy_type", [sp.StepPrune, sp.Policy])
def test_help_begins_with_the_way_from_random_weights_to_a_file(policy_type):
    page = pydoc.plain(pydoc.render_doc(policy_type))
    start = page[: page.index("Method resolution order")]
    verbs = re.findall(r"\b(init|prune|train_loss|save_policy|load_policy)\(", start)
    assert verbs == ["init", "prune", "train_loss", "save_policy", "load_policy"]


@pytest.mark.parametrize("name", [*METHODS, "calibrate", "measure_subset_gain", "with_budget"])
def test_signatures_in_help_are_short(name):
    signature = str(inspect.signature(getattr(sp.StepPrune, name)))
    assert len(signature) < 290 and "jaxlib" not in signature and "Union" not in signature


FUNCTIONS = [name for name in sp.__all__ if inspect.isroutine(getattr(sp, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_of_functions_have_short_names_of_types(name):
    signature = str(inspect.signature(getattr(sp, name)))
    assert not re.search("jaxlib|Union| at 0x", signature)


@pytest.mark.parametrize("policy_type", [sp.StepPrune, sp.Policy])
def test_the_whole_page_of_a_policy_has_short_names_of_types(policy_type):
    page = pydoc.plain(pydoc.render_doc(policy_type))
    assert not re.search("jaxlib|jaxtyping|Union", page)


def test_the_page_names_the_functions_of_a_decoder():
    assert repr(sp.POINTER).startswith("DecoderFns(pointer_init, pointer_step, ")
