import pytest

from proxy.errors import UnknownModel
from proxy.policies import Policy, Speaker, names_of, resolve

POLICIES = {
    "starter": Policy("starter", 3, frozenset({0, 2, 3}), 0),
    "a.b-c": Policy("a.b-c", 0, frozenset({0}), 0),
}


def test_a_policy_speaks_in_its_live_version() -> None:
    assert resolve(POLICIES, "starter") == Speaker("starter", 3)
    assert resolve(POLICIES, "starter").served_name == "starter@v3"


@pytest.mark.parametrize("version", [0, 2, 3])
def test_a_served_version_can_be_asked_for(version: int) -> None:
    assert resolve(POLICIES, f"starter@v{version}") == Speaker("starter", version)


@pytest.mark.parametrize(
    "model", ["", "Starter", "starter@v1", "starter@v03", "starter@v", "starter@v-1", "starter@v3@v3", "starter @v3"]
)
def test_an_unknown_model_is_answered_with_the_names_that_exist(model: str) -> None:
    with pytest.raises(UnknownModel) as caught:
        resolve(POLICIES, model)
    assert caught.value.status == 404
    assert caught.value.message.endswith("there are: starter, starter@v0, starter@v2, starter@v3, a.b-c, a.b-c@v0")


def test_a_long_list_of_names_is_cut_and_says_so() -> None:
    many = {f"p{n}": Policy(f"p{n}", 0, frozenset({0}), 0) for n in range(30)}
    with pytest.raises(UnknownModel, match=r"and 40 more \(GET /v1/models\)"):
        resolve(many, "x" * 10_000)


def test_without_any_policy_the_answer_says_so() -> None:
    with pytest.raises(UnknownModel, match="none yet"):
        resolve({}, "starter")


def test_the_names_are_the_policys_own_and_its_served_versions() -> None:
    assert names_of(POLICIES["starter"]) == ["starter", "starter@v0", "starter@v2", "starter@v3"]
