"""What tests of upgrades share."""

from pathlib import Path

import pytest

from tests.unit.migrations.next_version import NextVersion


@pytest.fixture(scope="session")
def next_version(tmp_path_factory: pytest.TempPathFactory) -> NextVersion:
    """A version after this one, which can upgrade a database of this one."""
    folder: Path = tmp_path_factory.mktemp("next")
    return NextVersion(folder)
