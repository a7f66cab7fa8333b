"""The steps of an installation, by the state it finds; tests/cli/test_install.py tests how
`edgectl` uses them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgeshard.domain.errors import DataLossError, InvalidArgumentError
from edgeshard.process.installation import (
    InstallOptions,
    Leave,
    MakeDirectory,
    Record,
    Remove,
    RemoveDirectory,
    Run,
    Step,
    SystemState,
    Write,
    config_path,
    digest,
    files,
    from_text,
    install_steps,
    record_path,
    state_directory,
    to_text,
    uninstall_steps,
    unit_path,
    user_path,
)
from edgeshard.process.systemd_units import Daemon

AGENT = Daemon.AGENT
OPTIONS = InstallOptions("127.0.0.1:0", "/opt/edgeshard/bin", "a", "127.0.0.1:7600")
THERE = frozenset({"/", "/etc", "/etc/systemd", "/etc/systemd/system"})
BARE = SystemState({}, THERE, user=False, live=True)


def after(steps: list[Step], before: SystemState) -> tuple[SystemState, Record]:
    """The state found after the steps, and the record that they wrote."""
    written = {step.path: step.content for step in steps if isinstance(step, Write)}
    made = {step.path for step in steps if isinstance(step, MakeDirectory)}
    user = before.user or any(
        isinstance(step, Run) and step.command[0] == "systemd-sysusers" for step in steps
    )
    digests = {**before.files, **{path: digest(content) for path, content in written.items()}}
    found = replace(before, files=digests, directories=before.directories | made, user=user)
    return found, from_text(written[record_path(AGENT)], "record")


@pytest.fixture
def installed() -> tuple[SystemState, Record]:
    return after(install_steps(AGENT, OPTIONS, None, BARE), BARE)


def test_a_machine_gets_files_directories_and_user_in_the_order_in_which_they_are_needed() -> None:
    steps = install_steps(AGENT, OPTIONS, None, BARE)
    assert steps[:2] == [MakeDirectory("/etc/edgeshard"), MakeDirectory("/etc/sysusers.d")]
    assert {step.path for step in steps if isinstance(step, Write)} == {
        *files(AGENT, OPTIONS),
        record_path(AGENT),
    }
    assert steps[-2:] == [
        Run(("systemd-sysusers", user_path(AGENT))),
        Run(("systemctl", "daemon-reload")),
    ]


def test_below_another_root_no_command_is_run() -> None:
    steps = install_steps(AGENT, OPTIONS, None, replace(BARE, live=False))
    assert steps and not [step for step in steps if isinstance(step, Run)]


def test_a_second_time_there_is_nothing_to_do(installed: tuple[SystemState, Record]) -> None:
    found, record = installed
    assert install_steps(AGENT, OPTIONS, record, found) == []


def test_another_option_writes_what_it_changes(installed: tuple[SystemState, Record]) -> None:
    found, record = installed
    steps = install_steps(AGENT, replace(OPTIONS, credentials="/keys"), record, found)
    assert [step.path for step in steps if isinstance(step, Write)] == [
        unit_path(AGENT),
        record_path(AGENT),
    ]
    assert Run(("systemctl", "daemon-reload")) in steps


def test_what_was_changed_by_hand_stays(installed: tuple[SystemState, Record]) -> None:
    found, record = installed
    found = replace(found, files={**found.files, config_path(AGENT): digest("by hand")})
    (left,) = install_steps(AGENT, OPTIONS, record, found)
    assert isinstance(left, Leave) and left.what == config_path(AGENT)
    steps = uninstall_steps(AGENT, record, found, purge=False)
    assert Remove(unit_path(AGENT)) in steps and Remove(config_path(AGENT)) not in steps
    assert (
        RemoveDirectory("/etc/sysusers.d") in steps
        and RemoveDirectory("/etc/edgeshard") not in steps
    )
    kept = [step for step in steps if isinstance(step, Write)]
    assert [step.path for step in kept] == [record_path(AGENT)], "what another run needs to know"
    record = from_text(kept[0].content, "record")
    found = replace(
        found,
        files={config_path(AGENT): digest("by hand"), record_path(AGENT): digest(kept[0].content)},
    )
    again = uninstall_steps(AGENT, record, found, purge=False)
    assert [type(step) for step in again if not isinstance(step, Run)] == [Leave]
    assert {Remove(config_path(AGENT)), Remove(record_path(AGENT))} == {
        step
        for step in uninstall_steps(AGENT, record, found, purge=True)
        if isinstance(step, Remove)
    }


def test_a_file_that_was_there_before_is_neither_written_nor_removed() -> None:
    before = replace(BARE, files={unit_path(AGENT): digest("somebody's")})
    steps = install_steps(AGENT, OPTIONS, None, before)
    assert unit_path(AGENT) not in [step.path for step in steps if isinstance(step, Write)]
    found, record = after(steps, before)
    assert Remove(unit_path(AGENT)) not in uninstall_steps(AGENT, record, found, purge=True)


def test_state_and_its_user_stay_unless_they_are_to_go(
    installed: tuple[SystemState, Record],
) -> None:
    found, record = installed
    found = replace(found, directories=found.directories | {state_directory(AGENT)})
    delete_user = Run(("userdel", "edgeshard-agent"))
    steps = uninstall_steps(AGENT, record, found, purge=False)
    assert steps[0] == Run(("systemctl", "disable", "--now", "edgeshard-agent.service"))
    assert delete_user not in steps and any(isinstance(step, Leave) for step in steps)
    steps = uninstall_steps(AGENT, record, found, purge=True)
    assert steps.index(RemoveDirectory(state_directory(AGENT), whole=True)) < steps.index(
        delete_user
    )
    assert steps[-2:] == [RemoveDirectory("/etc/sysusers.d"), RemoveDirectory("/etc/edgeshard")]


def test_a_user_who_was_there_before_stays() -> None:
    before = replace(BARE, user=True)
    found, record = after(install_steps(AGENT, OPTIONS, None, before), before)
    assert Run(("userdel", "edgeshard-agent")) not in uninstall_steps(
        AGENT, record, found, purge=True
    )


def test_a_directory_that_the_other_daemons_installation_made_goes_with_the_last_of_both() -> None:
    there = THERE | {"/etc/edgeshard", "/etc/sysusers.d"}
    before = replace(BARE, directories=there, shared=frozenset({"/etc/edgeshard"}))
    found, record = after(install_steps(AGENT, OPTIONS, None, before), before)
    assert uninstall_steps(AGENT, record, found, purge=False)[-1] == RemoveDirectory(
        "/etc/edgeshard"
    )
    assert RemoveDirectory("/etc/sysusers.d") not in uninstall_steps(
        AGENT, record, found, purge=False
    )


@pytest.mark.parametrize(
    "programs", ["/home/me/.venv/bin", "/root/bin", "relative/bin", "/opt/a b", "/opt/%n", "/o$p"]
)
def test_programs_that_a_unit_cannot_run_are_refused(programs: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        files(AGENT, replace(OPTIONS, programs=programs))
    assert refused.value.field == "bin"


def test_a_record_survives_being_written(installed: tuple[SystemState, Record]) -> None:
    record = installed[1]
    assert from_text(to_text(record), "record") == record
    with pytest.raises(DataLossError, match="damaged"):
        from_text("{}", record_path(AGENT))
