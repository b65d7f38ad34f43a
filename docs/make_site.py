"""Builds the documentation as a site: `python docs/make_site.py [FOLDER]`. Knows where pages lie; writes none itself.

Pages keep their places in the repository, so that one link serves here and there; README.md is the first page. Beside
each page lies its Markdown, which llms.txt lists.
"""

import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/**/*.md",
    "benchmarks/README.md",
    "examples/README.md",
    "examples/*/README.md",
)
_LINK = re.compile(r"\]\(([^)#:\s]+)")


def lay_out(into: Path) -> None:
    """Copy every page, and each file that one links to, to where it lies in the repository."""
    pages = [page for pattern in PAGES for page in ROOT.glob(pattern)]
    texts = [(page, page.read_text(encoding="utf-8")) for page in [*pages, ROOT / "README.md"]]
    linked = [(page.parent / target).resolve() for page, text in texts for target in _LINK.findall(text)]
    files = [file for file in linked if file.is_file() and file.suffix != ".md" and file.is_relative_to(ROOT)]
    for file in [*pages, *files]:
        copy = into / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    shutil.copyfile(ROOT / "README.md", into / "index.md")


def add_text(pages: Path, into: Path) -> None:
    """Copy each page's Markdown to its place on the site, and llms.txt to the top, where agents look for it."""
    for page in pages.rglob("*.md"):
        shutil.copyfile(page, into / page.relative_to(pages))
    listed = (ROOT / "docs" / "llms.txt").read_text(encoding="utf-8")
    at_the_top = _LINK.sub(lambda link: f"]({posixpath.normpath('docs/' + link[1])}", listed)
    (into / "llms.txt").write_text(at_the_top, encoding="utf-8")


def build(into: Path) -> subprocess.CompletedProcess[str]:
    """Write the site; a broken link, or a page that the menu names and nobody wrote, fails it."""
    with tempfile.TemporaryDirectory(prefix="whetstone-site-") as folder:
        project = Path(folder)
        lay_out(project / "pages")
        shutil.copyfile(ROOT / "zensical.toml", project / "zensical.toml")
        command = [sys.executable, "-m", "zensical", "build", "--strict"]
        done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
        if not done.returncode:
            shutil.copytree(project / "site", into, dirs_exist_ok=True)
            add_text(project / "pages", into)
        return done


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "site").resolve()
    ended = build(target)
    sys.stdout.write(ended.stdout + ended.stderr)
    if ended.returncode:
        sys.exit(1)
    sys.stdout.write(f"open {target / 'index.html'}\n")
