"""Extension of griffe for the site: our docstrings say "Example", but griffe's section is called "Examples"."""

from typing import Any

import griffe


class ExamplesSection(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
