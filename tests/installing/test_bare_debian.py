"""A node's whole life on bare machines of Debian 12 without a compiler: installed, joined, upgraded
and removed.

Takes a real folder of wheels for this machine (`make folders`); each machine is booted by systemd
in a namespace.
"""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.documents import ROOT
from tests.installing.builds import make_build, make_package
from tests.installing.machines import Machine, difference, machines, make_root, why_no_machines
from tools.release.archives import version
from tools.release.wheel_folder import FOLDERS

TARGET = f"{platform.machine()}-py311-cpu"
"""Debian 12 has Python 3.11."""
FOLDER = FOLDERS / TARGET
NEXT = "9.9.9"
WHEELS, NEXT_WHEELS = "/srv/wheels", "/srv/next"
PORT = 8443
"""Another port of wheels than the one by custom."""
USERS = ("/etc/group", "/etc/gshadow", "/etc/passwd", "/etc/shadow")
OLD_USERS = tuple(f"{path}-" for path in USERS)
"""Debian's copies of these files from before the last change."""
OF_APT = ("/var/lib/dpkg", "/var/lib/apt", "/var/cache/apt", "/var/log", "/etc/.pwd.lock")
"""Files that any package changes or leaves."""
COMPILERS = "command -v cc gcc g++ clang"
MODEL = "/opt/edgeshard/current/lib/python3.11/site-packages/edgeshard/demo_model"

pytestmark = [pytest.mark.long, pytest.mark.netns, pytest.mark.timing, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive of a bare root."""
    if (reason := why_no_machines()) is not None:
        pytest.skip(reason)
    if not FOLDER.is_dir():
        pytest.skip(f"dist/folders/{TARGET} is missing: make folders ARGS='--target {TARGET}'")
    archive = tmp_path_factory.mktemp("root") / "debian.tar"
    make_root(archive)
    return archive


@pytest.fixture(scope="module")
def site(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Machine]]:
    """A coordinator and the node `first` as services on one machine, and two other machines that
    are bare."""
    directory = tmp_path_factory.mktemp("machines")
    make_build(FOLDER, directory / "next" / TARGET, NEXT)
    mounts = {FOLDERS: WHEELS, directory / "next": NEXT_WHEELS}
    with machines(root, ("first", "second", "packaged"), directory, mounts) as booted:
        first = booted["first"]
        first.run(f"sh {WHEELS}/{TARGET}/install.sh --wheels {WHEELS}/{TARGET}")
        first.run(f"edgectl init mill && edgectl install coordinator --site pki --wheels {WHEELS}")
        first.run(f"echo 'wheels_listen = \"0.0.0.0:{PORT}\"' >> /etc/edgeshard/coordinator.toml")
        first.run("systemctl enable --now edgeshard-coordinator")
        first.run(
            f"edgectl join $(edgectl token create --node first --host {first.address} --quiet)"
        )
        first.run(f"edgectl model add {MODEL} --name fairy-tales")
        yield booted


def joining_line(first: Machine, node: str) -> str:
    """The line for a machine that has Python and nothing of EdgeShard."""
    printed = first.run(f"edgectl token create --node {node} --host {first.address}")
    return next(line for line in printed.splitlines() if line.startswith("python3 -c"))


def architecture() -> str:
    """This machine's family, as Debian names it."""
    return {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]


def connects(first: Machine, count: int) -> None:
    first.waits_for(f"[ $(edgectl get nodes | grep -c ' connected ') = {count} ]")


def agent(machine: Machine) -> str:
    """The number of the service's process."""
    return machine.run(
        "systemctl is-active --quiet edgeshard-agent; systemctl show -P MainPID edgeshard-agent"
    ).strip()


def readme_lines() -> list[str]:
    """The lines that README has a reader type on the first machine, after the second one has
    joined."""
    section = (
        (ROOT / "README.md").read_text().partition("### Your second node")[2].partition("\n### ")[0]
    )
    *_, last = re.findall(r"```console\n(.*?)```", section, re.DOTALL)
    return str(last).splitlines()


def page_rows() -> dict[str, str]:
    """For each command, the files that it leaves on root's machine by docs/install.md."""
    text = (ROOT / "docs" / "install.md").read_text()
    rows = re.findall(r"^\| `(edgectl uninstall[^`]*)` \| ([^|]+) \|", text, re.MULTILINE)
    return dict(rows)


def test_a_second_node_joins_is_upgraded_and_leaves(site: dict[str, Machine]) -> None:
    first, second = site["first"], site["second"]
    assert second.run(f"{COMPILERS} || echo none") == "none\n"
    before = second.files()
    second.run(joining_line(first, "second"))
    connects(first, 2)
    for line in readme_lines():
        printed = first.run(line)
    assert len(printed.split()) > 20, printed
    stages = re.findall(
        r"^(\S+) +\d+:\d+ ", first.run("edgectl describe deployment both"), re.MULTILINE
    )
    assert sorted(stages) == ["first", "second"]

    # Upgraded from the site, whose port of wheels only the coordinator knows.
    assert "nothing to do" in second.run("edgectl upgrade")
    first.run(f"sed -i s:{WHEELS}:{NEXT_WHEELS}: /etc/edgeshard/coordinator.toml")
    first.run("systemctl restart edgeshard-coordinator")
    connects(first, 2)
    old = agent(second)
    second.run("edgectl upgrade")
    assert f"edgectl {NEXT}" in second.run("edgectl --version")
    new = agent(second)
    assert new != old
    second.run(f"grep -q versions/{NEXT}- /proc/{new}/maps")
    connects(first, 2)
    assert len(first.waits_for(readme_lines()[-1]).split()) > 20
    second.run("edgectl upgrade --back")
    assert f"edgectl {version()}" in second.run("edgectl --version")
    assert agent(second) != new

    # Removed: only the files that the page names are left.
    rows = page_rows()
    second.run("edgectl uninstall")
    left = difference(before, second.files())
    named = re.findall(r"/[\w/-]+\w", rows["edgectl uninstall"])
    unnamed = [path for path in left.added if not path.startswith(tuple(named))]
    assert not left.removed and not unnamed, left
    assert not set(left.changed) - {*USERS, *OLD_USERS}, left

    # Joined again, and removed with its state.
    second.run(joining_line(first, "third"))
    second.run("edgectl uninstall --purge --yes")
    left = difference(before, second.files())
    assert not left.added and not left.removed, left
    assert not set(left.changed) - set(OLD_USERS), left


def test_a_package_joins_is_upgraded_and_is_purged(site: dict[str, Machine]) -> None:
    package = ROOT / "dist" / f"edgeshard_{version()}+py311_{architecture()}.deb"
    if not package.exists():
        pytest.skip(f"dist/{package.name} is missing: make deb ARGS='--target {TARGET}'")
    first, machine = site["first"], site["packaged"]
    assert machine.run(f"{COMPILERS} || echo none") == "none\n"
    shutil.copy(package, machine.root / "srv" / "first.deb")
    make_package(package, machine.root / "srv" / "next.deb", f"{NEXT}+py311")
    before = machine.files()
    machine.run("apt-get install --yes /srv/first.deb")
    token = first.run(
        f"edgectl token create --node packaged --host {first.address} --quiet 2>/dev/null"
    )
    machine.run(f"edgectl join {token}")
    first.waits_for("edgectl get nodes | grep -q '^packaged .* connected '")

    assert "sudo apt-get install" in machine.run("edgectl upgrade || true")
    old = agent(machine)
    machine.run("apt-get install --yes /srv/next.deb")
    assert machine.run("dpkg-query --show --showformat '${Version}' edgeshard") == f"{NEXT}+py311"
    assert agent(machine) != old, "the service runs the new package"
    first.waits_for("edgectl get nodes | grep -q '^packaged .* connected '")

    machine.run("apt-get remove --yes edgeshard")
    left = difference(before, machine.files())
    page = (
        (ROOT / "docs" / "install.md")
        .read_text()
        .partition("`apt-get remove edgeshard` stops both daemons.")[2]
    )
    named = re.findall(r"/[\w/-]+\w", page.partition("`apt-get purge")[0])
    assert "/etc/edgeshard" in named
    unnamed = [path for path in left.added if not path.startswith((*named, *OF_APT))]
    assert not left.removed and not unnamed, left
    machine.run("apt-get purge --yes edgeshard")
    left = difference(before, machine.files())
    changes = [
        path for path in (*left.added, *left.removed, *left.changed) if not path.startswith(OF_APT)
    ]
    assert not set(changes) - set(OLD_USERS), left
