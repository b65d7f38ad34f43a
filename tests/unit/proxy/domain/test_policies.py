from typing import Any

import msgspec
import pytest

from proxy.domain.policies import Canary, Pin, Policies, Policy, ServedVersion
from proxy.errors import UnknownModel

POLICIES = Policies(
    [
        Policy(
            "starter", 3, frozenset({0, 2, 3, 4}), 1_700_000_000, aliases=("gpt-4o", "meta/Llama 3"),
            pinnable_versions=frozenset({0, 2, 3}),
        ),
        Policy("other.policy", 0, frozenset({0}), 1_700_000_000),
        Policy("teacher", 0, frozenset({0}), 1_700_000_000, ("o9",), upstream="openai", upstream_model="gpt-9"),
    ]
)  # fmt: skip
STARTER = next(iter(POLICIES))
NOW_S = 1_800_000_000.0
LIFETIME_S = 60.0


def version_of(model: str, pinned: int | None, *, age_s: float = 1, trajectory_id: str = "t", **changes: Any) -> int:
    """The version that answers a call whose trajectory is pinned to that one since so long."""
    pin = None if pinned is None else Pin("starter", pinned, NOW_S - age_s)
    policies = Policies([msgspec.structs.replace(STARTER, **changes)])
    speaker = policies.choose_version(model, trajectory_id, pin, NOW_S, LIFETIME_S)
    assert speaker.policy == "starter"
    assert policies.resolve_fixed(model, pin) in (None, speaker)
    return speaker.version


def test_a_policy_speaks_by_its_live_version() -> None:
    assert POLICIES.resolve("starter") == ServedVersion("starter", 3)
    assert POLICIES.resolve("starter").served_name == "starter@v3"
    assert POLICIES.resolve("other.policy").served_name == "other.policy@v0"
    assert POLICIES.resolve("gpt-4o@v2").served_name == "starter@v2"


@pytest.mark.parametrize("version", [0, 2, 3, 4])
def test_a_version_that_vllm_keeps_may_be_asked_for(version: int) -> None:
    assert POLICIES.resolve(f"starter@v{version}") == ServedVersion("starter", version)


@pytest.mark.parametrize("alias", ["gpt-4o", "meta/Llama 3"])
def test_an_alias_means_the_live_version(alias: str) -> None:
    assert POLICIES.resolve(alias) == ServedVersion("starter", 3)
    assert POLICIES.resolve(f"{alias}@v2") == ServedVersion("starter", 2)


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
    with pytest.raises(UnknownModel, match=r"gpt-4o.*starter@v0, starter@v2, starter@v3, starter@v4") as caught:
        POLICIES.resolve(model)
    assert caught.value.status == 404
    assert caught.value.param == "model"


@pytest.mark.parametrize("model", ["starter@v1", "gpt-4o@v1"])
def test_the_error_says_how_a_version_that_is_not_loaded_can_be(model: str) -> None:
    with pytest.raises(UnknownModel, match=r"not loaded: `whetstone versions pin starter 1` loads"):
        POLICIES.resolve(model)
    for other in ("starter", "teacher"):
        with pytest.raises(UnknownModel, match=r"does not exist; there are"):
            POLICIES.resolve(f"{other}@v03")


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
        ["starter", "gpt-4o", "meta/Llama 3", "starter@v0", "starter@v2", "starter@v3", "starter@v4"],
        ["other.policy", "other.policy@v0"],
        ["teacher", "o9"],
    ]


@pytest.mark.parametrize("model", ["starter", "gpt-4o"])
def test_a_new_trajectory_gets_the_live_version_and_a_pinned_one_stays(model: str) -> None:
    assert version_of(model, None) == 3
    assert version_of(model, 2) == 2
    assert version_of(model, 0) == 0


def test_a_version_asked_for_by_name_answers_whatever_is_pinned() -> None:
    assert version_of("starter@v4", 2) == 4
    assert version_of("gpt-4o@v0", 2, canary=Canary(4, 1.0)) == 0
    with pytest.raises(UnknownModel):
        version_of("starter@v1", 2)


@pytest.mark.parametrize("pinned", [1, 4], ids=["no longer served", "a candidate"])
def test_what_may_not_be_pinned_gives_way_to_the_live_version(pinned: int) -> None:
    assert version_of("starter", pinned) == 3


def test_a_pin_ends_with_its_lifetime() -> None:
    assert version_of("starter", 2, age_s=LIFETIME_S - 1) == 2
    assert version_of("starter", 2, age_s=LIFETIME_S) == 3


def test_without_a_lifetime_every_call_gets_the_live_version() -> None:
    pin = Pin("starter", 2, NOW_S)
    assert POLICIES.choose_version("starter", "t", pin, NOW_S, 0.0) == ServedVersion("starter", 3)


def test_another_servers_model_has_no_versions() -> None:
    pin = Pin("teacher", 2, NOW_S)
    assert POLICIES.choose_version("teacher", "t", pin, NOW_S, LIFETIME_S) == POLICIES.resolve("teacher")


def test_a_canary_answers_its_share_of_new_trajectories_always_the_same_ones() -> None:
    canary = Canary(4, 0.2)
    drawn = [version_of("starter", None, trajectory_id=f"t-{n}", canary=canary) for n in range(2000)]
    assert set(drawn) == {3, 4}
    # Five standard deviations of a binomial share.
    assert abs(drawn.count(4) - 400) < 5 * (2000 * 0.2 * 0.8) ** 0.5
    assert drawn == [version_of("starter", None, trajectory_id=f"t-{n}", canary=canary) for n in range(2000)]
    wider = [version_of("starter", None, trajectory_id=f"t-{n}", canary=Canary(4, 0.4)) for n in range(2000)]
    assert all(after == 4 for before, after in zip(drawn, wider, strict=True) if before == 4)


def test_the_next_canary_takes_others() -> None:
    first, second = (
        {n for n in range(2000) if version_of("starter", None, trajectory_id=f"t-{n}", canary=canary) != 3}
        for canary in (Canary(4, 0.2), Canary(5, 0.2))
    )
    assert 20 < len(first & second) < 140  # 80 by chance


def test_a_trajectory_that_began_before_the_canary_stays_out_of_it() -> None:
    for trajectory_id in map(str, range(100)):
        assert version_of("starter", 2, trajectory_id=trajectory_id, canary=Canary(4, 0.5)) == 2
        assert version_of("starter", 1, trajectory_id=trajectory_id, canary=Canary(4, 0.5)) == 3


@pytest.mark.parametrize("lifetime_s", [0.0, LIFETIME_S])
def test_a_canarys_trajectory_stays_until_the_candidate_is_rejected(lifetime_s: float) -> None:
    pin = Pin("starter", 4, NOW_S - 2 * LIFETIME_S)

    def version(**changes: Any) -> int:
        policies = Policies([msgspec.structs.replace(STARTER, **changes)])
        return policies.choose_version("starter", "t", pin, NOW_S, lifetime_s).version

    assert version(canary=Canary(4, 0.001)) == 4
    assert version(live_version=4, pinnable_versions=frozenset({0, 3, 4})) == 4
    assert version(served_versions=frozenset({0, 2, 3})) == 3
    assert version(canary=Canary(5, 0.001)) == 3


def test_who_answers_is_settled_where_neither_trajectory_nor_time_has_a_say() -> None:
    pins = {version: Pin("starter", version, NOW_S) for version in (2, 3, 4)}
    live = ServedVersion("starter", 3)
    assert [POLICIES.resolve_fixed(name, None) for name in ("starter", "gpt-4o", "starter@v2", "no")] == [
        live,
        live,
        None,
        None,
    ]
    assert [POLICIES.resolve_fixed("starter", pins[version]) for version in (2, 3, 4)] == [None, live, None]
    assert POLICIES.resolve_fixed("o9", None) == POLICIES.resolve("teacher")
    trying = Policies([msgspec.structs.replace(STARTER, canary=Canary(4, 0.5))])
    assert [trying.resolve_fixed("starter", pin) for pin in (None, *pins.values())] == [None] * 4
