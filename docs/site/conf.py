"""The site: README, docs and the public names, by `sphinx-build` (see `.ci/site`).

Sphinx reads the pages where they lie, from the root of the repository. Files that pages link to and
that are no pages, such as modules, are copied to the site.
"""

import re
from pathlib import Path

from hicache import __version__

ROOT = Path(__file__).parents[2]

project, author, copyright = "hicache", "The hicache authors", "The hicache authors, Apache-2.0"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["docs/site/*.md", "docs/*.md", "experiments/results/*.md", "*.md"]
nitpicky = False

myst_heading_anchors = 4  # as GitHub makes them
myst_enable_extensions = ["colon_fence"]
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"

html_theme = "furo"
html_title = f"hicache {version}"
html_show_sphinx = False
html_additional_pages = {"index": "redirect.html"}
templates_path = ["_templates"]


def setup(app):
    app.connect("source-read", prepare)


def prepare(app, page, source):
    """Drop the links to folders, which a site has no page for; the first page gets the contents."""
    folder = (ROOT / page).parent

    def kept(link):
        return link[1] if (folder / link[2]).is_dir() else link[0]

    source[0] = re.sub(r"\[([^]]*)\]\(([^)#:]+)\)", kept, source[0])
    if page == root_doc:
        source[0] += "\n" + (ROOT / "docs/site/contents.txt").read_text()
