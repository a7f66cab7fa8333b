"""The part of a dump that describes the process itself."""

from __future__ import annotations

import json
from pathlib import Path

from edgeshard.process.about import Process, public_settings
from edgeshard.process.config import DaemonSettings


class Settings(DaemonSettings):
    section = "test"
    api_token: str | None = None
    join_secret: str | None = None


async def test_it_says_versions_settings_and_what_runs() -> None:
    settings = Settings(listen="127.0.0.1:0", state_dir=Path("state"))
    about = json.loads(
        json.dumps(Process(settings, {"wire": "7"}, ("pytest", "no-such-thing")).about())
    )
    assert (
        about["versions"]["wire"] == "7" and about["versions"]["no-such-thing"] == "not installed"
    )
    assert about["versions"]["pytest"][0].isdigit() and about["versions"]["python"].startswith("3.")
    assert about["settings"]["state_dir"] == "state"
    assert "MainThread" in about["process"]["threads"] and about["process"]["uptime_s"] >= 0
    assert any("test_it_says" in name for name in about["process"]["tasks"])


def test_of_a_secret_it_says_only_whether_there_is_one() -> None:
    settings = Settings(listen="x", state_dir=Path("s"), tls_key=Path("hush.pem"), api_token="hush")
    shown = public_settings(settings)
    assert (shown["tls_key"], shown["api_token"], shown["join_secret"], shown["tls_cert"]) == (
        "set",
        "set",
        None,
        None,
    )
    assert "hush" not in json.dumps(shown)
