"""Packages as pip installs them without a lock: of a build that cannot be imported beside torch's CPU build."""

from pathlib import Path

ERROR = "operator torchvision::nms does not exist"
RELEASES = {"torchvision": "0.28.0", "torchaudio": "2.11.0", "torchcodec": "0.17.0"}


def install(folder: Path, build: str = "") -> None:
    """Put them into a folder of packages, each with its metadata; `build` is the local part of their versions."""
    for name, release in RELEASES.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"raise RuntimeError({ERROR!r})\n", encoding="utf-8")
        about = folder / f"{name}-{release}{build}.dist-info"
        about.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}{build}\n"
        (about / "METADATA").write_text(text, encoding="utf-8")
