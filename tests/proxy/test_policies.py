import pytest

from proxy.errors import UnknownModel
from proxy.policies import Policies, Policy, Speaker

POLICIES = Policies(
    [
        Policy("starter", 3, frozenset({0, 2, 3}), 1_700_000_000, aliases=("gpt-4o", "meta/Llama 3")),
        Policy("other.policy", 0, frozenset({0}), 1_700_000_000),
        Policy("teacher", 0, frozenset({0}), 1_700_000_000, ("o9",), upstream="openai", upstream_model="gpt-9"),
    ]
)


def test_a_policy_speaks_by_its_live_version() -> None:
    assert POLICIES.resolve("starter") == Speaker("starter", 3)
    assert POLICIES.resolve("starter").served_name == "starter@v3"
    assert POLICIES.resolve("other.policy").served_name == "other.policy@v0"


@pytest.mark.parametrize("version", [0, 2, 3])
def test_a_version_that_vllm_keeps_may_be_asked_for(version: int) -> None:
    assert POLICIES.resolve(f"starter@v{version}") == Speaker("starter", version)


@pytest.mark.parametrize("alias", ["gpt-4o", "meta/Llama 3"])
def test_an_alias_means_the_live_version(alias: str) -> None:
    assert POLICIES.resolve(alias) == Speaker("starter", 3)
    assert POLICIES.resolve(f"{alias}@v2") == Speaker("starter", 2)


@pytest.mark.parametrize("name", ["teacher", "o9"])
def test_another_servers_model_goes_by_the_name_it_has_there(name: str) -> None:
    speaker = POLICIES.resolve(name)
    assert (speaker.policy, speaker.version, speaker.upstream, speaker.served_name) == ("teacher", 0, "openai", "gpt-9")


@pytest.mark.parametrize(
    "model",
    ["", "Starter", "gpt-4", "starter@v1", "starter@v03", "starter@", "starter@v-1", "@v0", "starter@3",
     "starter@v99999999999999999999", "starter@v3@v3", "teacher@v0", "gpt-9"],
)  # fmt: skip
def test_an_unknown_name_is_an_error_that_lists_the_known_ones(model: str) -> None:
    with pytest.raises(UnknownModel, match=r"gpt-4o.*starter@v0, starter@v2, starter@v3") as caught:
        POLICIES.resolve(model)
    assert caught.value.status == 404
    assert caught.value.param == "model"


def test_the_error_stays_short_however_many_there_are() -> None:
    many = Policies(Policy(f"policy-{n:04}", 0, frozenset({0}), 0) for n in range(5000))
    with pytest.raises(UnknownModel, match="and 9980 more") as caught:
        many.resolve("x" * 10_000)
    assert len(caught.value.message) < 1500


def test_without_policies_it_says_so() -> None:
    assert not Policies()
    with pytest.raises(UnknownModel, match="none yet"):
        Policies().resolve("starter")


def test_names_are_the_policies_their_aliases_and_versions() -> None:
    assert [policy.names for policy in POLICIES] == [
        ["starter", "gpt-4o", "meta/Llama 3", "starter@v0", "starter@v2", "starter@v3"],
        ["other.policy", "other.policy@v0"],
        ["teacher", "o9"],
    ]
