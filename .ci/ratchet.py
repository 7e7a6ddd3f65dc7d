"""Figures of the source that only fall: `make lint` fails if one exceeds its number in ratchet.json.

A commit that must raise one changes the number there, and says why. `python .ci/ratchet.py --lower` writes lower ones.
"""

import ast
import functools
import json
import pathlib
import sys

import grimp

ROOT = pathlib.Path(__file__).parents[1]
NUMBERS = ROOT / ".ci" / "ratchet.json"


def figures() -> dict[str, int]:
    source = [path.read_text() for path in (ROOT / "jdistgrad").rglob("*.py")]
    tests = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    nodes = [node for text in source for node in ast.walk(ast.parse(text))]
    return {
        "source files": len(source),
        "source lines": sum(map(lines_of, source)),
        "functions": sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes),
        "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
        "import depth": depth(),
        "test lines": sum(map(lines_of, tests)),
        "raises that pin a text": sum(map(pinned, tests)),
    }


def lines_of(text: str) -> int:
    return text.count("\n")


def pinned(text: str) -> int:
    """Count the calls of ``pytest.raises`` with ``match``."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    raises = [call for call in calls if ast.unparse(call.func).endswith("raises")]
    return sum(any(keyword.arg == "match" for keyword in call.keywords) for call in raises)


def depth() -> int:
    """Return the number of modules in the longest chain of imports, of those that run when a module is loaded."""
    graph = grimp.build_graph("jdistgrad", exclude_type_checking_imports=True, cache_dir=None)

    @functools.cache
    def below(module: str) -> int:
        return 1 + max(map(below, graph.find_modules_directly_imported_by(module)), default=0)

    return max(map(below, graph.modules))


def main() -> int:
    found, allowed = figures(), json.loads(NUMBERS.read_text())
    if "--lower" in sys.argv:
        lower = {name: min(number, allowed.get(name, number)) for name, number in found.items()}
        NUMBERS.write_text(json.dumps(lower, indent=2) + "\n")
        return 0
    grown = {name: number for name, number in found.items() if number > allowed[name]}
    for name, number in grown.items():
        print(f"{name}: {number}, at most {allowed[name]} by .ci/ratchet.json")
    return bool(grown)


if __name__ == "__main__":
    sys.exit(main())
