"""The book in another language: BOOK_LANGUAGE=de takes the texts of book/locale/de in the place of the English ones.

Sphinx reads each text of a page, such as a paragraph, looks it up in the page's catalogue, and shows the translation if
there is one. A text without a translation stays English, and so does one whose English text has changed since.
"""

import os
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.transforms import i18n

parse_translation = i18n.publish_msgstr


def parse_markdown(app: Sphinx, source: str, source_path: str, *args: Any) -> nodes.Element:
    """Parse a translated text as Markdown, also if it comes from a notebook.

    Sphinx chooses the parser by the suffix of the page, and would take the text for a whole notebook, which is JSON.
    """
    return parse_translation(app, source, source_path.replace(".ipynb", ".md"), *args)


def choose_language(app: Sphinx, config: Config) -> None:
    """Set the book's language to that of BOOK_LANGUAGE, if there is one. Sphinx then looks for its catalogues."""
    config.locale_dirs = ["book/locale"]
    config.gettext_compact = False  # a catalogue for each page
    language = os.environ.get("BOOK_LANGUAGE")
    if language:
        config.language = language


def setup(app: Sphinx) -> dict[str, Any]:
    i18n.publish_msgstr = parse_markdown
    app.connect("config-inited", choose_language)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
