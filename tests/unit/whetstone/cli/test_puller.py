"""`whetstone puller`: what it needs, and that it pulls for a program elsewhere until it is stopped."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.whetstone.conftest import Ended
from tests.unit.whetstone.registry.remote.stores import write_adapter
from whetstone.registry.adapters import StoreUnreachable, verify
from whetstone.registry.remote.object_store import ObjectStore
from whetstone.registry.remote.sources import Pullers
from whetstone.stack.stack import free_ports


@pytest.mark.parametrize("setting", ["WHETSTONE_ADAPTERS__STORE", "WHETSTONE_ADAPTERS__PULLER_PORT"])
def test_without_a_store_and_a_port_it_says_what_it_needs(
    setting: str, whetstone: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    values = {"WHETSTONE_ADAPTERS__STORE": f"file://{tmp_path}", "WHETSTONE_ADAPTERS__PULLER_PORT": "8003"}
    for name in values.keys() - {setting}:
        monkeypatch.setenv(name, values[name])
    ended = whetstone("puller", "--data", str(tmp_path))
    assert ended.code == 2
    assert "adapters.store" in ended.message and "adapters.puller_port" in ended.message


@pytest.mark.slow
def test_it_pulls_until_it_is_stopped(tmp_path: Path) -> None:
    sha256 = write_adapter(tmp_path / "p@v1")
    ObjectStore(f"file://{tmp_path}/store", 60).publish(tmp_path / "p@v1")
    (port,) = free_ports(1)
    (tmp_path / "whetstone.toml").write_text(
        f'data = "{tmp_path}/host"\n[adapters]\nstore = "file://{tmp_path}/store"\npuller_port = {port}\n'
    )
    command = [str(Path(sys.executable).parent / "whetstone"), "puller", "--host", "127.0.0.1"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            source, deadline = Pullers(port), time.monotonic() + 60
            while True:
                try:
                    folder = source.locate("http://127.0.0.1:8001", tmp_path, sha256)
                    break
                except StoreUnreachable:
                    assert time.monotonic() < deadline and process.poll() is None
                    time.sleep(0.1)
            assert folder == tmp_path / "host" / "pulled" / sha256 and verify(folder) == sha256
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()
