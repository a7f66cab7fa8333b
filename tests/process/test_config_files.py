"""Files of settings, looked at before a daemon is started with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from edgeshard_agent.settings import AgentSettings
from edgeshard_coordinator.settings import CoordinatorSettings

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.process.config import DaemonSettings, given, problems, settings_of

KINDS: dict[str, type[DaemonSettings]] = {
    "agent": AgentSettings,
    "coordinator": CoordinatorSettings,
}


def wrong(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "site.toml"
    file.write_text(text)
    return problems(file, KINDS)


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    text = """
        [agent]
        memory = "3"
        cache_limit = "5 parsec"
        thread = 2
        idle_spin_s = 7
        pack = "yes"
        [coordinator]
        log_level = "loud"
    """
    found = wrong(tmp_path, text)
    for key in ("memory", "cache-limit", "'thread'", "idle_spin_s", "pack", "log_level"):
        assert sum(key in one for one in found) == 1, key
    assert len(found) == 6


def test_what_may_come_from_elsewhere_is_not_missing(tmp_path: Path) -> None:
    assert wrong(tmp_path, "[agent]\nthreads = 2\n[client]\n") == []


def test_the_file_of_quotas_is_looked_at_too(tmp_path: Path) -> None:
    (tmp_path / "quotas.toml").write_text('["client/app"]\nrequest = 3\n')
    (found,) = wrong(tmp_path, f'[coordinator]\nquotas = "{tmp_path}/quotas.toml"\n')
    assert "unknown key 'request'" in found


@pytest.mark.parametrize("text", ["[agnt]\n", "agent = 3\n", "[agent\n"])
def test_what_is_no_file_of_settings(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        wrong(tmp_path, text)


def test_each_setting_says_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "agent.toml"
    file.write_text('[agent]\nname = "a"\nthreads = 2\nmemory = "2GiB"\n')
    monkeypatch.setenv("EDGESHARD__AGENT__THREADS", "3")
    found = {
        one.key: one
        for one in settings_of(AgentSettings, given(AgentSettings, file, {"device": "cuda:1"}))
    }
    told = {
        key: (found[key].value, found[key].source)
        for key in ("name", "threads", "memory", "device", "pack")
    }
    assert told == {
        "name": ("a", str(file)),
        "threads": (3, "EDGESHARD__AGENT__THREADS"),
        "memory": (2 << 30, str(file)),
        "device": ("cuda:1", "--device"),
        "pack": ("auto", "default"),
    }
    assert (found["state_dir"].value, found["state_dir"].source) == (None, "missing")
    assert {key for key, one in found.items() if one.reloaded} == {"log_level", "cache_limit"}
