"""Which completion an id means that an app holds."""

from sqlalchemy import Engine

from migrations import schema
from tests.conftest import Seed
from whetstone.registry.completion_store import completions_named


def inner_id(seed: Seed, completion_id: str, name: str, project: str = "default") -> None:
    seed.insert(schema.answer_ids, project=project, completion_id=completion_id, id=name)


def named(engine: Engine, *names: str | tuple[str, int], project: str = "default") -> dict[tuple[str, int], str]:
    """Return the completion of each name."""
    wanted = {name if isinstance(name, tuple) else (name, 0) for name in names}
    with engine.connect() as connection:
        found = completions_named(connection, project, wanted)
    assert all(where == (where[0], where[0].rpartition("-")[0]) for where in found.values())
    return {name: completion_id for name, (completion_id, _) in found.items()}


def test_a_completion_is_named_by_its_own_id_its_answers_and_those_within_it(engine: Engine, seed: Seed) -> None:
    seed.trajectory("t", turns=2)
    inner_id(seed, "t-1", "call_abcdefghi")
    inner_id(seed, "t-1", "call_bcdefghij")
    assert named(engine, "t-0", "chatcmpl-t-1", "call_abcdefghi", ("call_bcdefghij", 3), "t-7") == {
        ("t-0", 0): "t-0",
        ("chatcmpl-t-1", 0): "t-1",
        ("call_abcdefghi", 0): "t-1",
        ("call_bcdefghij", 3): "t-1",
    }
    assert named(engine) == {}


def test_of_choices_that_share_an_id_the_choice_counts_and_of_equal_ids_the_earliest_call(
    engine: Engine, seed: Seed
) -> None:
    seed.trajectory("t", turns=0)
    for turn, choice in enumerate((0, 1, 0)):
        seed.completion("t", turn, upstream_id="chatcmpl-same", choice=choice)
    assert named(engine, ("chatcmpl-same", 0), ("chatcmpl-same", 1), ("chatcmpl-same", 2)) == {
        ("chatcmpl-same", 0): "t-0",
        ("chatcmpl-same", 1): "t-1",
    }


def test_an_id_in_several_answers_names_none_and_another_projects_is_unknown(engine: Engine, seed: Seed) -> None:
    seed.project("other")
    for project in ("default", "other"):
        seed.trajectory("t", project=project, turns=2)
    for completion_id in ("t-0", "t-1"):
        inner_id(seed, completion_id, "call_twicetwice")
    inner_id(seed, "t-0", "call_othersonly", "other")
    assert named(engine, "call_twicetwice", "call_othersonly") == {}
    assert named(engine, "call_othersonly", project="other") == {("call_othersonly", 0): "t-0"}
