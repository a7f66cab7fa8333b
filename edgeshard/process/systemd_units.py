"""The systemd units of both daemons, as text. Pure.

deploy/systemd has them as `edgectl install` writes them under /opt/edgeshard.
docs/decisions/installing.md#choice-installed-units-are-recorded has the reasons for settings that
are left out.
"""

from __future__ import annotations

from enum import StrEnum


class Daemon(StrEnum):
    """A daemon that can be installed."""

    AGENT = "agent"
    COORDINATOR = "coordinator"

    @property
    def unit(self) -> str:
        """The name of its unit, of its user, of its program and of its state directory."""
        return f"edgeshard-{self.value}"


CREDENTIALS = ("ca.pem", "cert.pem", "key.pem")
"""The site's authority, the daemon's certificate and its key. systemd reads them as root; no one
else needs to."""

# Values with the unit's name contain {unit}.
_COMMON = """\
Type=notify
NotifyAccess=main
# Beaten only while the daemon gets on. SIGABRT then prints where every thread stands.
WatchdogSec=30
Environment=PYTHONFAULTHANDLER=1
TimeoutStartSec=300
# systemctl reload: settings that need no restart are read again.
ExecReload=kill -HUP $MAINPID
Restart=on-failure
RestartSec=5
# Denied, as after edgectl delete node: another try would get the same answer.
RestartPreventExitStatus=4
KillMode=mixed
TimeoutStopSec=15
SyslogIdentifier={unit}

User={unit}
StateDirectory={unit}
StateDirectoryMode=0700
UMask=0077
LimitNOFILE=65536
# A core would hold prompts, and so would swap.
LimitCORE=0
MemorySwapMax=0

NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome=yes
ProtectProc=invisible
ProtectClock=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes
PrivateTmp=yes
PrivateMounts=yes
RemoveIPC=yes
LockPersonality=yes
# Netlink lists the machine's network interfaces.
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged
SystemCallErrorNumber=EPERM
"""
_OF = {
    Daemon.AGENT: """\
MemoryMax=95%
# Short of memory, the kernel ends the process that measures layers; the agent goes on.
OOMPolicy=continue
# Accelerators, where there are any. PrivateDevices and MemoryDenyWriteExecute would break them.
DevicePolicy=closed
DeviceAllow=char-nvidia* rw
DeviceAllow=char-nvhost* rw
DeviceAllow=char-nvgpu* rw
DeviceAllow=char-drm rw
DeviceAllow=/dev/nvmap rw
""",
    Daemon.COORDINATOR: """\
MemoryMax=50%
SystemCallFilter=~@resources
PrivateDevices=yes
PrivateUsers=yes
MemoryDenyWriteExecute=yes
""",
}


def unit_text(
    daemon: Daemon, executable: str, config: str, credentials: str, ca_key: str = ""
) -> str:
    """The text of a unit. All paths are absolute.

    `credentials` is the directory of CREDENTIALS, "" without TLS; `ca_key` is the authority's key
    if the site makes certificates, else "".
    """
    command = f"{executable} --config {config} --state-dir ${{STATE_DIRECTORY}}"
    loads = ""
    for name in CREDENTIALS if credentials else ():
        loads += f"LoadCredential={name}:{credentials}/{name}\n"
        # Not %d, which systemd before 250 does not know.
        command += f" --tls-{name.removesuffix('.pem')} ${{CREDENTIALS_DIRECTORY}}/{name}"
    if not credentials:
        command += " --plaintext"
    if ca_key:
        loads += f"LoadCredential=ca.key:{ca_key}\n"
        command += " --ca-key ${CREDENTIALS_DIRECTORY}/ca.key"
    return (
        f"# Written by edgectl install {daemon}. Changes belong into a drop-in: systemctl edit "
        f"{daemon.unit}\n"
        "[Unit]\nDescription=EdgeShard "
        f"{daemon}\nWants=network-online.target\nAfter=network-online.target\n\n"
        f"[Service]\nExecStart={command}\n{loads}{_COMMON.format(unit=daemon.unit)}{_OF[daemon]}\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )
