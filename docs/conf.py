"""The documentation as a site: `make docs`.

Pages are Markdown that reads the same on a code host. What differs on a site is done here: links
that lead out of docs/, names that become links to the reference, and equations beside the functions
that compute them.
"""

import os
import re
import tomllib
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = PROJECT["urls"].get("Repository")
# Those of the reference, in the order in which a name is looked for.
PACKAGES = (
    "stepprune_jax.policy",
    "stepprune_jax.pruning",
    "stepprune_jax.inference",
    "stepprune_jax.checkpoints",
    "stepprune_jax.training",
    "stepprune_jax.models.vlm",
    "stepprune_jax.models.decoder",
    "stepprune_jax.models.backbone",
    "stepprune_jax.models.families",
)
# Pages of docs/ that stand for files outside of it.
ELSEWHERE = {
    "index": ("README.md",),
    "contributing": ("CONTRIBUTING.md", "CHANGELOG.md"),
    "results": ("experiments/RESULTS.md",),
}

project = "stepprune_jax"
version = release = PROJECT["version"]
copyright = "The stepprune_jax authors, Apache-2.0"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",  # formulas and diagrams are drawn in the browser, by programs of a CDN
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinxcontrib.mermaid",
]
exclude_patterns = ["_build"]
default_role = "py:obj"  # `name` in a docstring

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = "stepprune_jax"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False

myst_heading_anchors = 4
myst_fence_as_directive = ["math", "mermaid"]  # as code hosts draw them
nb_execution_mode = "off"  # notebooks are kept with their outputs: `make tutorials`
nb_merge_streams = True

mermaid_init_config = {"startOnLoad": False, "flowchart": {"useMaxWidth": False}}
mermaid_fullscreen = False

autosummary_generate = False
add_module_names = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80
napoleon_attr_annotations = False  # the signature has them
napoleon_custom_sections = [("Attributes", "params_style")]

# jaxtyping and unions as they stand in the code.
_SHORTER = (
    (r"~?jaxlib\._jax\.Array|~?jax\.jaxlib\._jax\.Array|~?jax\.Array", "Array"),
    (r"~?numpy\.(\w+)", r"\1"),
    (r"~?jaxtyping\.(\w+)\[", r"\1["),
    (r"(\w+\[)Array(, '[^']*'\]) \| \1ndarray\2", r"\1Array\2"),
    (r"Array \| ndarray \| bool \| number \| bool \| int \| float \| complex", "ArrayLike"),
)


def shorten_types(app, what, name, obj, options, signature, returns):
    """Writes types as they are written in the code."""
    for pattern, short in _SHORTER:
        signature = signature and re.sub(pattern, short, signature)
        returns = returns and re.sub(pattern, short, returns)
    return signature, returns


def skip_fields(app, what, name, obj, skip, options):
    """Leaves fields of named tuples to "Attributes"."""
    return True if type(obj).__name__ == "_tuplegetter" else None


EQUATIONS = {
    number: formula.strip()
    for formula, number in re.findall(
        r"^```math\n(.*?)\\tag\{(\d+)\}\n```",
        (ROOT / "docs" / "paper.md").read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
}
_MARKED = re.compile(r"``.*?``|(`[^`]+`)(\w?)")
_EQUATION = re.compile(r"Eq(s?)\. (\((\d+)\)(-\(\d+\))?)")


def set_equations(app, what, name, obj, options, lines):
    """Sets an equation below the first paragraph that names it, and links to the paper's page."""
    first = lines.index("") if "" in lines else len(lines)
    named = _EQUATION.findall(" ".join(lines[:first]))
    # Without the point, at which a summary would end.
    lines[:] = [_EQUATION.sub(r":doc:`equation\1 \2 </paper>`", line) for line in lines]
    # A plural: letters may not follow a closing mark.
    lines[:] = [_MARKED.sub(lambda m: m[1] + r"\ " + m[2] if m[1] else m[0], s) for s in lines]
    if what == "function" and len(named) == 1 and not named[0][-1]:
        number = named[0][2]
        formula = rf"   {EQUATIONS[number]} \tag{{{number}}}"
        lines[first:first] = ["", ".. math::", "", formula, ""]


def _from_docs(file, text):
    """Makes a file's relative links relative to docs/."""
    folder = (ROOT / file).parent

    def link(match):
        return "](" + os.path.relpath(folder / match[1], ROOT / "docs")

    return re.sub(r"\]\((?!https?:|#)([^)#]+)", link, text)


def read_source(app, docname, source):
    """Shows pages that lie elsewhere above a page's own contents; leads links to the repository."""
    for file in ELSEWHERE.get(docname, ()):
        app.env.note_dependency(str(ROOT / file))
    if docname in ELSEWHERE:
        texts = [_from_docs(file, (ROOT / file).read_text()) for file in ELSEWHERE[docname]]
        _, fence, contents = source[0].partition("```{toctree}")
        source[0] = "\n".join([*texts, fence + contents])
    out = "../" * (docname.count("/") + 1)
    for page, files in ELSEWHERE.items():
        for file in files:
            source[0] = source[0].replace(f"]({out}{file}", f"]({out[3:]}{page}.md")
    if REPOSITORY:
        source[0] = source[0].replace(f"]({out}", f"]({REPOSITORY}/blob/HEAD/")


def find_name(app, env, node, contnode):
    """Finds a public name that is written shorter, or as another package exports it."""
    target = node["reftarget"]
    # A type in a signature has its whole name, and may be of another library.
    foreign = node.get("reftype") != "obj" and not target.startswith("stepprune_jax.")
    if node.get("refdomain") != "py" or foreign:
        return None
    domain, parts = env.get_domain("py"), target.split(".")
    tails = [parts[start:] for start in range(len(parts))]
    # A field is described with its class.
    names = [".".join(name) for tail in tails for name in (tail, tail[:-1]) if name]
    for full in (f"{package}.{name}" for name in names for package in PACKAGES):
        if full in domain.objects:
            where = (env, node["refdoc"], app.builder, "obj", full)
            return domain.resolve_xref(*where, node, contnode)
    return None


class LinkNames(SphinxTransform):
    """Links `names` in Markdown to the reference.

    Words that are also names are linked on the page that maps equations to functions alone.
    """

    default_priority = 400

    def apply(self):
        """Wraps them in references, which stay as they are where nothing is found."""
        if not str(self.document["source"]).endswith((".md", ".ipynb")):
            return
        every = self.env.docname == "paper"
        for literal in list(self.document.findall(nodes.literal)):
            name = literal.astext()
            proper = every or "_" in name.strip("_") or name[:1].isupper()
            linked = isinstance(literal.parent, nodes.reference | pending_xref)
            if linked or not proper or not re.fullmatch(r"[A-Za-z][\w.]*", name):
                continue
            reference = pending_xref(
                "", refdomain="py", reftype="obj", reftarget=name, refdoc=self.env.docname
            )
            reference["refwarn"] = False
            literal.replace_self(reference)
            reference += literal


def setup(app):
    """Connects all of this."""
    app.connect("autodoc-process-signature", shorten_types)
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("autodoc-process-docstring", set_equations, priority=400)  # before napoleon
    app.connect("source-read", read_source)
    app.connect("missing-reference", find_name)
    app.add_transform(LinkNames)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
