"""Hook of mkdocs: a page for each example and each notebook, made from the file itself. The gallery links to them."""

import ast
import base64
import json
import pathlib
import re

from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).parents[2]
DARK = re.compile(rb"@media \(prefers-color-scheme: dark\).*\n")  # the site inverts all pictures of notebooks
LESS = "---\nsearch: { boost: 0.3 }\nhide: [toc]\n---\n\n"  # in results of the search they stand behind the manual


def on_files(files, config):
    for path in sorted((ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{path.stem}.md", content=example(path)))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for place, content in notebook(path.stem, json.loads(path.read_text())):
            files.append(File.generated(config, f"notebooks/{place}", content=content))
    return Files(list(files))


def example(path):
    """Return the page of an example: its docstring, its picture if there is one, and the program."""
    source = path.read_text()
    words = ast.get_docstring(ast.parse(source), clean=False)
    program = source.split(f'"""{words}"""', 1)[1].strip()
    picture = f"![](../gallery/{path.stem}.svg)\n\n" if (ROOT / "docs/gallery" / f"{path.stem}.svg").exists() else ""
    return f"{LESS}# {path.name}\n\n{words}\n\n{picture}```python\n{program}\n```\n"


def notebook(name, content):
    """Yield the page of a notebook and its pictures, each as a path and a content."""
    parts, pictures = [LESS], 0
    for cell in content["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            for kind, read in (("svg+xml", str.encode), ("png", base64.b64decode)):
                if f"image/{kind}" in data:
                    place = f"{name}-{pictures}.{kind[:3]}"
                    pictures += 1
                    yield place, DARK.sub(b"", read("".join(data[f"image/{kind}"])))
                    parts.append(f"![]({place}){{ .jd-plot }}")
                    break
            else:
                text = "".join(output.get("text", data.get("text/plain", "")))
                parts.append(f"```text\n{text.rstrip()}\n```")
    yield f"{name}.md", "\n\n".join(parts) + "\n"
