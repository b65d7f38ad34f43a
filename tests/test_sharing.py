"""How tests are spread over processes: what shares a server is in one of them."""

from pathlib import Path

import pytest

from tests.sharing import SERVERS, SHARED, SHARES, SQLITE_ALONE, Sharing, file_of, order


def test_tests_that_use_a_vllm_share_it(request: pytest.FixtureRequest) -> None:
    asking = {
        file_of(item.nodeid)
        for item in request.session.items
        if SERVERS.intersection(getattr(item, "fixturenames", ())) and not item.get_closest_marker("long")
    }
    assert asking <= set(SHARED["a vLLM"]), "name the file in tests/sharing.py"


def test_files_that_share_something_exist() -> None:
    assert [file for file in SHARES if not Path(file).is_file()] == []
    assert len(SHARES) == sum(map(len, SHARED.values()))
    assert [path for path in SQLITE_ALONE if not Path(path).exists()] == []


def test_files_that_share_something_are_one_piece_of_work() -> None:
    scope = Sharing._split_scope
    sharing = object.__new__(Sharing)
    one, another = SHARED["a vLLM"][:2]
    assert scope(sharing, f"{one}::test_a[x::y]") == scope(sharing, f"{another}::test_b") == "a vLLM"
    assert (
        scope(sharing, "tests/unit/proxy/admission/test_api_keys.py::test_a")
        == "tests/unit/proxy/admission/test_api_keys.py"
    )


def test_what_shares_something_begins(request: pytest.FixtureRequest) -> None:
    items = list(request.session.items)
    order(items)
    shares = [file_of(item.nodeid) in SHARES for item in items]
    assert shares == sorted(shares, reverse=True)
