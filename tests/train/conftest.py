from pathlib import Path

import pytest


def write_text(directory: Path) -> Path:
    path = directory / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 200)
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path)
