"""Test the model servers and show the results: the first half of `whetstone doctor`.

`up` runs the same self-test at each start (`at_start`), so that `--stored` has something to show.
"""

from collections.abc import Callable, Sequence
from contextlib import closing

from msgspec.structs import replace
from rich.console import RenderableType
from rich.markup import escape
from rich.text import Text
from sqlalchemy.exc import SQLAlchemyError

from whetstone.config.settings import Settings
from whetstone.doctor.rendering import checks_shown
from whetstone.errors import WhetstoneError
from whetstone.registry.projects import Store
from whetstone.vllm.client import Vllm, VllmDown, VllmRefused
from whetstone.vllm.self_test import run
from whetstone.vllm.self_test.questions import OF_THE_MODEL, knowing


class NothingToTest(WhetstoneError):
    """No vLLM serves the policy's model, or no test is stored; the message says where, and what to do."""


def examine(settings: Settings, arguments: Sequence[str] = ()) -> run.SelfTest:
    """Test every vLLM of the settings. Return the first test that training cannot rely on, else the first server's.

    Args:
        settings: where the servers are.
        arguments: what they were started with, as far as known: no check advises a flag that is set already.

    Raises:
        NothingToTest: at one of the addresses no vLLM serves the policy's model.
    """
    urls = settings.vllm.urls
    if not urls:
        raise NothingToTest(f"no stack runs on {settings.data}: start it with `whetstone up`, or set vllm.urls")
    tests = [_examine(url, settings.served_name) for url in urls]
    test = next((test for test in tests if not test.trainable), tests[0])
    return replace(test, checks=tuple(knowing(check, arguments) for check in test.checks))


def _examine(url: str, served: str) -> run.SelfTest:
    with closing(Vllm(url)) as control:
        try:
            names = control.models()
        except VllmDown as error:
            raise NothingToTest(f"no vLLM answers at {url}: start it, or correct vllm.urls ({error})") from error
        except VllmRefused as error:
            raise NothingToTest(f"what answers at {url} is no vLLM; correct vllm.urls ({error})") from error
        if served not in names:
            raise NothingToTest(
                f"the vLLM at {url} serves {', '.join(sorted(names)) or 'nothing'}, but not {served}: start it with "
                f"--served-model-name {served}, or correct vllm.urls"
            )
        return replace(run.run(control, served), address=url)


def last_test(settings: Settings, store: Store) -> run.SelfTest:
    """Return the last stored test.

    Raises:
        NothingToTest: no test is stored.
    """
    test = store.self_test(settings.project, settings.policy)
    if test is None:
        raise NothingToTest(f"no self-test of {settings.policy} is stored; `whetstone doctor` makes one")
    return test


def at_start(settings: Settings, store: Store, say: Callable[[str], None], arguments: Sequence[str] = ()) -> None:
    """Test the servers of a starting stack, store the result, and report it in short. Never stops the start."""
    try:
        test = examine(settings, arguments)
        store.keep_self_test(settings.project, settings.policy, test)
    except (NothingToTest, SQLAlchemyError) as error:
        say(escape(f"no self-test: {error}"))
        return
    say(escape(f"{in_short(test)} (`whetstone doctor --stored` has the details)"))
    for check in test.missing:
        say(escape(f"training cannot rely on the vLLM at {test.address}. {check.name}: {check.found}. {check.means}"))


def in_short(test: run.SelfTest) -> str:
    """Return whether the test passed, and the name of every check that is not yes."""
    verdict = "self-test passed" if test.trainable else "self-test failed"
    untested = [check.name for check in test.checks if check.ok is None]
    forms = {
        "{} could not be tested with this model": [name for name in untested if name in OF_THE_MODEL],
        "{} could not be tested": [name for name in untested if name not in OF_THE_MODEL],
        "no: {}": [check.name for check in test.checks if check.ok is False],
    }
    return "; ".join([verdict, *(form.format(_listed(names)) for form, names in forms.items() if names)])


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def shown(test: run.SelfTest, *, verbose: bool) -> RenderableType:
    """Return the checks, and the verdict below them; `verbose`: each check with its meaning."""
    server = f"vLLM {test.vllm_version}" if test.vllm_version else "a server of unknown version"
    place = f" at {test.address}" if test.address else ""
    title = f"{test.served} on {server}{place}, {test.tested_at:%Y-%m-%d %H:%M:%S} UTC"
    verdict = Text("all that training needs is there", style="bold green")
    if not test.trainable:
        names = ", ".join(check.name for check in test.missing or test.checks[:1])
        verdict = Text(f"training cannot rely on this server: {names}", style="bold red")
    return checks_shown(title, test.checks, "could not be tested (--verbose says why)", verdict, verbose=verbose)
