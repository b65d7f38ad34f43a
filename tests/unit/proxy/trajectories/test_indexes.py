from proxy.trajectories.indexes import OpenCompletion, PrefixIndex

HISTORY = b"h" * 16


def head(name: str, *histories: bytes) -> OpenCompletion:
    return OpenCompletion(name, f"t-{name}", histories or (HISTORY,), f"chatcmpl-{name}")


def taken_in_order(heads: PrefixIndex) -> list[str]:
    order = []
    while found := heads.free(HISTORY):
        heads.take(found.completion_id, "call")
        order.append(found.completion_id)
    return order


def test_the_oldest_free_one_is_taken_first_and_each_once() -> None:
    heads = PrefixIndex(10)
    for name in "abc":
        heads.keep(head(name))
    assert taken_in_order(heads) == ["a", "b", "c"]
    assert heads.alike(HISTORY) is heads.named("chatcmpl-c")


def test_what_is_freed_is_the_next_to_be_taken() -> None:
    heads = PrefixIndex(10)
    for name in "abc":
        heads.keep(head(name))
    heads.take("a", "first")
    heads.take("b", "second")
    heads.release("a", "another call")
    heads.release("b", "second")
    assert taken_in_order(heads) == ["b", "c"]


def test_what_is_told_again_stays_taken() -> None:
    heads = PrefixIndex(10)
    heads.keep(head("a"))
    heads.take("a", "call")
    heads.keep(head("a"))
    assert not heads.learn(head("a"))
    assert heads.free(HISTORY) is None


def test_that_it_is_taken_may_be_known_before_anything_else() -> None:
    heads = PrefixIndex(10)
    heads.keep_taken(OpenCompletion("a", "t-a"), "call")
    assert heads.learn(head("a"))
    assert heads.free(HISTORY) is None
    heads.release("a", "call")
    assert heads.free(HISTORY) is heads.named("a")


def test_the_oldest_are_forgotten_whole() -> None:
    heads = PrefixIndex(2)
    for name in "abc":
        heads.keep(head(name, HISTORY, name.encode() * 16))
    assert heads.named("a") is heads.named("chatcmpl-a") is heads.alike(b"a" * 16) is None
    assert taken_in_order(heads) == ["b", "c"]
    for name in "de":
        heads.keep(head(name, b"other"))
    assert heads.alike(HISTORY) is None


def test_what_was_set_aside_is_still_where_a_fork_leaves() -> None:
    heads = PrefixIndex(10)
    heads.keep(first := head("a"))
    heads.set_aside(first)
    assert heads.free(HISTORY) is None
    assert heads.alike(HISTORY) is first


def test_a_history_of_one_head_alone_is_found_freed_and_forgotten_like_one_of_several() -> None:
    heads = PrefixIndex(1)
    heads.keep(first := head("a"))
    assert heads.free(HISTORY) is heads.alike(HISTORY) is first
    heads.take("a", "call")
    assert heads.free(HISTORY) is None
    assert heads.alike(HISTORY) is first
    heads.release("a", "call")
    assert heads.free(HISTORY) is first
    heads.keep(second := head("b"))
    assert heads.free(HISTORY) is heads.alike(HISTORY) is second
    heads.keep(head("c", b"another"))
    assert heads.free(HISTORY) is heads.alike(HISTORY) is None


def test_an_answer_goes_by_its_id_and_by_that_of_its_first_choice() -> None:
    heads = PrefixIndex(10)
    for name in ("chatcmpl-a", "chatcmpl-a/1"):
        heads.keep(OpenCompletion(name[-1], "t", (), name))
    assert heads.named("chatcmpl-a") is heads.named("chatcmpl-a/0") is heads.named("a")
    assert heads.named("chatcmpl-a/1") is heads.named("1")


def test_what_is_freed_is_found_beside_one_that_was_told_again_meanwhile() -> None:
    heads = PrefixIndex(10)
    heads.keep(first := head("a"))
    heads.take("a", "call")
    heads.keep(second := head("b"))
    heads.take("b", "another")
    heads.keep(second)
    heads.release("a", "call")
    assert heads.free(HISTORY) is first


def test_heads_are_found_by_their_prompt_the_latest_first_and_taken_or_not() -> None:
    heads = PrefixIndex(4)
    for name in "abcd":
        heads.keep(OpenCompletion(name, f"t-{name}", (name.encode(),), prompt=b"p" if name < "d" else b"q"))
    heads.take("b", "call")
    heads.keep(OpenCompletion("a", "t-a", (b"a",), prompt=b"p"))
    assert [head.completion_id for head in heads.of_prompt(b"p", 9)] == ["a", "c", "b"]
    assert [head.completion_id for head in heads.of_prompt(b"p", 2)] == ["a", "c"]
    assert [head.completion_id for head in heads.of_prompt(b"q", 9)] == ["d"]
    assert heads.of_prompt(b"r", 9) == []


def test_a_prompt_is_forgotten_with_its_last_head() -> None:
    heads = PrefixIndex(2)
    for name in "abcd":
        heads.keep(OpenCompletion(name, f"t-{name}", (name.encode(),), prompt=b"p" if name < "c" else name.encode()))
    assert heads.of_prompt(b"p", 9) == []
    assert set(heads._by_prompt) == {b"c", b"d"}
