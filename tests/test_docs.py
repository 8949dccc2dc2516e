"""What the pages say is what the code has."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from costmodel.catalog import STRATEGIES

ROOT = Path(__file__).parent.parent
TEXTS = ("README.md", "CHANGELOG.md", "ARCHITECTURE.md", "docs/run.md", "docs/report.md", "docs/explain.md", "docs/fit.md", "docs/questions.md",
         "docs/support.md", "docs/executing.md",
         "docs/tui.md")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["docs/run.md", "docs/report.md", "docs/support.md", "docs/explain.md", "docs/fit.md", "docs/questions.md", "README.md"])
def test_tables_and_outputs_are_the_codes(page: str) -> None:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec
    assert spec.loader
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    text = read(page)
    assert generate.filled(text) == text, "run: python docs/generate.py"


@pytest.mark.parametrize("name", ["docs/questions.md", "docs/fit.md"])
def test_an_answer_is_that_of_the_command_above_it(name: str) -> None:
    page = read(name)
    shown = re.findall(r"```sh\ncostmodel ([^\n]*)\n```\n+<!-- output: (.*?)(?: :: .*?)? -->", page)
    assert len(shown) == page.count("<!-- output: ")
    assert all(command == answered for command, answered in shown)


def test_the_example_of_run_md_is_a_run() -> None:
    from costmodel import resolve
    example = re.search(r"```toml\n(.*?)```", read("docs/run.md"), re.DOTALL)
    assert example
    assert resolve(tomllib.loads(example[1])).run.plan.zero == 3


def test_support_names_every_strategy() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", read("docs/support.md"), re.MULTILINE)
    assert set(rows) >= set(STRATEGIES)


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name: str) -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", read(name)):
        if not link.startswith("http"):
            assert ((ROOT / name).parent / link).exists(), link


def test_ci_runs_the_readmes_test_command() -> None:
    command = re.search(r"\.venv/bin/(python -m pytest[^\n`]*)", read("README.md"))
    assert command
    assert command[1].strip() in read(".ci/run")


def test_nothing_says_pip_install_costmodel() -> None:
    for name in TEXTS:
        assert "pip install costmodel" not in read(name)


def test_every_script_is_a_command_and_not_an_empty_callback() -> None:
    scripts = tomllib.loads(read("pyproject.toml"))["project"]["scripts"]
    for name, target in scripts.items():
        module, _, entry = target.partition(":")
        code = f"import sys; sys.argv = [{name!r}, '--help']; from {module} import {entry}; {entry}()"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
        assert (done.returncode, "Usage:" in done.stdout) == (0, True), done.stderr
