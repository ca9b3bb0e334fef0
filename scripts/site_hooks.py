"""What MkDocs does besides rendering docs/: it adds the project's own pages and the notebooks.

CHANGELOG.md, CONTRIBUTING.md and SECURITY.md stay at the root of the repository, where people look
for them; their links are rewritten for the site. A notebook becomes a page with its text, code and
outputs.
"""

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PROJECT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")


def on_files(files: Files, config: Any) -> Files:
    """Add the project's pages, and each notebook as a page."""
    for name in PROJECT_PAGES:
        content = (ROOT / name).read_text()
        content = content.replace("](docs/", "](").replace("](README.md)", "](index.md)")
        files.append(File.generated(config, name, content=content))
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        listed = files.get_file_from_path(f"notebooks/{notebook.name}")
        if listed is not None:
            files.remove(listed)
        page = as_markdown(json.loads(notebook.read_text()))
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=page))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links to the repository's root at the added pages.

    Other files outside docs/ have no page: their links become plain text.
    """
    for name in PROJECT_PAGES:
        markdown = re.sub(rf"\]\(\.\./{re.escape(name)}(#[\w-]+)?\)", rf"]({name}\1)", markdown)
    markdown = re.sub(r"(\]\(notebooks/[\w-]+)\.ipynb\)", r"\1.md)", markdown)
    folders = "src|tests|examples|experiments|benchmarks|scripts"
    return re.sub(rf"\[([^\]]+)\]\((?:\.\./)?(?:{folders})/[^)]*\)", r"\1", markdown)


def as_markdown(notebook: dict[str, Any]) -> str:
    """Return a notebook as Markdown: text, code, and the outputs, as text or HTML."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source.replace(".ipynb)", ".md)"))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            printed = "".join(output.get("text", [])) or "".join(data.get("text/plain", []))
            if "text/html" in data:
                parts.append(f"<div>{''.join(data['text/html'])}</div>")
            elif printed.strip():
                parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
